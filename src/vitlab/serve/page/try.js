// 1. What each model says of the image.
import { bars, el, paint } from "./draw.js";
import { t } from "./text.js";

export async function show(panel, page, current) {
  const cards = el("div", { class: "cards" });
  panel.append(cards);
  for (const name of page.chosen) {
    const about = page.about(name), card = el("article", { class: "card", "data-model": name }, el("h2", { text: name }));
    cards.append(card);
    const view = await page.view(name);
    if (!current()) return;
    const zoom = Math.max(1, Math.round(160 / view.width)), seen = t("seen", { model: name, w: view.width, h: view.height });
    const canvas = el("canvas", { class: "seen", width: view.width * zoom, height: view.height * zoom, role: "img", "aria-label": seen });
    paint(canvas, view);
    card.append(canvas, el("p", { class: "quiet", text: seen }));
    if (!about.offers.includes("predict")) { card.append(el("p", { text: t("noclasses") })); continue; }
    card.append(el("p", { class: "quiet", text: t("knows", { n: about.classes, list: about.knows.join(", ") + (about.classes > about.knows.length ? ", …" : "") }) }));
    const found = await page.part(name, "predict");
    if (!current()) return;
    card.append(bars(found.scores), el("p", { class: "quiet", text: t("took", { ms: found.milliseconds.toFixed(1) }) }));
  }
}
