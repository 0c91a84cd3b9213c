// What the page shows, as one plain object, and the URL that holds it. Everything on the page follows from it:
//
//   sample  name of a sample image, or null where the image is the visitor's own
//   model   name of the model that is looked into
//   layer   block, from 0; words and the URL count from 1
//   head    attention head, from 0; words and the URL count from 1
//   token   the chosen query: a number in the token list, prefix tokens first; null: the brightest patch
//   step    where in the forward pass: a name from steps.js ("image", "embed", "block", "scores", ...).
//           A step inside a block means that the block of `layer` is open
//   edit    what is changed in the pass, as the server reads it: {mask_patches: [n], drop_heads: [[layer, head]],
//           temperature, scale_by_sqrt_d, positions: "removed" | "shuffled", seed}; {}: nothing is changed
//   panel   name of the open panel (panels.js), or null
//   story   name of the open story (stories.js), "all" for their list, or null; scene: which of its scenes, from 0
//   heat    what is drawn on the photo: a method's name, "attention", "none"; null: what suits the step
//
//   setState({ layer: 2, step: "scores" })      changes some of it, tells everyone, writes the URL
//   const stop = subscribe((state, changed) => ...)      changed: a Set of names; stop() ends it
export const DEFAULTS = { sample: null, model: null, layer: 0, head: 0, token: null, step: "image", edit: {}, panel: null, heat: null, story: null, scene: 0 };
export const state = { ...DEFAULTS };

const listeners = new Set();

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function setState(patch) {
  const changed = new Set(Object.keys(patch).filter((name) => JSON.stringify(patch[name]) !== JSON.stringify(state[name])));
  if (!changed.size) return;
  for (const name of changed) {
    if (!(name in DEFAULTS)) throw new Error(`the state has no ${name}`);
    state[name] = patch[name];
  }
  writeUrl();
  for (const listener of [...listeners]) listener(state, changed);
}

// The edit with one part changed; a part that is back at what the model does is left out.
const UNCHANGED = { mask_patches: [], drop_heads: [], temperature: 1, scale_by_sqrt_d: true, positions: "kept" };
export function changeEdit(patch) {
  const edit = { ...state.edit, ...patch };
  for (const [name, value] of Object.entries(UNCHANGED)) if (JSON.stringify(edit[name]) === JSON.stringify(value)) delete edit[name];
  if (edit.positions !== "shuffled") delete edit.seed;
  setState({ edit });
}
export const isEdited = () => Object.keys(state.edit).length > 0;

// Not at every move of a slider: browsers allow a few changes of the URL in a second.
const WRITTEN_AFTER = 100; // milliseconds
let writing = null;
function writeUrl() {
  writing ??= setTimeout(() => { writing = null; writeUrlNow(); }, WRITTEN_AFTER);
}

function writeUrlNow() {
  const parts = new URLSearchParams();
  for (const name of ["sample", "model", "step", "panel", "heat"]) if (state[name] && state[name] !== DEFAULTS[name]) parts.set(name, state[name]);
  parts.set("layer", state.layer + 1);
  parts.set("head", state.head + 1);
  if (state.token !== null) parts.set("token", state.token);
  if (state.story) parts.set("story", state.story);
  if (state.scene) parts.set("scene", state.scene + 1);
  if (isEdited()) parts.set("edit", JSON.stringify(state.edit));
  history.replaceState(null, "", `#${parts}`);
}

// What the URL says, with the defaults for what it leaves out or says wrongly.
export function readUrl() {
  const parts = new URLSearchParams(location.hash.slice(1)), found = { ...DEFAULTS };
  const whole = (name) => (/^\d{1,6}$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : null);
  for (const name of ["sample", "model", "step", "panel", "heat", "story"]) if (parts.get(name)) found[name] = parts.get(name);
  for (const name of ["layer", "head", "scene"]) found[name] = Math.max((whole(name) ?? 1) - 1, 0);
  found.token = whole("token");
  try {
    const edit = JSON.parse(parts.get("edit") ?? "{}");
    if (edit && typeof edit === "object" && !Array.isArray(edit)) found.edit = edit;
  } catch { /* a damaged link shows the model unchanged */ }
  return found;
}
