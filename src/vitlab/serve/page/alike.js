// How alike the tokens of patches are: to the one under the pointer, and by their main directions as colours.
import { source } from "./source.js";
import { clear, el } from "./draw.js";
import { board, follow, frame, heat, pixels } from "./heat.js";
import { data } from "./data.js";
import { t } from "./text.js";

const able = ({ models }) => models.filter((model) => model.offers.includes("similarity"));
export const offered = (known) => able(known).length > 0;

export async function show(box, panel) {
  const models = able(data), first = models.find((m) => m.name === "dino") ?? models.find((m) => !m.labels) ?? models[0], place = el("div");
  const choose = el("select", { id: "alike-model", onchange: () => panel.guard(() => draw(models.find((m) => m.name === choose.value))) }, ...models.map((m) => el("option", { value: m.name, text: m.name, selected: m === first })));
  box.append(el("label", {}, `${t("model")} `, choose), place);
  const draw = async (model) => {
    const look = await panel.look(model.name), [like, colours] = await Promise.all([source.similarity(look), source.colours(look)]);
    if (!panel.current() || choose.value !== model.name) return;
    const [title, how] = model.labels ? [t("alike_title"), t("alike_how")] : [t("dino"), t("dinohow")], near = board(look.sharp, title, 320), main = board(look.sharp, title, 320), count = like.shape[0];
    near.id = "similarity";
    const show = (patch) => { const row = like.data.subarray(patch * count, (patch + 1) * count); heat(near, look.sharp, model.grid, row, { least: Math.min(...row) }); frame(near, model.grid, patch); };
    const middle = Math.floor(model.grid[0] / 2) * model.grid[1] + Math.floor(model.grid[1] / 2);
    follow(near, model.grid, show, middle);
    pixels(main, colours.data, colours.shape[1], colours.shape[0]);
    show(middle);
    clear(place).append(el("h3", { text: `${title}: ${model.name}` }), el("p", { class: "quiet", text: how }),
      el("div", { class: "row figures" }, ...[[near, "dinonear"], [main, "dinomain"]].map(([canvas, words]) => el("figure", {}, canvas, el("figcaption", { class: "quiet", text: t(words) })))));
  };
  await draw(first);
}
