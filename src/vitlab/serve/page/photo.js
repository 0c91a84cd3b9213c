// The photo: heat drawn smoothly on it, the chosen patch, masked patches; a click chooses or masks.
import { source } from "./source.js";
import { clear, el, highest, number, percent } from "./draw.js";
import { brightest, frame, heat, MANY, neighbour, paint, patchAt } from "./heat.js";
import { changeEdit, isEdited, setState, state } from "./state.js";
import { data, isPlain, shownHeat } from "./data.js";
import { language, orElse, t } from "./text.js";

const canvas = document.getElementById("photo"), note = document.getElementById("photo-note"), choice = document.getElementById("heat-choice");
let painting = null, drawn = ""; // painting: while the pointer is down, true masks, false unmasks
const numbers = new WeakMap(); // of the objects that a drawing depends on
let count = 0;
function numberOf(object) {
  if (!object) return 0;
  if (!numbers.has(object)) numbers.set(object, ++count);
  return numbers.get(object);
}

export function tokenName(token) {
  const { prefix, grid } = data.model, patch = token - prefix.length;
  if (patch < 0) return orElse(`token_${prefix[token]}`, prefix[token]);
  return t("patch_at", { r: Math.floor(patch / grid[1]) + 1, c: (patch % grid[1]) + 1 });
}

// Where the chosen token looks, of one layer and head: (N,).
export function attentionRow(layer = state.layer, head = state.head) {
  if (!data.rows) return null;
  const [, heads, count] = data.rows.shape;
  return data.rows.data.subarray((layer * heads + head) * count, (layer * heads + head + 1) * count);
}

export function drawPhoto() {
  const { look, model } = data;
  if (!look) return;
  const ratio = look.sharp.height / look.sharp.width, wide = Math.min(720, Math.round(canvas.clientWidth * devicePixelRatio) || 560);
  if (canvas.width !== wide || canvas.height !== Math.round(wide * ratio)) [canvas.width, canvas.height] = [wide, Math.round(wide * ratio)];
  const shown = shownHeat(), row = isPlain() ? attentionRow() : null;
  const now = [wide, language(), shown, numberOf(look), numberOf(data.heat), numberOf(data.rows), state.token, JSON.stringify(state.edit), ...(shown === "attention" ? [state.layer, state.head] : [])].join();
  if (now === drawn) return; // most steps change nothing here
  drawn = now;
  note.textContent = "";
  if (shown === "attention" && row) {
    const values = row.subarray(model.prefix.length), most = values.indexOf(highest(values));
    heat(canvas, look.sharp, model.grid, values);
    note.textContent = t("looks", { token: tokenName(state.token), layer: state.layer + 1, head: state.head + 1, share: percent(values.reduce((a, b) => a + b, 0)), most: tokenName(model.prefix.length + most) });
    if (values.length >= MANY) note.textContent += ` ${t("percentile", { n: number(brightest(values), 4) })}`;
  } else if (shown !== "none" && shown !== "attention" && data.heat) {
    const { method, shape, data: values, number: which } = data.heat, { signed, by_class: byClass, title } = model.methods.find((one) => one.name === method), most = signed ? highest(values.map(Math.abs)) : null;
    heat(canvas, look.sharp, shape, values, signed ? { least: -most, most } : { least: Math.min(...values) });
    note.textContent = byClass ? t("heat_class", { method: orElse(`m_${method}`, title), label: model.labels?.[which] ?? t("answer") }) : t("heat_plain", { method: orElse(`m_${method}`, title) });
    if (isEdited() && data.heat.edit === "{}") note.textContent += ` ${t("heat_unedited")}`;
  } else paint(canvas, look.sharp);
  if (!isPlain()) return;
  drawMask();
  if (state.token !== null && state.token >= model.prefix.length) frame(canvas, model.grid, state.token - model.prefix.length);
}

function drawMask() {
  const pen = canvas.getContext("2d"), [rows, columns] = data.model.grid, high = canvas.height / rows, wide = canvas.width / columns;
  for (const patch of state.edit.mask_patches ?? []) {
    pen.fillStyle = "rgba(20,20,24,.92)";
    pen.fillRect((patch % columns) * wide, Math.floor(patch / columns) * high, wide, high);
    pen.strokeStyle = "rgba(255,255,255,.5)";
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo((patch % columns) * wide + 3, Math.floor(patch / columns) * high + 3);
    pen.lineTo((patch % columns + 1) * wide - 3, (Math.floor(patch / columns) + 1) * high - 3);
    pen.stroke();
  }
}

const isPainting = () => document.getElementById("paint").checked;

export function setMask(patch, masked) {
  const now = new Set(state.edit.mask_patches ?? []);
  if (now.has(patch) === masked || (masked && now.size + 1 >= data.model.grid[0] * data.model.grid[1])) return; // one patch at least stays
  masked ? now.add(patch) : now.delete(patch);
  changeEdit({ mask_patches: [...now].sort((a, b) => a - b) });
}

const isMasked = (patch) => (state.edit.mask_patches ?? []).includes(patch);

canvas.addEventListener("pointerdown", (event) => {
  const patch = data.look && isPlain() ? patchAt(event, canvas, data.model.grid) : null;
  if (patch === null) return;
  if (!isPainting()) { setState({ token: data.model.prefix.length + patch }); return; }
  canvas.setPointerCapture(event.pointerId);
  painting = !isMasked(patch);
  setMask(patch, painting);
});
canvas.addEventListener("pointermove", (event) => {
  const patch = painting === null ? null : patchAt(event, canvas, data.model.grid);
  if (patch !== null) setMask(patch, painting);
});
for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => { painting = null; });
canvas.addEventListener("keydown", (event) => {
  if (!data.look || !isPlain()) return;
  const patch = Math.max((state.token ?? 0) - data.model.prefix.length, 0), to = neighbour(event.key, patch, data.model.grid);
  if (event.key.startsWith("Arrow")) { event.preventDefault(); event.stopPropagation(); }
  if (to !== null) { setState({ token: data.model.prefix.length + to }); document.getElementById("spoken").textContent = tokenName(state.token); }
  if ((event.key === " " || event.key === "Enter") && isPainting()) { event.preventDefault(); event.stopPropagation(); setMask(patch, !isMasked(patch)); }
});

export function drawHeatChoice() {
  const { model } = data, options = [["", t("heat_auto")], ...model.methods.map((one) => [one.name, orElse(`m_${one.name}`, one.title)]), ...(isPlain() ? [["attention", t("m_attention")]] : []), ["none", t("m_none")]];
  clear(choice).append(...options.map(([value, text]) => el("option", { value, text, selected: (state.heat ?? "") === value })));
  choice.disabled = Boolean(source.capabilities.heat);
}
choice.addEventListener("change", () => setState({ heat: choice.value || null }));
new ResizeObserver(() => drawPhoto()).observe(canvas);
