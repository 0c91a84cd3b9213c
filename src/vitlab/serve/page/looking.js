// Rows of attention, and an image whose patches can be pointed at or walked over by the arrow keys.
import { patchAt } from "./draw.js";

// (h, N, N) -> what one token gives to each patch. patch: null is the token that the head reads (or the mean of all patches);
// head: null is the mean of all heads.
export function rowOf(data, [heads, tokens], about, patch, head) {
  const before = about.prefix.length, patches = tokens - before, found = new Float32Array(patches);
  const queries = patch !== null ? [before + patch] : about.reads < before ? [about.reads] : Array.from({ length: patches }, (_, i) => before + i);
  const used = head === null ? Array.from({ length: heads }, (_, i) => i) : [head];
  const share = 1 / (queries.length * used.length);
  for (const h of used) for (const q of queries) {
    const start = (h * tokens + q) * tokens + before;
    for (let i = 0; i < patches; i++) found[i] += data[start + i] * share;
  }
  return found;
}

export function follow(canvas, grid, draw, leave = null) {
  let at = 0;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  const go = (patch) => { at = patch; draw(patch); };
  canvas.addEventListener("pointermove", (event) => { const patch = patchAt(event, canvas, grid); if (patch !== null && patch !== at) go(patch); });
  canvas.addEventListener("pointerdown", (event) => { const patch = patchAt(event, canvas, grid); if (patch !== null) go(patch); });
  canvas.addEventListener("focus", () => draw(at));
  canvas.addEventListener("keydown", (event) => {
    const [rows, columns] = grid, row = Math.floor(at / columns), column = at % columns;
    const next = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1] }[event.key];
    if (event.key === "Escape" && leave) { leave(); return; }
    if (!next) return;
    event.preventDefault();
    if (next[0] >= 0 && next[0] < rows && next[1] >= 0 && next[1] < columns) go(next[0] * columns + next[1]);
  });
  if (leave) canvas.addEventListener("pointerleave", leave);
}
