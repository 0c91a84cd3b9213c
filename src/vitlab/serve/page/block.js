// An open block: every step of eqs. 2-3 of ViT for the chosen token, as numbers that can be pointed at.
import { clear, el, highest, number, percent, strongest, svg } from "./draw.js";
import { data, edit } from "./data.js";
import { openable } from "./cell.js";
import { source } from "./source.js";
import { Refused } from "./net.js";
import { dropHead, isDropped } from "./knobs.js";
import { matrix, scaleOf } from "./matrix.js";
import { heat } from "./heat.js";
import { setState, state } from "./state.js";
import { activation, equationInside, stepsInside } from "./steps.js";
import { tokenName } from "./photo.js";
import { drawWires, mark } from "./wires.js";
import { t } from "./text.js";

const LARGEST = 5; // weights whose values are shown one by one
let drawn = null; // the block that stands there; a new step only moves the mark

export function drawBlock(box) {
  const { block } = data;
  if (!block || block.layer !== state.layer) { if (!box.childElementCount) box.append(el("p", { class: "quiet", text: t("working") })); return; }
  if (drawn !== block || !box.querySelector(".stage")) { build(clear(box), block); drawn = block; }
  for (const stage of box.querySelectorAll(".stage")) {
    const here = stage.dataset.step === state.step;
    stage.classList.toggle("active", here);
    here ? stage.setAttribute("aria-current", "step") : stage.removeAttribute("aria-current");
  }
  mark(box);
}
export function forgetBlock() { drawn = null; }

function build(box, b) {
  const { model } = data, has = stepsInside(model), cells = [["norm1", "qkv"], ["scores"], ["softmax"], ["mix"], ["heads"], ["proj", "add1"], ["norm2", "fc1"], ["gelu"], ["fc2", "add2"]];
  for (const cell of cells) {
    const stages = cell.filter((step) => has.includes(step)).map((step) => stage(step, STAGES[step](b, model)));
    if (stages.length) box.append(el("div", { class: "cell" }, ...stages));
  }
  drawWires(box);
}

function stage(step, content) {
  return el("section", { class: "stage", "data-step": step, "aria-label": t(`step_${step}`) },
    el("button", { type: "button", class: "stage-head", onclick: () => setState({ step }) }, el("span", { class: "order", "aria-hidden": "true", text: String(stepsInside(data.model).indexOf(step) + 1) }), el("span", { text: t(`step_${step}`) })),
    el("div", { class: "equation", text: equationInside(data.model, step), tabindex: 0 }), ...content);
}

// A vector of D numbers as heads x d, so that a head's part is one row.
// opens(i): what number i is the sum of, as cell.js takes it; opened: where it is shown, if not below the matrix.
function vector(values, name, { opens = null, opened = null, size = values.length, columns = columnsOf(values.length), ...options } = {}) {
  if (!opens) return named(name, size, matrix(values, columns, { name, wide: 186, ...options }));
  const { box, open } = opened ?? openable(opens);
  const figure = named(name, size, matrix(values, columns, { name, wide: 186, onchoose: open, ...options }));
  return el("div", { class: "opens" }, figure, ...(opened ? [] : [box]));
}
// A number that is a row of a matrix times what this token is before it.
function ofMatrix(b, step, name, x, { token = () => b.token, channel = (i) => i, head } = {}) {
  return async (i) => {
    if (!source.cell) throw new Refused(422, t(source.capabilities.cell), "");
    const options = { layer: b.layer, token: token(i), step, channel: channel(i), ...(head === undefined ? {} : { head }) };
    const { inputs, weights, bias } = await source.cell(data.look, options, edit());
    return { name: `${name}[${channel(i) + 1}]`, letters: [x, "W"], inputs, weights, bias: bias[0], of: t("cell_channel"), term: (n) => String(n + 1), columns: columnsOf(inputs.length) };
  };
}
const named = (name, size, node) => el("figure", {}, node, el("figcaption", {}, el("b", { text: name }), ` ${size}`));
function columnsOf(count) {
  const { head_dim: d, heads } = data.model;
  if (count <= 64) return count;
  if (count % d === 0 && count / d <= 2 * heads) return d;
  for (let columns = Math.min(Math.ceil(Math.sqrt(count * 2.5)), 104); columns > 1; columns--) if (count % columns === 0) return columns;
  return 64;
}

