// A masked autoencoder paints the patches that are hidden from it.
import { source } from "./source.js";
import { el } from "./draw.js";
import { board, follow, pixels } from "./heat.js";
import { data } from "./data.js";
import { t } from "./text.js";

const able = ({ models }) => models.find((model) => model.offers.includes("painted"));
export const offered = (known) => Boolean(able(known));

export async function show(box, panel) {
  const model = able(data), look = await panel.look(model.name), mask = new Uint8Array(model.grid[0] * model.grid[1]);
  if (!panel.current()) return;
  let seed = 0, painting = false, asked = 0, at = -1;
  const hide = el("input", { type: "range", id: "hide", min: 1, max: 99, value: 75 }), hideText = el("span"), again = el("button", { type: "button", text: t("again") });
  const seen = board(look.view, t("left"), look.view.width), made = board(look.view, t("made"), look.view.width);
  for (const [canvas, id] of [[seen, "mae-seen"], [made, "mae-made"]]) { canvas.id = id; canvas.className = "seen large"; }
  box.append(el("h3", { text: t("mae") }), el("p", { class: "quiet", text: t("maehow") }), el("label", {}, hideText, hide), again,
    el("div", { class: "row figures" }, el("figure", {}, seen, el("figcaption", { class: "quiet", text: t("left") })), el("figure", {}, made, el("figcaption", { class: "quiet", text: t("made") }))));
  const draw = (options) => panel.guard(async () => {
    const mine = ++asked, found = await source.reconstruction(look, options);
    if (mine !== asked || !panel.current()) return;
    const [, high, wide] = found.shape, size = high * wide * 3, bytes = Uint8Array.from(atob(found.pixels), (one) => one.charCodeAt(0));
    mask.set([...found.mask].map(Number));
    [[seen, 1], [made, 2]].forEach(([canvas, which]) => pixels(canvas, bytes.subarray(which * size, (which + 1) * size), wide, high));
    made.dataset.done = String(Number(made.dataset.done || 0) + 1);
  });
  const random = () => { hideText.textContent = t("hide", { n: hide.value }); return draw({ percent: hide.value, seed }); };
  const toggle = (patch) => { mask[patch] = 1 - mask[patch]; if (mask.some((m) => m) && mask.some((m) => !m)) draw({ mask: mask.join("") }); };
  hide.addEventListener("input", random);
  again.addEventListener("click", () => { seed++; random(); });
  seen.addEventListener("pointerdown", () => { painting = true; at = -1; });
  for (const kind of ["pointerup", "pointerleave"]) seen.addEventListener(kind, () => { painting = false; });
  follow(seen, model.grid, (patch) => { if (painting && patch !== at) toggle(patch); at = patch; }, -1);
  seen.addEventListener("keydown", (event) => { if (event.key === " " || event.key === "Enter") { event.preventDefault(); toggle(Math.max(at, 0)); } });
  await random();
}
