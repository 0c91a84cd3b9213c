// The numbers behind what is shown: asked of the source when the state changes, and told to those who draw.
//
//   data.model    what models() says of the chosen model        data.rows    (L, h, N) of the chosen token
//   data.look     the image in that model                       data.block   the open block, or null
//   data.base     its forward pass unchanged                    data.heat    {method, shape, data, edit} for the photo
//   data.now      its forward pass with state.edit              data.walk    shapes, parameters and MACs of the steps
//
//   onData((name) => ...)      called when one of them has changed
import { source } from "./source.js";
import { highest } from "./draw.js";
import { isInside } from "./steps.js";
import { setState, state } from "./state.js";

export const data = { models: [], samples: [], exercises: [], index: null, image: null, model: null, look: null, base: null, now: null, rows: null, block: null, heat: null, walk: null };

const listeners = new Set(), turns = {}, WAIT = 120; // milliseconds that a knob rests before the pass is run again
export function onData(listener) { listeners.add(listener); return () => listeners.delete(listener); }
export function told(name) { for (const listener of [...listeners]) listener(name); }

let complain = () => {}, reopening = false;
export function onError(handler) { complain = handler; }

// The answer that was asked for last wins.
async function load(name, ask) {
  const mine = (turns[name] = (turns[name] ?? 0) + 1);
  try {
    const value = await ask();
    if (turns[name] !== mine) return undefined;
    data[name] = value;
    told(name);
    return value;
  } catch (error) {
    if (turns[name] !== mine) return undefined;
    if (error.status === 404 && name !== "look" && !reopening) { // the server keeps an image for a while only
      reopening = true;
      closeLook();
      openLook().finally(() => { reopening = false; });
    } else complain(error);
    return undefined;
  }
}

const offers = (part) => data.model?.offers.includes(part) ?? false;
export const isPlain = () => offers("block");
export const patches = () => data.model.grid[0] * data.model.grid[1];
export const tokens = () => data.model.prefix.length + patches();
export const edit = () => (offers("edit") ? state.edit : {});

// The class that the model puts first, or null.
function firstClass() {
  const all = data.base?.probabilities;
  return all ? all.indexOf(highest(all)) : null;
}

// The map that is drawn on the photo where nothing else is asked for.
export function heatMethod() {
  const known = data.model.methods.map((method) => method.name);
  if (state.heat && known.includes(state.heat)) return state.heat;
  return ["relevance", "grad_cam", "rollout"].find((name) => known.includes(name)) ?? null;
}

// What lies on the photo now: a method's name, "attention", that of the chosen token in the chosen layer and head, or "none".
export function shownHeat() {
  if (state.heat) return state.heat;
  return state.step === "block" || (data.model && isPlain() && isInside(data.model, state.step)) ? "attention" : heatMethod() ?? "none";
}

const editOf = (method) => (data.model.methods.find(({ name }) => name === method).edits ? edit() : {});

// A map that is seen, and is not of what is asked for now. One that is not seen waits: gradients of a large network take seconds.
function isHeatStale() {
  const method = heatMethod();
  if (!method || !data.heat || ["attention", "none"].includes(shownHeat())) return false;
  return data.heat.method !== method || data.heat.edit !== JSON.stringify(editOf(method));
}

// Before a new image or model: nothing of the old one stays.
export function closeLook() {
  for (const name of ["look", "base", "now", "rows", "block", "heat", "walk"]) { data[name] = null; turns[name] = (turns[name] ?? 0) + 1; }
}

export async function openLook() {
  const look = await load("look", () => source.open(data.model.name, data.image));
  if (!look) return;
  const base = await load("base", () => (isPlain() ? source.forward(look, {}) : offers("predict") ? source.predict(look) : {}));
  if (!base || data.look !== look) return;
  const pass = loadPass();
  await loadHeat();
  if (isPlain() && state.token === null && data.look === look) setState({ token: data.model.prefix.length + brightestPatch() });
  else loadToken();
  await pass;
  if (offers("walk") && data.look === look) load("walk", () => source.walk(look)); // last: it counts multiply-adds, which takes a while
}

function brightestPatch() {
  const [rows, columns] = data.model.grid;
  return data.heat && data.heat.data.length === rows * columns ? data.heat.data.indexOf(highest(data.heat.data)) : Math.floor(rows / 2) * columns + Math.floor(columns / 2);
}

const loadPass = () => load("now", () => (isPlain() && Object.keys(edit()).length ? source.forward(data.look, edit()) : data.base));

async function loadHeat() {
  const method = heatMethod();
  if (!method || !data.look) return;
  const byClass = data.model.methods.find((one) => one.name === method).by_class, look = data.look, change = editOf(method);
  const number = !byClass ? null : isPlain() ? firstClass() : (data.model.labels ?? []).indexOf(data.base.scores[0].label);
  await load("heat", async () => ({ method, number, edit: JSON.stringify(change), ...(await source.heat(look, method, number, change)) }));
}

function loadToken() {
  if (!isPlain() || state.token === null || !data.look) return;
  const { look } = data;
  load("rows", () => source.rows(look, state.token, edit()));
  loadBlock();
}

function loadBlock() {
  if (!isPlain() || state.token === null || !data.look) return;
  if (!isInside(data.model, state.step)) { if (data.block) load("block", async () => null); return; }
  const { look } = data, { layer, head, token } = state;
  load("block", async () => ({ layer, head, token, ...(await source.block(look, { layer, head, token }, edit())) }));
}

let timer = null;
export function refresh(changed) {
  if (!data.look) return;
  if (changed.has("edit")) {
    clearTimeout(timer);
    timer = setTimeout(() => { loadPass(); loadToken(); if (isHeatStale()) loadHeat(); }, WAIT);
  } else if (changed.has("token")) loadToken();
  else if (["layer", "head", "step"].some((name) => changed.has(name))) loadBlock();
  if (!changed.has("edit") && (isHeatStale() || (changed.has("heat") && data.base && !data.heat))) loadHeat();
}
