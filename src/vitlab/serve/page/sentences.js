// A CLIP compares the image with sentences.
import { source } from "./source.js";
import { bars, clear, el } from "./draw.js";
import { board, heat } from "./heat.js";
import { data } from "./data.js";
import { t } from "./text.js";

const able = ({ models }) => models.find((model) => model.offers.includes("sentences"));
export const offered = (known) => Boolean(able(known));

export async function show(box, panel) {
  const model = able(data), text = el("textarea", { id: "sentences", "aria-label": t("cliphow") }), found = el("div", { class: "cards", id: "clip-answers", "aria-live": "polite" });
  let asked = 0;
  text.value = "a photo of a cat\na photo of a dog\na photo of a ship\na photo of a frog";
  const ask = () => panel.guard(async () => {
    const mine = ++asked, look = await panel.look(model.name), answer = await source.sentences(look, text.value);
    if (mine !== asked || !panel.current()) return;
    clear(found);
    answer.texts.forEach((sentence, i) => {
      const canvas = board(look.sharp, sentence, 240), map = answer.maps[i];
      heat(canvas, look.sharp, [map.length, map[0].length], map.flat(), { least: Math.min(...map.flat()) });
      found.append(el("div", {}, bars([{ label: sentence, probability: answer.probability[i] }]), canvas, el("p", { class: "quiet", text: t("cosine", { n: answer.cosine[i].toFixed(3) }) })));
    });
  });
  box.append(el("h3", { text: `${t("clip")}: ${model.name}` }), el("p", { class: "quiet", text: t("cliphow") }), text, el("button", { type: "button", id: "ask", text: t("askit"), onclick: ask }), found);
  await ask();
}
