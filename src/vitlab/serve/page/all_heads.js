// Every head of every block at once: where the chosen token looks, how far the heads look, and which positions are alike.
import { source } from "./source.js";
import { chart, el } from "./draw.js";
import { board, follow, frame, heat } from "./heat.js";
import { data, isPlain } from "./data.js";
import { setState, state } from "./state.js";
import { attentionRow, tokenName } from "./photo.js";
import { t } from "./text.js";

export const offered = ({ model }) => Boolean(model?.offers.includes("rows"));

export async function show(box, panel) {
  const { model, look } = data;
  if (!isPlain() || !look || !data.rows) return;
  const table = el("div", { class: "all-heads", id: "all-heads" }), wide = Math.max(36, Math.min(110, Math.floor((box.clientWidth - 3 * model.heads) / model.heads)));
  table.style.gridTemplateColumns = `repeat(${model.heads}, ${wide}px)`;
  box.append(el("p", { text: t("allheads", { token: tokenName(state.token) }) }), el("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": t("panel_heads") }, table));
  for (let layer = 0; layer < model.depth; layer++) for (let head = 0; head < model.heads; head++) {
    const canvas = board(look.sharp, "", wide);
    canvas.setAttribute("aria-hidden", "true");
    heat(canvas, look.sharp, model.grid, attentionRow(layer, head).subarray(model.prefix.length));
    table.append(el("button", { type: "button", class: "map", "aria-label": `${t("short_block", { n: layer + 1 })}, ${t("head_n", { n: head + 1, all: model.heads })}`, onclick: () => setState({ layer, head, step: "block", panel: null }) }, canvas, el("span", { text: `${layer + 1}.${head + 1}` })));
  }
  const { distance } = await source.distance(look);
  if (!panel.current()) return;
  box.append(el("h3", { text: t("distance") }), chart([distance.flatMap((row, l) => row.map((far) => [l + 1, far]))], { name: t("distance"), dots: true, width: Math.min(460, box.clientWidth), x: t("axis_layer"), y: "px" }));
  if (!model.offers.includes("positions")) return;
  const { data: alike, shape } = await source.positions(look), grid = [shape[0], shape[1]], count = grid[0] * grid[1], canvas = board(look.sharp, t("likeposition"), 320);
  if (!panel.current()) return;
  const draw = (patch) => { heat(canvas, look.sharp, grid, alike.subarray(patch * count, (patch + 1) * count), { least: -1, most: 1 }); frame(canvas, grid, patch); };
  canvas.id = "position-similarity";
  follow(canvas, grid, draw);
  draw(0);
  box.append(el("h3", { text: t("step_positions") }), el("p", { class: "quiet", text: t("likeposition") }), canvas);
}
