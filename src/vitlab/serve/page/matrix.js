// A matrix as heat: one cell for each number, its value under the pointer or the arrow keys.
import { el, highest, number } from "./draw.js";

const dark = () => document.documentElement.dataset.theme === "dark";
const between = (a, b, share) => a.map((part, i) => Math.round(part + share * (b[i] - part)));
const SHADES = 255, scales = new Map(); // colours between zero and the largest value, by theme and kind
// 2 SHADES + 1 colours from -1 to 1, as the four bytes of a pixel. Zero has the colour of the card. Signed: blue below, red above.
function coloursOf(signed) {
  const key = `${dark()} ${signed}`;
  if (scales.has(key)) return scales.get(key);
  const zero = dark() ? [30, 33, 39] : [255, 255, 255], high = dark() ? [255, 110, 80] : [190, 30, 30], low = dark() ? [70, 150, 255] : [20, 80, 190], one = dark() ? [255, 196, 60] : [120, 32, 130];
  const bytes = new Uint8ClampedArray(4 * (2 * SHADES + 1));
  for (let i = -SHADES; i <= SHADES; i++) bytes.set([...between(zero, !signed ? one : i < 0 ? low : high, Math.abs(i) / SHADES), 255], 4 * (i + SHADES));
  scales.set(key, new Uint32Array(bytes.buffer));
  return scales.get(key);
}

// The size that gets the full colour: of many numbers the 99th percentile, so that one outlier does not hide the others.
export function scaleOf(values) {
  const sizes = Float32Array.from(values, Math.abs);
  if (sizes.length <= 64) return highest(sizes) || 1;
  sizes.sort();
  return sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes.at(-1) || 1;
}

// name: for screen readers; words(i): text of cell i; chosen: cells with a frame; onpoint(i): the pointer is on cell i, null: gone.
export function matrix(values, columns, { name, signed = true, scale = null, words = null, onpoint = null, onchoose = null, chosen = [], wide = 196, cell = null, most = 26 } = {}) {
  const rows = Math.ceil(values.length / columns), top = scale ?? scaleOf(values);
  const side = cell ?? Math.max(1, Math.min(most, Math.floor(wide / columns))), high = rows * side > 170 ? 170 / rows : side;
  const canvas = el("canvas", { class: "matrix", width: columns, height: rows, tabindex: 0, role: "application", "aria-roledescription": "matrix", "aria-label": `${name}, ${rows} × ${columns}` });
  canvas.style.width = `${Math.min(columns * side, wide)}px`;
  canvas.style.height = `${Math.max(rows * high, rows === 1 ? 13 : 6)}px`; // a single row must be easy to point at
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer), colours = coloursOf(signed);
  for (let i = 0; i < values.length; i++) pixels[i] = colours[SHADES + Math.round(SHADES * Math.min(Math.max(values[i] / top, -1), 1))];
  canvas.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0);
  const box = el("div", { class: "cells" }, canvas);
  for (const i of chosen) box.append(mark(i, rows, columns, "chosen"));
  const here = mark(0, rows, columns, "here");
  here.hidden = true;
  box.append(here);
  const text = (i) => (words ? words(i) : `${name} [${rows > 1 ? `${Math.floor(i / columns) + 1}, ` : ""}${(i % columns) + 1}] = ${number(values[i], 4)}`);
  let at = null;
  const point = (i, spoken) => {
    at = i;
    here.hidden = i === null;
    if (i !== null) place(here, i, rows, columns);
    tell(i === null ? "" : text(i), canvas, spoken);
    onpoint?.(i);
  };
  const cellAt = (event) => {
    const area = canvas.getBoundingClientRect(), c = Math.floor(((event.clientX - area.left) / area.width) * columns), r = Math.floor(((event.clientY - area.top) / area.height) * rows);
    const i = r * columns + c;
    return c < 0 || r < 0 || c >= columns || i >= values.length ? null : i;
  };
  canvas.addEventListener("pointermove", (event) => { const i = cellAt(event); if (i !== at) point(i, false); });
  canvas.addEventListener("pointerleave", () => point(null, false));
  canvas.addEventListener("click", (event) => { const i = cellAt(event); if (i !== null && onchoose) onchoose(i); });
  canvas.addEventListener("blur", () => point(null, false));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (event.key === "Enter" && at !== null && onchoose) { event.preventDefault(); event.stopPropagation(); onchoose(at); return; }
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const to = at === null ? 0 : at + move;
    if (to >= 0 && to < values.length) point(to, true);
  });
  return box;
}

function mark(i, rows, columns, kind) {
  const node = el("span", { class: `mark ${kind}`, "aria-hidden": "true" });
  place(node, i, rows, columns);
  return node;
}

function place(node, i, rows, columns) {
  Object.assign(node.style, { left: `${(100 * (i % columns)) / columns}%`, top: `${(100 * Math.floor(i / columns)) / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%` });
}

// The text beside the pointer; spoken to screen readers where keys led there.
function tell(text, anchor, spoken) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const area = anchor.getBoundingClientRect(), wide = tip.offsetWidth;
  tip.style.left = `${Math.max(4, Math.min(area.left + area.width / 2 - wide / 2, innerWidth - wide - 4))}px`;
  tip.style.top = `${area.top > 40 ? area.top - tip.offsetHeight - 6 : area.bottom + 6}px`;
  if (spoken) document.getElementById("spoken").textContent = text;
}
