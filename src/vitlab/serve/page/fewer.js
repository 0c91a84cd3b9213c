// Tokens that are merged or dropped: which, what it does to the answer, and to the time.
import { source } from "./source.js";
import { bars, clear, el } from "./draw.js";
import { board } from "./heat.js";
import { data } from "./data.js";
import { t } from "./text.js";

export const offered = ({ model }) => Boolean(model?.offers.includes("fewer"));

export async function show(box, panel) {
  const { model } = data, look = await panel.look(model.name), patches = model.grid[0] * model.grid[1], most = Math.max(1, Math.floor(patches / model.depth) - 1);
  if (!panel.current()) return;
  const method = el("select", { id: "method" }, ...["tome", "evit", "random"].filter((m) => m !== "evit" || model.prefix.includes("class")).map((m) => el("option", { value: m, text: t(`f_${m}`) })));
  const amount = el("input", { type: "range", id: "amount" }), amountText = el("span"), layer = el("input", { type: "range", id: "after", min: 1, max: model.depth, value: model.depth }), layerText = el("span");
  const canvas = board(look.sharp, t("groupnote"), 420), answers = el("div", { id: "fewer-answers", "aria-live": "polite" });
  canvas.id = "groups";
  box.append(el("div", { class: "split" }, el("div", {}, canvas, el("p", { class: "quiet", text: t("groupnote") })),
    el("div", {}, el("div", { class: "controls" }, el("label", {}, t("method"), method), el("label", {}, amountText, amount), el("label", {}, layerText, layer)), answers)));
  let found = null, asked = 0;
  const range = () => { const tome = method.value === "tome"; Object.assign(amount, tome ? { min: 0, max: most, value: Math.ceil(most / 2) } : { min: 20, max: 100, value: 70 }); };
  const draw = () => {
    const at = Number(layer.value) - 1;
    layerText.textContent = t("after", { n: at + 1, tokens: found.tokens[at] });
    colour(canvas, look.sharp, model.grid, found.groups[at].flat());
  };
  const change = () => panel.guard(async () => {
    const tome = method.value === "tome", n = Number(amount.value), mine = ++asked;
    amountText.textContent = t(tome ? "removes" : "keeps", { n });
    const answer = await source.fewer(look, tome ? `tome:r=${n}` : `${method.value}:keep=${n / 100}`);
    if (mine !== asked || !panel.current()) return;
    found = answer;
    draw();
    clear(answers).append(el("h3", { text: t("alltokens", { ms: found.milliseconds.plain.toFixed(1) }) }), bars(found.plain), el("h3", { text: t("fewertokens", { ms: found.milliseconds.fewer.toFixed(1) }) }), bars(found.scores));
    if (found.milliseconds.fewer > found.milliseconds.plain && found.tokens.at(-1) < found.tokens[0]) answers.append(el("p", { class: "quiet", text: t("slower") }));
  });
  method.addEventListener("change", () => { range(); change(); });
  amount.addEventListener("input", change);
  layer.addEventListener("input", () => found && draw());
  range();
  await change();
}

// Patches of one token get their mean colour; dropped ones are black.
export function colour(canvas, view, [rows, columns], groups) {
  const off = new OffscreenCanvas(columns, rows), small = off.getContext("2d", { willReadFrequently: true });
  small.drawImage(view, 0, 0, columns, rows);
  const pixels = small.getImageData(0, 0, columns, rows).data, sums = new Map();
  groups.forEach((group, i) => { const s = sums.get(group) || [0, 0, 0, 0]; for (let c = 0; c < 3; c++) s[c] += pixels[4 * i + c]; s[3]++; sums.set(group, s); });
  const pen = canvas.getContext("2d"), high = canvas.height / rows, wide = canvas.width / columns;
  pen.drawImage(view, 0, 0, canvas.width, canvas.height);
  groups.forEach((group, i) => {
    const s = sums.get(group);
    if (group >= 0 && s[3] === 1) return;
    pen.fillStyle = group < 0 ? "#000" : `rgb(${s.slice(0, 3).map((v) => Math.round(v / s[3])).join(",")})`;
    pen.fillRect((i % columns) * wide, Math.floor(i / columns) * high, wide, high);
  });
  pen.strokeStyle = "rgba(255,255,255,.75)";
  pen.lineWidth = 1;
  pen.beginPath();
  for (let i = 0; i < groups.length; i++) {
    const c = i % columns, r = Math.floor(i / columns);
    if (c + 1 < columns && groups[i] !== groups[i + 1]) { pen.moveTo((c + 1) * wide, r * high); pen.lineTo((c + 1) * wide, (r + 1) * high); }
    if (r + 1 < rows && groups[i] !== groups[i + columns]) { pen.moveTo(c * wide, (r + 1) * high); pen.lineTo((c + 1) * wide, (r + 1) * high); }
  }
  pen.stroke();
}