// One number for each token, standing as the patches do; prefix tokens before them.
function grid(values, name, { signed, onpoint, words, scale = null }) {
  const { prefix, grid: [rows, columns] } = data.model, first = prefix.length, top = scale ?? (signed ? scaleOf(values) : highest(values));
  const chosen = state.token >= first ? [state.token - first] : [], choose = (i) => setState({ token: first + i });
  const whole = matrix(values.subarray(first), columns, { name, signed, scale: top, wide: 168, most: 21, onpoint: (i) => onpoint?.(i === null ? null : first + i), onchoose: choose, words: (i) => words(first + i), chosen });
  if (!first) return whole;
  return el("div", { class: "with-prefix" }, matrix(values.subarray(0, first), 1, { name: prefix.join(", "), signed, scale: top, cell: 16, onpoint, onchoose: (i) => setState({ token: i }), words, chosen: state.token < first ? [state.token] : [] }), whole);
}

// A token's name where there is little room: row and column of its patch.
function shortName(token) {
  const { prefix, grid: [, columns] } = data.model, patch = token - prefix.length;
  return patch < 0 ? tokenName(token) : `${Math.floor(patch / columns) + 1}, ${(patch % columns) + 1}`;
}

// The pixels of a patch, or a sign for a token without any.
function patchPicture(token) {
  const { prefix, grid: [rows, columns] } = data.model, patch = token - prefix.length, canvas = el("canvas", { class: "patch", width: 36, height: 24, role: "img", "aria-label": tokenName(token) }), pen = canvas.getContext("2d"), { sharp } = data.look;
  canvas.title = tokenName(token);
  if (patch < 0) { pen.fillStyle = "rgb(230,160,0)"; pen.fillRect(0, 0, 36, 24); return canvas; }
  pen.drawImage(sharp, ((patch % columns) * sharp.width) / columns, (Math.floor(patch / columns) * sharp.height) / rows, sharp.width / columns, sharp.height / rows, 0, 0, 36, 24);
  return canvas;
}

const chosenHead = (model) => t("head_n", { n: state.head + 1, all: model.heads });

