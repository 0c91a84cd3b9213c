// The picture of the network, left to right: ribbons from the photo into tokens, what is added to them, the blocks, the head.
// Down the picture stand the tokens, prefix tokens first: a token keeps its height from the first strip to the last.
import { clear, el, highest, lowest, number, percent, strongest } from "./draw.js";
import { heat, heatColour, patchColours } from "./heat.js";
import { data, isPlain, patches, tokens } from "./data.js";
import { setState, state } from "./state.js";
import { isInside, stepsAfter, stepsBefore, stepsInside } from "./steps.js";
import { attentionRow, tokenName } from "./photo.js";
import { isDropped } from "./knobs.js";
import { drawBlock } from "./block.js";
import { t } from "./text.js";

const RIBBONS = 74, PATCHES = 22, STRIP = 12, FAN = 64, SHOWN_RIBBONS = 40; // pixels; ribbons of the largest weights, more cannot be told apart
const UNFOLDS = 450; // milliseconds that a block takes to open
const box = document.getElementById("network"), still = matchMedia("(prefers-reduced-motion: reduce)");
let parts = null, colours = [], motion = 1, high = 400, flowWide = 84; // motion: how far the active step has been drawn, 0 to 1

const heightOf = (token) => ((token + 0.5) / tokens()) * high;
const styles = new Map(); // colours of the page by theme and name: to compute a style takes long
function css(name) {
  const key = `${document.documentElement.dataset.theme} ${name}`;
  if (!styles.has(key)) styles.set(key, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return styles.get(key);
}
const colourOf = (token) => (token < data.model.prefix.length ? [230, 160, 0] : colours[token - data.model.prefix.length]);
const rgba = ([r, g, b], alpha) => `rgba(${r},${g},${b},${alpha})`;

export function buildNetwork() {
  clear(box);
  parts = null;
  if (!data.look) return;
  if (!isPlain()) { box.append(el("p", { class: "card", text: t("noplain", { model: data.model.name }) })); return; }
  const { model, look } = data, main = document.getElementById("main"), phone = main.clientWidth < 736;
  colours = patchColours(look.view, model.grid);
  const free = main.clientWidth - 556 - RIBBONS - PATCHES - FAN - 50 * (stepsBefore(model).length - 2); // beside photo, answer and what stands before the blocks
  flowWide = phone ? 76 : Math.round(Math.min(Math.max(free / model.depth - 24, 44), 120));
  const thumbHigh = (flowWide * look.sharp.height) / look.sharp.width;
  high = phone ? 320 : Math.round(Math.min(Math.max(main.clientHeight - thumbHigh - 140, 320), 620));
  parts = { blocks: [], strips: {}, buttons: {}, open: null };
  const before = stepsBefore(model).slice(2), others = model.prefix.some((name) => name !== "class");
  const shortcut = (step) => { parts.buttons[step] = stepButton(step, t(step === "prefix" && others ? "short_prefixes" : `short_${step}`)); return parts.buttons[step]; };
  parts.ribbons = canvas(RIBBONS, t("ribbons"));
  parts.patches = canvas(PATCHES, t("patch_strip"));
  clickable(parts.patches);
  parts.buttons.patches = stepButton("patches", t("short_patches"));
  box.append(column("ribbons", parts.buttons.patches, el("div", { class: "pair" }, parts.ribbons, parts.patches)));
  for (const step of before) box.append(column("adder", shortcut(step), strip(step)));
  for (let layer = 0; layer < model.depth; layer++) box.append(blockColumn(layer));
  parts.fan = canvas(FAN, t("fan"));
  const after = stepsAfter(model);
  box.append(column("fan", "", parts.fan, el("div", { class: "stack" }, ...after.map(shortcut))));
  drawNetwork();
}

function canvas(width, name) {
  const ratio = Math.min(devicePixelRatio || 1, 2), node = el("canvas", { width: width * ratio, height: high * ratio, role: "img", "aria-label": name });
  node.style.width = `${width}px`;
  node.style.height = `${high}px`;
  node.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  return node;
}

const column = (kind, head, ...rest) => el("div", { class: `column ${kind}` }, el("div", { class: "column-head" }, head), ...rest);
const stepButton = (step, text) => el("button", { type: "button", class: "step", "data-step": step, text, onclick: () => setState({ step }) });

function strip(step) {
  parts.strips[step] = canvas(STRIP, t("strip"));
  clickable(parts.strips[step]);
  return parts.strips[step];
}

function clickable(node) {
  node.addEventListener("click", (event) => {
    const area = node.getBoundingClientRect(), token = Math.floor(((event.clientY - area.top) / area.height) * tokens());
    if (token >= 0 && token < tokens()) setState({ token });
  });
}

function blockColumn(layer) {
  const head = el("button", { type: "button", class: "step", "data-layer": layer, "aria-expanded": "false", onclick: () => setState({ layer, step: state.layer === layer && isInside(data.model, state.step) ? "block" : stepsInside(data.model)[0] }) });
  const flow = canvas(flowWide, t("flow", { layer: layer + 1 })), thumb = el("canvas", { class: "thumb", width: 2 * flowWide, height: Math.round((2 * flowWide * data.look.sharp.height) / data.look.sharp.width), role: "img", "aria-label": t("thumb", { layer: layer + 1 }) });
  thumb.style.width = `${flowWide}px`;
  flow.addEventListener("click", () => setState({ layer, step: stepsInside(data.model)[0] }));
  thumb.addEventListener("click", () => setState({ layer, step: stepsInside(data.model)[0] }));
  const lens = el("p", { class: "lens" }), inside = el("div", { class: "inside" });
  const closed = el("div", { class: "closed" }, flow, thumb, lens), node = el("section", { class: "column block", "aria-label": t("short_block", { n: layer + 1 }) }, el("div", { class: "column-head" }, head), el("div", { class: "pair" }, closed, inside, strip(`blocks.${layer}`)));
  parts.blocks.push({ node, head, flow, thumb, lens, inside, closed });
  return node;
}

export function drawNetwork() {
  if (!parts || !data.look) return;
  const now = [data.now ?? data.base, data.rows, state.token, state.head, document.documentElement.dataset.theme], same = parts.drawn?.every((value, i) => value === now[i]);
  if (!same) { drawRibbons(); drawPatches(); drawLengths(); drawFan(); }
  const open = openLayer(), draw = () => { for (let layer = 0; layer < data.model.depth; layer++) drawLayer(layer, layer === open, same); markStep(); };
  open === parts.open ? draw() : unfold(draw, open);
  parts.open = open;
  parts.drawn = now;
}

// The block that stands open: that of the state once its numbers are there, until then the one that was open.
function openLayer() {
  if (!isInside(data.model, state.step)) return null;
  return data.block?.layer === state.layer ? state.layer : parts.open;
}

// A block opens where it stands: it grows out of its box, its steps appear in their order, and the others move aside.
function unfold(draw, open) {
  const columns = [...box.children], from = new Map(columns.map((node) => [node, node.getBoundingClientRect().left])), small = open === null ? null : parts.blocks[open].closed.getBoundingClientRect();
  draw();
  reveal("auto");
  if (still.matches) return;
  const zoom = box.currentCSSZoom ?? 1, timing = { duration: UNFOLDS, easing: "cubic-bezier(.2,.7,.2,1)" };
  for (const node of columns) {
    const by = (from.get(node) - node.getBoundingClientRect().left) / zoom;
    if (Math.abs(by) > 1) node.animate([{ transform: `translateX(${by}px)` }, { transform: "none" }], timing);
  }
  if (parts.open !== null && parts.open !== open) parts.blocks[parts.open].closed.animate([{ opacity: 0 }, { opacity: 1 }], timing);
  if (open === null) return;
  const { inside } = parts.blocks[open], large = inside.getBoundingClientRect();
  inside.animate([{ clipPath: `inset(0 ${Math.max(large.width - small.width, 0) / zoom}px ${Math.max(large.height - small.height, 0) / zoom}px 0)` }, { clipPath: "inset(0 0 0 0)" }], timing);
  [...inside.querySelectorAll(".stage")].forEach((stage, i, all) => stage.animate([{ opacity: 0, transform: "translateX(-12px)" }, { opacity: 1, transform: "none" }], { ...timing, delay: (i / all.length) * UNFOLDS, fill: "backwards" }));
}

// From where a patch stands in the photo (its row) to its place in the list.
function drawRibbons() {
  const pen = fresh(parts.ribbons, RIBBONS), [rows, columns] = data.model.grid, first = data.model.prefix.length, all = patches(), photo = document.getElementById("photo").clientHeight;
  const shown = state.step === "patches" ? motion : 1, thick = Math.max(high / tokens(), 0.6);
  const curve = (patch) => {
    const row = Math.floor(patch / columns), from = ((row + (patch % columns + 0.5) / columns * 0.9 + 0.05) / rows) * photo, to = heightOf(first + patch);
    ribbon(pen, 0, from, RIBBONS * shown, from + (to - from) * shown);
  };
  const step = Math.max(1, Math.floor(all / 400));
  for (let patch = 0; patch < all; patch += step) { pen.strokeStyle = rgba(colours[patch], 0.5); pen.lineWidth = thick * step * 0.8; curve(patch); }
  if (state.token !== null && state.token >= first) { pen.strokeStyle = css("--chosen"); pen.lineWidth = Math.min(Math.max(thick, 2.5), 4); curve(state.token - first); }
}

function drawPatches() {
  const pen = fresh(parts.patches, PATCHES), { view } = data.look, [rows, columns] = data.model.grid, first = data.model.prefix.length, pitch = high / tokens();
  pen.imageSmoothingEnabled = false;
  for (let i = 0; i < first; i++) { pen.fillStyle = rgba([230, 160, 0], 1); pen.fillRect(2, heightOf(i) - Math.max(pitch, 3) / 2, 18, Math.max(pitch, 3) * 0.9); }
  const wide = view.width / columns, tall = view.height / rows, gap = pitch > 4 ? 1 : 0;
  for (let patch = 0; patch < patches(); patch++) pen.drawImage(view, (patch % columns) * wide, Math.floor(patch / columns) * tall, wide, tall, 2, heightOf(first + patch) - pitch / 2, 18, pitch - gap);
  outline(pen, PATCHES);
}

// Strips of tokens, as bright as they are long.
function drawLengths() {
  const pass = data.now ?? data.base;
  if (!pass?.lengths) return;
  for (const [step, node] of Object.entries(parts.strips)) {
    const all = pass.lengths[step === "embed" ? "patch_embed" : step], pen = fresh(node, STRIP);
    if (!all) continue;
    const missing = tokens() - all.length, pitch = high / tokens(), low = lowest(all), top = highest(all);
    all.forEach((length, i) => { pen.fillStyle = rgba(heatColour(0.12 + 0.8 * (top > low ? (length - low) / (top - low) : 0.5)), 1); pen.fillRect(1, heightOf(i + missing) - pitch / 2, 10, Math.max(pitch - (pitch > 3 ? 0.7 : 0), 0.5)); });
    outline(pen, STRIP);
    const at = state.token === null ? undefined : all[state.token - missing];
    node.title = t("length_range", { low: number(low, 2), high: number(top, 2), here: at === undefined ? "–" : number(at, 2) });
  }
}

function outline(pen, width) {
  if (state.token === null) return;
  const tall = Math.max(high / tokens(), 4);
  pen.strokeStyle = css("--chosen");
  pen.lineWidth = 2;
  pen.strokeRect(1, heightOf(state.token) - tall / 2, width - 2, tall);
}

// What flows into the chosen token in this block: a ribbon from each token it looks at, as thick as its weight.
function drawLayer(layer, open, same) {
  const { node, head, flow, thumb, lens, inside, closed } = parts.blocks[layer], row = attentionRow(layer);
  node.classList.toggle("open", open);
  node.classList.toggle("opening", !open && state.layer === layer && isInside(data.model, state.step));
  head.setAttribute("aria-expanded", String(open));
  head.textContent = t(open ? "close_block" : "short_block", { n: layer + 1 });
  closed.hidden = open;
  inside.hidden = !open;
  if (open) drawBlock(inside); else clear(inside);
  node.classList.toggle("dropped", isDropped(layer, state.head));
  if (!row) return;
  drawFlow(layer, fresh(flow, flowWide), row);
  if (same) return; // a new step moves ribbons only
  heat(thumb, data.look.sharp, data.model.grid, row.subarray(data.model.prefix.length));
  const pass = data.now ?? data.base, depth = pass.by_depth?.[layer];
  if (!depth) return;
  const first = strongest(depth, 1)[0];
  lens.textContent = data.model.labels ? `${data.model.labels[first]} ${percent(depth[first])}` : number(depth[first]);
  lens.title = t("lens");
}

function drawFlow(layer, pen, row) {
  const active = state.step === "block" && state.layer === layer, share = active ? motion : 1, to = heightOf(state.token), most = highest(row), faint = Math.max(1, Math.floor(tokens() / 64));
  pen.lineWidth = 0.7;
  for (let i = 0; i < tokens(); i += faint) { pen.strokeStyle = rgba(colourOf(i), 0.3); pen.beginPath(); pen.moveTo(0, heightOf(i)); pen.lineTo(flowWide, heightOf(i)); pen.stroke(); }
  for (const i of strongest(row, SHOWN_RIBBONS)) {
    const weight = row[i] / most;
    if (weight < 0.03) continue;
    pen.strokeStyle = rgba(colourOf(i), 0.25 + 0.65 * weight);
    pen.lineWidth = 0.6 + 7 * weight;
    ribbon(pen, 0, heightOf(i), (flowWide - 14) * share, heightOf(i) + (to - heightOf(i)) * share);
  }
  pen.strokeStyle = css("--chosen");
  pen.lineWidth = 2.5;
  pen.beginPath();
  pen.moveTo(0, to);
  pen.lineTo(flowWide * (active ? share : 1), to);
  pen.stroke();
  pen.fillStyle = css("--chosen");
  pen.beginPath();
  pen.arc(active ? (flowWide - 6) * share : flowWide - 14, to, active ? 6 : 4.5, 0, 7);
  pen.fill();
}

// What the head reads: one token, or all patches.
function drawFan() {
  const { reads, prefix } = data.model, pen = fresh(parts.fan, FAN), middle = high / 2, share = stepsAfter(data.model).includes(state.step) ? motion : 1;
  const read = reads === null ? Array.from({ length: patches() }, (_, i) => prefix.length + i) : [reads], step = Math.max(1, Math.floor(read.length / 128));
  for (let i = 0; i < read.length; i += step) {
    pen.strokeStyle = reads === null ? rgba(colourOf(read[i]), 0.45) : rgba([230, 160, 0], 0.9);
    pen.lineWidth = reads === null ? 1.2 : 5;
    ribbon(pen, 0, heightOf(read[i]), (FAN - 10) * share, heightOf(read[i]) + (middle - heightOf(read[i])) * share);
  }
  pen.fillStyle = css("--accent");
  pen.beginPath();
  pen.arc(FAN - 10, middle, 7, 0, 7);
  pen.fill();
  parts.fan.title = t(reads === null ? "reads_mean" : "reads_token", { token: reads === null ? "" : tokenName(reads) });
}

function ribbon(pen, x0, y0, x1, y1) {
  const middle = (x0 + x1) / 2;
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.bezierCurveTo(middle, y0, middle, y1, x1, y1);
  pen.stroke();
}

function fresh(node, width) {
  const pen = node.getContext("2d");
  pen.clearRect(0, 0, width, high);
  return pen;
}

function markStep() {
  for (const [step, button] of Object.entries(parts.buttons)) mark(button, step === state.step);
  parts.blocks.forEach(({ head, node }, layer) => { const here = state.layer === layer && state.step === "block"; mark(head, here); node.classList.toggle("active", here); });
}
const mark = (button, here) => (here ? button.setAttribute("aria-current", "step") : button.removeAttribute("aria-current"));

// Scrolls to the part that the active step belongs to.
export function reveal(behavior) {
  if (!parts) return;
  const main = document.getElementById("main"), inside = isInside(data.model, state.step), column = parts.blocks[state.layer];
  const part = inside ? box.querySelector(`.stage[data-step="${state.step}"]`) ?? column.node : state.step === "block" ? column.node : parts.buttons[state.step];
  if (main.scrollHeight <= main.clientHeight && main.scrollWidth <= main.clientWidth) {
    if (innerWidth < 736 && part) { // on a phone the page scrolls up and down, the picture from side to side
      const across = (inside ? column.inside : part).getBoundingClientRect();
      box.scrollBy({ left: across.left - box.getBoundingClientRect().left - (inside ? 12 : (box.clientWidth - across.width) / 2), behavior: "auto" });
      if (inside) part.scrollIntoView({ block: "nearest", inline: "nearest", behavior });
    }
    return;
  }
  if (!part) { main.scrollTo({ left: 0, top: 0, behavior }); return; }
  const frame = main.getBoundingClientRect(), area = part.getBoundingClientRect(), across = (inside ? column.inside : part).getBoundingClientRect();
  const left = frame.left + 298, right = frame.right - 256, wide = across.width > right - left || inside; // between photo and answer
  const dx = wide || across.left < left ? across.left - left : Math.max(across.right - right, 0), dy = area.top < frame.top + 8 || area.height > frame.height ? area.top - frame.top - 8 : Math.max(area.bottom - frame.bottom + 8, 0);
  main.scrollTo({ left: main.scrollLeft + dx, top: main.scrollTop + dy, behavior });
}

// One frame of the active step; share runs from 0 to 1.
export function moveTo(share) {
  if (share === motion) return; // a step that rests is not drawn again
  motion = share;
  if (!parts || !data.look) return;
  if (state.step === "patches") drawRibbons();
  else if (state.step === "block") { const row = attentionRow(state.layer); if (row) drawFlow(state.layer, fresh(parts.blocks[state.layer].flow, flowWide), row); }
  else if (stepsAfter(data.model).includes(state.step)) drawFan();
}
