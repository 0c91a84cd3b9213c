// Lines between the steps of an open block: the way of the numbers, and the token itself, which goes around both halves.
import { svg } from "./draw.js";

const GAP = 9; // half the distance between two cells
let observer = null;

export function drawWires(box) {
  observer?.disconnect();
  observer = new ResizeObserver(() => lay(box));
  observer.observe(box);
  lay(box);
}

function lay(box) {
  box.querySelector(".wires")?.remove();
  const stages = [...box.querySelectorAll(".stage")], whole = box.getBoundingClientRect(), zoom = whole.width / box.offsetWidth || 1;
  if (!stages.length || !whole.width) return;
  const place = (node) => { const r = node.getBoundingClientRect(), x = (r.left - whole.left) / zoom, y = (r.top - whole.top) / zoom; return { x, y, right: x + r.width / zoom, bottom: y + r.height / zoom, middle: x + r.width / zoom / 2 }; };
  const wide = box.offsetWidth, high = box.offsetHeight, picture = svg("svg", { class: "wires", width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true" });
  const arrow = (path, step, kind = "wire") => picture.append(svg("path", { class: kind, d: path, "data-to": step, "marker-end": `url(#head-${kind})` }));
  for (const kind of ["wire", "residual"]) picture.append(svg("defs", {}, svg("marker", { id: `head-${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { class: `tip-${kind}`, d: "M0 0 L8 4 L0 8 z" }))));
  stages.slice(1).forEach((to, i) => {
    const a = place(stages[i]), b = place(to), step = to.dataset.step, same = stages[i].parentNode === to.parentNode, beside = Math.abs(place(stages[i].parentNode).y - place(to.parentNode).y) < 2;
    if (same) arrow(`M${a.middle} ${a.bottom} V${b.y}`, step);
    else if (beside) arrow(`M${a.right} ${Math.max(a.y, b.y) + 16} H${b.x}`, step);
    else arrow(`M${a.middle} ${a.bottom} V${b.y - GAP} H${b.middle} V${b.y}`, step);
  });
  const first = place(stages[0]), [half, end] = ["add1", "add2"].map((step) => place(box.querySelector(`[data-step="${step}"]`))), side = wide - GAP + 1, into = (stage) => stage.y + 34;
  arrow(`M${first.middle} ${first.y} V${GAP - 2} H${side} V${into(half)} H${half.right}`, "add1", "residual");
  arrow(`M${half.right} ${half.bottom - 12} H${side} V${into(end)} H${end.right}`, "add2", "residual");
  box.prepend(picture);
  mark(box);
}

// The lines that lead to the active step.
export function mark(box) {
  const step = box.querySelector(".stage.active")?.dataset.step;
  for (const line of box.querySelectorAll(".wires > path")) line.classList.toggle("live", line.dataset.to === step);
}
