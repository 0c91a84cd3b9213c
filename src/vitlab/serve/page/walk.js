// 2. The forward pass step by step, and what the answer would be after each block.
import { array } from "./net.js";
import { bars, board, clear, el, frame, heat, highest, paint } from "./draw.js";
import { t } from "./text.js";
import { follow, rowOf } from "./looking.js";

const kindOf = (name) => name.split(".")[0];
const titleOf = (name) => (kindOf(name) === "blocks" ? t("step_blocks", { n: Number(name.split(".")[1]) + 1 }) : t(`step_${name}`));
const short = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} G` : n >= 1e6 ? `${(n / 1e6).toFixed(2)} M` : n >= 1e3 ? `${(n / 1e3).toFixed(2)} k` : String(n));

export async function show(panel, page, current) {
  const name = page.focus, about = page.about(name);
  const [view, walk] = await Promise.all([page.view(name), page.part(name, "walk")]);
  if (!current()) return;
  const list = el("ol", { class: "steps" }), detail = el("div", { class: "card", id: "step", "aria-live": "polite" });
  let chosen = 0;
  const choose = (at) => { chosen = at; [...list.querySelectorAll("button")].forEach((b, i) => (i === at ? b.setAttribute("aria-current", "step") : b.removeAttribute("aria-current"))); page.guard(() => step(detail, page, view, walk, walk.steps[at])); };
  walk.steps.forEach((one, at) => list.append(el("li", {}, el("button", { type: "button", "data-step": one.name, onclick: () => { choose(at); if (innerWidth < 736) detail.scrollIntoView(); } }, el("span", { text: titleOf(one.name) }), el("span", { class: "shape", text: one.shape.join(" × ") })))));
  panel.append(el("div", { class: "split" }, el("div", {}, el("h2", { text: t("steps") }), list), el("div", {}, detail, walk.by_depth ? depth(page, about, view, walk) : "")));
  choose(chosen); // on a phone the step stands below the list: a click leads there
}

async function step(box, page, view, walk, one) {
  const kind = kindOf(one.name), zoom = Math.max(2, Math.round(380 / view.width));
  clear(box).append(el("h2", { text: titleOf(one.name) }), el("p", { text: t(`why_${kind}`) }), el("div", { class: "equation", text: one.equation, tabindex: 0 }));
  const facts = [[t("shape"), one.shape.join(" × ")], [t("parameters"), one.parameters.toLocaleString("en")], [t("macs"), short(one.macs)]];
  box.append(el("dl", {}, ...facts.flatMap(([a, b]) => [el("dt", { text: a }), el("dd", { text: b })])));
  const canvas = board(view, zoom, titleOf(one.name));
  if (kind === "picture") { paint(canvas, view); box.append(canvas); }
  else if (kind === "patches") { apart(canvas, view, walk.grid); box.append(canvas); }
  else if (one.lengths) {
    const before = one.lengths.length - walk.grid[0] * walk.grid[1], patches = one.lengths.slice(Math.max(before, 0));
    const low = Math.min(...patches), high = highest(patches);
    heat(canvas, view, walk.grid, patches, { least: low, most: high, strength: 0.85 });
    box.append(canvas, el("p", { class: "quiet", text: t("lengths", { low: low.toFixed(2), high: high.toFixed(2) }) }));
    if (before > 0) box.append(el("p", { class: "quiet", text: t("prefixes", { list: walk.prefix.map((p, i) => `${p} (${one.lengths[i].toFixed(2)})`).join(", ") }) }));
    if (kind === "positions" && page.about(page.focus).offers.includes("positions")) await positions(box, page, view, walk);
  }
  if (kind === "softmax" && walk.by_depth) box.append(bars(best(walk, walk.by_depth.length - 1)));
}

async function positions(box, page, view, walk) {
  const { data, shape } = await page.part(page.focus, "positions", null, array), grid = [shape[0], shape[1]], count = grid[0] * grid[1];
  const canvas = board(view, Math.max(2, Math.round(380 / view.width)), t("likeposition"));
  const draw = (patch) => { heat(canvas, view, grid, data.subarray(patch * count, (patch + 1) * count), { least: -1, most: 1, strength: 0.9 }); frame(canvas, grid, patch); };
  follow(canvas, grid, draw);
  draw(0);
  box.append(el("p", { class: "quiet", text: t("likeposition") }), canvas);
}

function apart(canvas, view, [rows, columns]) {
  const pen = canvas.getContext("2d"), high = canvas.height / rows, wide = canvas.width / columns, gap = Math.max(1, wide * 0.12);
  pen.imageSmoothingEnabled = false;
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++)
    pen.drawImage(view, (c * view.width) / columns, (r * view.height) / rows, view.width / columns, view.height / rows, c * wide + gap / 2, r * high + gap / 2, wide - gap, high - gap);
}

function best(walk, depth) {
  const row = walk.by_depth[depth];
  return row.map((probability, i) => ({ label: walk.labels[i], probability })).sort((a, b) => b.probability - a.probability).slice(0, 5);
}

function depth(page, about, view, walk) {
  const all = walk.by_depth.length, title = el("h2"), answers = el("div", { id: "by-depth" });
  const canvas = board(view, Math.max(2, Math.round(380 / view.width)), t("tab_attention"));
  const slider = el("input", { type: "range", min: 1, max: all, value: all, id: "depth", "aria-label": t("depth", { n: "", all }) });
  const draw = () => page.guard(async () => {
    const n = Number(slider.value);
    title.textContent = t("depth", { n, all });
    slider.setAttribute("aria-valuetext", title.textContent);
    clear(answers).append(bars(best(walk, n - 1)));
    const { data, shape } = await page.part(page.focus, "attention", { layer: n - 1 }, array);
    if (Number(slider.value) === n) heat(canvas, view, walk.grid, rowOf(data, shape, about, null, null));
  });
  slider.addEventListener("input", draw);
  draw();
  return el("div", { class: "card" }, title, slider, answers, el("p", { class: "quiet", text: t("depthnote") }), canvas);
}
