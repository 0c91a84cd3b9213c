// What each model says of the image.
import { source } from "./source.js";
import { bars, el } from "./draw.js";
import { board, paint } from "./heat.js";
import { data } from "./data.js";
import { setState } from "./state.js";
import { t } from "./text.js";

const NAMED = 4; // classes that are listed
export const offered = ({ models }) => models.length > 1;

export async function show(box, panel) {
  const cards = el("div", { class: "cards" });
  box.append(cards);
  for (const model of data.models) {
    const card = el("article", { class: "card", "data-model": model.name }, el("h3", { text: model.name }));
    cards.append(card);
    const look = await panel.look(model.name);
    if (!panel.current()) return;
    const seen = t("seen", { model: model.name, w: look.size[1], h: look.size[0] }), canvas = board(look.view, seen, look.view.width);
    paint(canvas, look.view);
    canvas.classList.add("seen");
    card.append(canvas, el("p", { class: "quiet", text: seen }));
    if (model.labels) {
      const found = await source.predict(look);
      if (!panel.current()) return;
      card.append(bars(found.scores), el("p", { class: "quiet", text: t("knows", { n: model.labels.length, list: model.labels.slice(0, NAMED).join(", ") + (model.labels.length > NAMED ? ", …" : "") }) }), el("p", { class: "quiet", text: t("took", { ms: found.milliseconds.toFixed(1) }) }));
    } else card.append(el("p", { text: t("noclasses", { model: model.name }) }));
    card.append(el("button", { type: "button", text: t("lookinto", { model: model.name }), onclick: () => setState({ model: model.name, panel: null }) }));
  }
}
