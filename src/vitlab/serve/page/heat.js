// Heat on a photo: values of the patches, drawn smoothly over it; and a photo whose patches can be pointed at.
import { el, highest } from "./draw.js";

const STOPS = [[0, 0, 4], [40, 11, 84], [101, 21, 110], [159, 42, 99], [212, 72, 66], [245, 125, 21], [250, 193, 39], [252, 255, 164]];
export function heatColour(value) { // 0 to 1
  const at = Math.min(Math.max(value, 0), 1) * (STOPS.length - 1), low = Math.min(Math.floor(at), STOPS.length - 2), share = at - low;
  return STOPS[low].map((part, i) => Math.round(part + share * (STOPS[low + 1][i] - part)));
}

const SHADES = 1024, scales = new Map();
// By strength, the colour of each shade as the four bytes of a pixel: the higher, the less of the photo is seen.
function coloursOf(strength) {
  if (scales.has(strength)) return scales.get(strength);
  const bytes = new Uint8ClampedArray(4 * SHADES);
  for (let i = 0; i < SHADES; i++) bytes.set([...heatColour(i / (SHADES - 1)), 255 * Math.min(strength * (0.55 + (0.6 * i) / (SHADES - 1)), 1)], 4 * i);
  scales.set(strength, new Uint32Array(bytes.buffer));
  return scales.get(strength);
}

// A canvas for the photo that a model sees; `sharp` is that of a look.
export function board(sharp, name, width = Math.min(sharp.width, 560)) {
  return el("canvas", { width, height: Math.round((width * sharp.height) / sharp.width), "aria-label": name, role: "img" });
}

export function paint(canvas, picture) {
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = true;
  pen.imageSmoothingQuality = "high";
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return pen;
}

// Of many patches a few may be far above all others (outlier tokens): the 99th percentile is then the brightest.
export const MANY = 100;
export function brightest(values) {
  if (values.length < MANY) return highest(values);
  const sorted = Float32Array.from(values).sort();
  return sorted[Math.floor(0.99 * (sorted.length - 1))] || sorted.at(-1);
}

// values: one for each patch, row by row. Where they are low, more of the photo is seen.
export function heat(canvas, picture, [rows, columns], values, { strength = 0.72, least = 0, most = null } = {}) {
  const pen = paint(canvas, picture), top = most ?? brightest(values), scaled = new Float32Array(rows * columns);
  for (let i = 0; i < scaled.length; i++) scaled[i] = top > least ? Math.min(Math.max((values[i] - least) / (top - least), 0), 1) : 0;
  const fine = refined(scaled, rows, columns), image = new ImageData(fine.columns, fine.rows);
  const pixels = new Uint32Array(image.data.buffer), colours = coloursOf(strength);
  for (let i = 0; i < fine.values.length; i++) pixels[i] = colours[Math.round((SHADES - 1) * fine.values[i])];
  const layer = new OffscreenCanvas(fine.columns, fine.rows);
  layer.getContext("2d").putImageData(image, 0, 0);
  pen.drawImage(layer, 0, 0, canvas.width, canvas.height);
  return pen;
}

// Values between the centres of the patches, by Catmull-Rom splines, which go through the values themselves.
function refined(values, rows, columns) {
  const times = Math.max(1, Math.min(8, Math.floor(256 / Math.max(rows, columns)))), spline = weights(times);
  const across = stretched(values, rows, columns, times, spline, (r, c) => r * columns + c);
  const wide = columns * times, both = stretched(across, wide, rows, times, spline, (c, r) => r * wide + c, true);
  return { values: both, rows: rows * times, columns: wide };
}

function weights(times) {
  return Array.from({ length: times }, (_, i) => {
    const place = (i + 0.5) / times - 0.5, shift = Math.floor(place), t = place - shift;
    return [shift, [0.5 * (-t + 2 * t * t - t * t * t), 0.5 * (2 - 5 * t * t + 3 * t * t * t), 0.5 * (t + 4 * t * t - 3 * t * t * t), 0.5 * (-t * t + t * t * t)]];
  });
}

function stretched(values, lines, length, times, spline, at, down = false) {
  const found = new Float32Array(lines * length * times);
  for (let line = 0; line < lines; line++) for (let i = 0; i < length; i++) for (let j = 0; j < times; j++) {
    const [shift, four] = spline[j];
    let sum = 0;
    for (let k = 0; k < 4; k++) sum += four[k] * values[at(line, Math.min(Math.max(i + shift + k - 1, 0), length - 1))];
    const place = i * times + j;
    found[down ? place * lines + line : line * length * times + place] = Math.min(Math.max(sum, 0), 1);
  }
  return found;
}

export function frame(canvas, [rows, columns], patch, colour = "#00e5ff", width = null) {
  const pen = canvas.getContext("2d"), high = canvas.height / rows, wide = canvas.width / columns, line = width ?? Math.max(2, Math.min(wide, high) / 10);
  const box = [(patch % columns) * wide, Math.floor(patch / columns) * high, wide, high];
  pen.lineWidth = line + 2;
  pen.strokeStyle = "rgba(0,0,0,.55)"; // seen on light photos too
  pen.strokeRect(...box);
  pen.lineWidth = line;
  pen.strokeStyle = colour;
  pen.strokeRect(...box);
}

// The mean colour of each patch: [r, g, b] by number.
export function patchColours(view, [rows, columns]) {
  const pen = new OffscreenCanvas(columns, rows).getContext("2d", { willReadFrequently: true });
  pen.imageSmoothingQuality = "high";
  pen.drawImage(view, 0, 0, columns, rows);
  const { data } = pen.getImageData(0, 0, columns, rows);
  return Array.from({ length: rows * columns }, (_, i) => [data[4 * i], data[4 * i + 1], data[4 * i + 2]]);
}

export function patchAt(event, canvas, [rows, columns]) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * columns), row = Math.floor(((event.clientY - box.top) / box.height) * rows);
  return row < 0 || column < 0 || row >= rows || column >= columns ? null : row * columns + column;
}

export function neighbour(key, patch, [rows, columns]) {
  const row = Math.floor(patch / columns), column = patch % columns;
  const to = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1] }[key];
  return to && to[0] >= 0 && to[0] < rows && to[1] >= 0 && to[1] < columns ? to[0] * columns + to[1] : null;
}

// Calls draw(patch) for the patch under the pointer, or that the arrow keys lead to.
export function follow(canvas, grid, draw, start = 0) {
  let at = start;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  const go = (patch) => { at = patch; draw(patch); };
  canvas.addEventListener("pointermove", (event) => { const patch = patchAt(event, canvas, grid); if (patch !== null && patch !== at) go(patch); });
  canvas.addEventListener("pointerdown", (event) => { const patch = patchAt(event, canvas, grid); if (patch !== null) go(patch); });
  canvas.addEventListener("keydown", (event) => {
    const to = neighbour(event.key, at, grid);
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    event.stopPropagation();
    if (to !== null) go(to);
  });
}

// The pixels of an array (rows, columns, 3), each as a square.
export function pixels(canvas, bytes, width, height) {
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) image.data.set([bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2], 255], 4 * i);
  const off = new OffscreenCanvas(width, height);
  off.getContext("2d").putImageData(image, 0, 0);
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.drawImage(off, 0, 0, canvas.width, canvas.height);
}
