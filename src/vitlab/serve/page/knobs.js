// The knobs: what is changed in the pass. The answer follows.
import { clear, el } from "./draw.js";
import { data } from "./data.js";
import { changeEdit, isEdited, setState, state } from "./state.js";
import { t } from "./text.js";

const dropped = () => state.edit.drop_heads ?? [];
export const isDropped = (layer, head) => dropped().some(([l, h]) => l === layer && h === head);
export function dropHead(layer, head, drop) {
  const others = dropped().filter(([l, h]) => l !== layer || h !== head);
  changeEdit({ drop_heads: drop ? [...others, [layer, head]].sort((a, b) => a[0] - b[0] || a[1] - b[1]) : others });
}

let knobs = null;
export function buildKnobs() {
  const temperature = el("input", { type: "range", id: "temperature", min: -3, max: 3, step: 0.05, oninput: () => changeEdit({ temperature: Number((2 ** Number(temperature.value)).toFixed(3)) }) });
  const unscaled = el("input", { type: "checkbox", id: "sqrt", onchange: () => changeEdit({ scale_by_sqrt_d: !unscaled.checked }) });
  const positions = el("select", { id: "positions", onchange: () => changeEdit({ positions: positions.value, seed: state.edit.seed ?? 0 }) }, ...["kept", "shuffled", "removed"].map((value) => el("option", { value, text: t(`positions_${value}`) })));
  const reshuffle = el("button", { type: "button", id: "reshuffle", text: t("reshuffle"), onclick: () => changeEdit({ seed: (state.edit.seed ?? 0) + 1 }) });
  const drop = el("button", { type: "button", id: "drop-head", onclick: () => dropHead(state.layer, state.head, !isDropped(state.layer, state.head)) });
  const reset = el("button", { type: "button", id: "reset", text: t("reset"), onclick: () => setState({ edit: {} }) });
  const warmth = el("span"), heads = el("p", { class: "quiet", id: "dropped" }), masked = el("p", { class: "quiet", id: "masked" });
  knobs = { temperature, warmth, unscaled, positions, reshuffle, drop, heads, masked, reset };
  clear(document.getElementById("knob-list")).append(el("label", {}, warmth, temperature), el("label", { class: "row" }, unscaled, el("span", { text: t("no_sqrt") })), el("label", {}, el("span", { text: t("positions_knob") }), positions), reshuffle, drop, heads, masked, reset);
  drawKnobs();
}

export function drawKnobs() {
  const able = Boolean(data.model?.offers.includes("edit")), { edit } = state;
  document.getElementById("knobs").hidden = document.getElementById("paint-row").hidden = !able;
  if (!able || !knobs) return;
  const warmth = edit.temperature ?? 1, off = isDropped(state.layer, state.head), masked = (edit.mask_patches ?? []).length;
  knobs.temperature.value = Math.log2(warmth);
  knobs.warmth.textContent = t("temperature", { n: warmth.toFixed(2) });
  knobs.temperature.setAttribute("aria-valuetext", warmth.toFixed(2));
  knobs.unscaled.checked = edit.scale_by_sqrt_d === false;
  knobs.positions.value = edit.positions ?? "kept";
  knobs.reshuffle.hidden = edit.positions !== "shuffled";
  knobs.drop.textContent = t(off ? "restore_head" : "drop_head", { layer: state.layer + 1, head: state.head + 1 });
  knobs.heads.hidden = !dropped().length;
  knobs.heads.textContent = t("dropped", { list: dropped().map(([l, h]) => `${l + 1}.${h + 1}`).join(", ") });
  knobs.masked.hidden = !masked;
  knobs.masked.textContent = t("masked", { n: masked });
  knobs.reset.disabled = !isEdited();
}