const STAGES = {
  norm1: (b) => normed(b.input, b.norm1, "z", "LN(z)"),
  qkv(b, model) {
    const d = model.head_dim, row = (values) => (i) => `${tokenName(Math.floor(i / d))}, ${t("channel", { n: (i % d) + 1 })}: ${number(values[i], 4)}`;
    const from = model.norm === "post" ? "z" : "LN(z)", place = { token: (i) => Math.floor(i / d), channel: (i) => i % d, head: b.head };
    const turned = model.qk_norm || model.positions.includes("rotary"); // then query and key are not what the matrix gave
    const of = (step, more) => (turned && step !== "v" ? null : ofMatrix(b, step, step, from, more));
    const pairs = [["k", b.keys], ["v", b.values]].map(([name, values]) => [name, values, of(name, place), openable(of(name, place))]);
    const side = pairs.map(([name, values, opens, opened]) => vector(values, name, { size: `${values.length / d} × ${d}`, columns: d, wide: 92, words: row(values), opens, opened }));
    return [el("p", { class: "quiet", text: t("cell_hint", { head: chosenHead(model) }) }), vector(b.q, "q", { opens: of("q", { head: b.head }) }), el("div", { class: "side" }, ...side), ...pairs.map(([, , , { box }]) => box)];
  },
  scores(b, model) {
    const worked = el("div", { class: "worked" }), d = model.head_dim;
    const show = (n) => { clear(worked).append(...product(b, n ?? strongest(b.scores, 1)[0], d)); };
    show(null);
    return [grid(b.scores, "s", { signed: true, onpoint: (n) => { if (n !== null) show(n); }, words: (n) => `${tokenName(n)}: s = ${number(b.scores[n], 4)}` }), worked];
  },
  softmax(b) {
    const sum = el("p", { class: "worked-line" }), total = b.scores.reduce((a, s) => a + Math.exp(s), 0);
    const show = (n) => { sum.textContent = `${tokenName(n)}: exp(${number(b.scores[n])}) / ${number(total)} = ${number(b.weights[n], 4)}`; };
    show(strongest(b.weights, 1)[0]);
    const words = (n) => `${tokenName(n)}: ${percent(b.weights[n])}`;
    return [grid(b.weights, "A", { signed: false, onpoint: (n) => { if (n !== null) show(n); }, words }), named("A", `1 × ${b.weights.length}`, matrix(b.weights, b.weights.length, { name: "A", signed: false, wide: 186, cell: null, words, onpoint: (n) => { if (n !== null) show(n); } })), sum];
  },
  mix(b, model) {
    const d = model.head_dim, best = strongest(b.weights, LARGEST), scale = scaleOf(b.values), rest = 1 - best.reduce((a, n) => a + b.weights[n], 0);
    const list = best.map((n) => el("div", { class: "term" }, patchPicture(n), el("span", { text: `${number(b.weights[n], 3)} ×` }), matrix(b.values.subarray(n * d, (n + 1) * d), d, { name: `v ${tokenName(n)}`, wide: 118, scale, words: (i) => `v ${tokenName(n)}, ${t("channel", { n: i + 1 })}: ${number(b.weights[n], 4)} × ${number(b.values[n * d + i], 4)}` })));
    return [el("p", { class: "quiet", text: t("mix_largest", { n: LARGEST, rest: percent(Math.max(rest, 0)) }) }), ...list, vector(b.mixed, t("head_output"), { scale, opens: async (i) => ({
      name: `SA(z)[${i + 1}]`, letters: ["A", "v"], inputs: b.weights, weights: b.weights.map((_, n) => b.values[n * d + i]), bias: 0, of: t("cell_patch"), term: shortName, columns: columnsOf(b.weights.length),
    }) })];
  },
  heads(b, model) {
    const count = b.weights.length, maps = el("div", { class: "maps" }), first = model.prefix.length;
    for (let h = 0; h < model.heads; h++) {
      const canvas = el("canvas", { width: 96, height: Math.round((96 * data.look.sharp.height) / data.look.sharp.width) }), off = isDropped(state.layer, h);
      heat(canvas, data.look.sharp, model.grid, b.weights_by_head.subarray(h * count + first, (h + 1) * count));
      const pick = el("button", { type: "button", class: "map", "aria-pressed": String(h === state.head), "aria-label": t("head_n", { n: h + 1, all: model.heads }), onclick: () => setState({ head: h }) }, canvas, el("span", { text: String(h + 1) }));
      const drop = el("button", { type: "button", class: "drop", "aria-pressed": String(off), "aria-label": t(off ? "restore_head" : "drop_head", { layer: state.layer + 1, head: h + 1 }), title: t(off ? "restore_head" : "drop_head", { layer: state.layer + 1, head: h + 1 }), text: off ? "+" : "×", onclick: () => dropHead(state.layer, h, !off) });
      maps.append(el("div", { class: `head${off ? " off" : ""}` }, pick, ...(model.offers.includes("edit") ? [drop] : [])));
    }
    const d = model.head_dim;
    return [maps, vector(b.heads, "[SA₁; …; SAₕ]", { words: (i) => `${t("head_n", { n: Math.floor(i / d) + 1, all: model.heads })}, ${t("channel", { n: (i % d) + 1 })}: ${number(b.heads[i], 4)}` })];
  },
  proj: (b) => [vector(b.proj, "MSA(z)", { opens: ofMatrix(b, "proj", "MSA(z)", "SA") })],
  add1: (b) => added(b.proj, b.scale1, b.input, b.after_attention, ["MSA", "λ₁", "z", "z′"]),
  norm2: (b) => normed(b.after_attention, b.norm2, "z′", "LN(z′)"),
  fc1: (b, model) => [vector(b.fc1_pre, "a", { opens: ofMatrix(b, "fc1_pre", "a", model.norm === "post" ? "z′" : "LN(z′)") })],
  gelu(b, model) {
    return [...(model.gated ? [] : [curve(b.fc1_pre, b.fc1, model)]), vector(b.fc1, model.gated ? "σ(a) ⊙ b" : `${activation(model)}(a)`), el("p", { class: "quiet", text: t("silent", { share: percent(b.fc1.filter((v) => Math.abs(v) < 0.05).length / b.fc1.length) }) })];
  },
  fc2: (b) => [vector(b.fc2, "MLP(z′)", { opens: ofMatrix(b, "fc2", "MLP(z′)", "g") })],
  add2: (b) => added(b.fc2, b.scale2, b.after_attention, b.output, ["MLP", "λ₂", "z′", "zₗ"]),
};

