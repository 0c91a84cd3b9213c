// Images, heat on them, bars and lines. Text is always set as text, never as markup.
export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "text") node.textContent = value;
    else if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function svg(tag, options = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(options)) key === "text" ? (node.textContent = value) : node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const STOPS = [[0, 0, 4], [40, 11, 84], [101, 21, 110], [159, 42, 99], [212, 72, 66], [245, 125, 21], [250, 193, 39], [252, 255, 164]];
export function heatColour(value) { // 0 to 1
  const at = Math.min(Math.max(value, 0), 1) * (STOPS.length - 1), low = Math.min(Math.floor(at), STOPS.length - 2), share = at - low;
  return STOPS[low].map((part, i) => Math.round(part + share * (STOPS[low + 1][i] - part)));
}

export function highest(values) { let most = -Infinity; for (const value of values) if (value > most) most = value; return most; }

// A canvas that shows an image in the model's pixels, each as `zoom` squares.
export function board(view, zoom, name) {
  const canvas = el("canvas", { class: "big", width: view.width * zoom, height: view.height * zoom, "aria-label": name, role: "img" });
  return canvas;
}

export function paint(canvas, view) {
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(view, 0, 0, canvas.width, canvas.height);
  return pen;
}

// values: one for each patch, row by row. The highest is the brightest; where they are low, more of the image is seen.
export function heat(canvas, view, grid, values, { strength = 0.6, least = 0, most = null } = {}) {
  const pen = paint(canvas, view), [rows, columns] = grid, top = most ?? highest(values);
  const high = canvas.height / rows, wide = canvas.width / columns;
  for (let i = 0; i < rows * columns; i++) {
    const value = top > least ? (values[i] - least) / (top - least) : 0, [r, g, b] = heatColour(value);
    pen.fillStyle = `rgba(${r},${g},${b},${Math.min(strength * (0.6 + 0.7 * value), 1)})`;
    pen.fillRect((i % columns) * wide, Math.floor(i / columns) * high, wide, high);
  }
  return pen;
}

export function frame(canvas, grid, patch, colour = "#00e5ff") {
  const pen = canvas.getContext("2d"), [rows, columns] = grid, high = canvas.height / rows, wide = canvas.width / columns;
  pen.strokeStyle = colour;
  pen.lineWidth = Math.max(2, wide / 8);
  pen.strokeRect((patch % columns) * wide + 1, Math.floor(patch / columns) * high + 1, wide - 2, high - 2);
}

export function patchAt(event, canvas, grid) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * grid[1]), row = Math.floor(((event.clientY - box.top) / box.height) * grid[0]);
  return row < 0 || column < 0 || row >= grid[0] || column >= grid[1] ? null : row * grid[1] + column;
}

export function bars(scores) {
  const list = el("div", { class: "bars" });
  for (const { label, probability } of scores) {
    const fill = el("span");
    fill.style.width = `${100 * probability}%`;
    list.append(el("span", { text: label }), el("div", { class: "bar", "aria-hidden": "true" }, fill), el("span", { class: "number", text: `${(100 * probability).toFixed(1)} %` }));
  }
  return list;
}

// Lines or dots: series of [x, y]; logarithmic where asked.
export function chart(series, { name, dots = false, width = 460, height = 200, x = "", y = "" }) {
  const points = series.flat(), figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name, width, height });
  if (!points.length) return figure;
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(0, ...ys), Math.max(...ys)];
  const left = 48, bottom = height - 26, across = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - 10), up = (v) => bottom - ((v - y0) / (y1 - y0 || 1)) * (bottom - 12);
  figure.append(svg("line", { class: "axis", x1: left, y1: bottom, x2: width - 8, y2: bottom }), svg("line", { class: "axis", x1: left, y1: 8, x2: left, y2: bottom }));
  const short = (v) => (Math.abs(v) >= 1000 ? v.toFixed(0) : Number(v.toPrecision(3)).toString());
  figure.append(svg("text", { x: left, y: height - 10, text: short(x0) }), svg("text", { x: width - 8, y: height - 10, "text-anchor": "end", text: short(x1) }), svg("text", { x: (left + width) / 2, y: height - 10, "text-anchor": "middle", text: x }));
  figure.append(svg("text", { x: left - 6, y: bottom, "text-anchor": "end", text: short(y0) }), svg("text", { x: left - 6, y: 16, "text-anchor": "end", text: short(y1) }), svg("text", { x: left + 6, y: 16, text: y }));
  for (const one of series) {
    if (dots) for (const [a, b] of one) figure.append(svg("circle", { class: "dot", cx: across(a), cy: up(b), r: 3 }));
    else figure.append(svg("polyline", { class: "line", points: one.map(([a, b]) => `${across(a).toFixed(1)},${up(b).toFixed(1)}`).join(" ") }));
  }
  return figure;
}

export const clear = (node) => { node.replaceChildren(); return node; };
