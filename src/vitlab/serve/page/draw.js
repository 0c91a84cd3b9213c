// Elements, bars and lines. Text is always set as text, never as markup.
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

export const clear = (node) => { node.replaceChildren(); return node; };
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

// Four decimals of small numbers, fewer of large ones; a proper minus sign.
export function number(value, digits = 3) {
  const size = Math.abs(value), text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : value.toFixed(size >= 100 ? 1 : digits);
  return text.replace("-", "−");
}

export function highest(values) { let most = -Infinity; for (const value of values) if (value > most) most = value; return most; }
export function lowest(values) { let least = Infinity; for (const value of values) if (value < least) least = value; return least; }
export const strongest = (values, count) => Array.from(values.keys()).sort((a, b) => values[b] - values[a]).slice(0, count);

export function bars(scores) {
  const list = el("div", { class: "bars" });
  for (const { label, probability } of scores) {
    const fill = el("span");
    fill.style.width = `${100 * probability}%`;
    list.append(el("span", { text: label }), el("div", { class: "bar", "aria-hidden": "true" }, fill), el("span", { class: "number", text: percent(probability) }));
  }
  return list;
}

// Lines or dots: series of [x, y].
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