function normed(before, after, from, to) {
  const mean = before.reduce((a, v) => a + v, 0) / before.length, deviation = Math.sqrt(before.reduce((a, v) => a + (v - mean) ** 2, 0) / before.length);
  return [vector(before, from), el("p", { class: "worked-line", text: `μ = ${number(mean)}, σ = ${number(deviation)}` }), vector(after, to)];
}

function added(branch, scale, from, sum, [branchName, scaleName, fromName, sumName]) {
  const top = scaleOf(sum), line = (i) => `${fromName} ${number(from[i], 4)} + ${scale ? `${number(scale[i], 4)} × ` : ""}${number(branch[i], 4)} = ${number(sum[i], 4)}`;
  const size = (values) => Math.sqrt(values.reduce((a, v) => a + v * v, 0)), part = scale ? branch.map((v, i) => v * scale[i]) : branch;
  return [...(scale ? [vector(scale, scaleName)] : []), vector(sum, sumName, { scale: top, words: (i) => (data.model.norm === "post" ? `${sumName} ${number(sum[i], 4)}` : line(i)) }), el("p", { class: "worked-line", text: t("added", { branch: scale ? `${scaleName} ⊙ ${branchName}` : branchName, part: number(size(part), 2), from: fromName, whole: number(size(from), 2) }) })];
}

// q . k / sqrt(d), every product in a table.
function product(b, n, d) {
  const key = b.keys.subarray(n * d, (n + 1) * d), { edit } = state, products = b.q.map((v, i) => v * key[i]), dot = products.reduce((a, v) => a + v, 0);
  const body = el("tbody", {}, ...Array.from({ length: d }, (_, i) => el("tr", {}, ...[i + 1, number(b.q[i]), number(key[i]), number(products[i])].map((text) => el("td", { text: String(text) })))));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...["", "q", "k", "q·k"].map((text) => el("th", { text, scope: "col" })))), body);
  const ends = [edit.scale_by_sqrt_d === false ? "" : ` / √${d}`, edit.temperature ? ` / ${edit.temperature}` : "", b.bias ? ` + ${number(b.bias[n])}` : ""].join("");
  return [el("p", { class: "worked-line", text: `${tokenName(n)}: ${number(dot)}${ends} = ${number(b.scores[n], 4)}` }), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "q · k" }, table)];
}

// The activation as a curve, and the numbers before (across) and after it (up) as dots.
function curve(before, after, model) {
  const wide = 196, high = 90, low = Math.min(-3, ...before), top = Math.max(3, ...before), across = (v) => ((v - low) / (top - low)) * wide, up = (v) => high - 8 - ((v + 0.3) / (top + 0.3)) * (high - 14);
  const figure = svg("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": `${activation(model)}(a)` });
  figure.append(svg("line", { class: "axis", x1: 0, x2: wide, y1: up(0), y2: up(0) }), svg("line", { class: "axis", x1: across(0), x2: across(0), y1: 0, y2: high }));
  const step = Math.max(1, Math.floor(before.length / 400));
  for (let i = 0; i < before.length; i += step) figure.append(svg("circle", { class: "dot", cx: across(before[i]).toFixed(1), cy: up(after[i]).toFixed(1), r: 1.8 }));
  return figure;
}
