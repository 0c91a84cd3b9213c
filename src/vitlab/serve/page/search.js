// The images of the server's index that are nearest to a sentence, or to the image at hand.
import { source } from "./source.js";
import { clear, el } from "./draw.js";
import { data } from "./data.js";
import { t } from "./text.js";

const SHOWN = 12;

export const offered = ({ index }) => Boolean(index);

export function show(box, panel) {
  const { name, model, words, pictures } = data.index;
  const told = el("p", { id: "search-told", role: "status", class: "quiet" }), found = el("ol", { class: "hits", id: "hits" });
  let asked = 0;
  const ask = (what, question) => panel.guard(async () => {
    const mine = ++asked;
    told.textContent = t("working");
    const answer = await source.search(what, SHOWN).catch((error) => { told.textContent = ""; throw error; });
    if (mine !== asked) return;
    delete clear(found).dataset.drawn;
    const drawn = answer.hits.map((hit) => shown(found, hit));
    told.textContent = t("searched", { question, n: answer.hits.length, all: answer.pictures });
    await Promise.all(drawn);
    if (mine === asked) found.dataset.drawn = question;
  });
  const like = el("button", { type: "button", id: "search-like", text: t("searchlike"), disabled: !data.image, onclick: () => ask({ image: data.image }, t("thisimage")) });
  const controls = el("div", { class: "row" }, like);
  if (words) {
    const input = el("input", { type: "search", id: "search-text", maxlength: 300, value: "a photo of a cat" });
    const form = el("form", { class: "row" }, el("label", {}, `${t("searchwords")} `, input), el("button", { type: "submit", id: "search-ask", text: t("search") }));
    form.addEventListener("submit", (event) => { event.preventDefault(); if (input.value.trim()) ask({ text: input.value }, `“${input.value.trim()}”`); });
    controls.prepend(form);
  }
  box.append(el("h3", { text: t("searchtitle", { name, n: pictures }) }), el("p", { class: "quiet", text: t(words ? "searchhow" : "searchhowlike", { model }) }), controls, told, found);
}

// One line of the list; done when its image is there.
async function shown(list, { number, name, score }) {
  const frame = el("div", { class: "thumb" });
  list.append(el("li", {}, frame, el("span", { text: name }), el("span", { class: "quiet", text: t("alike", { n: score.toFixed(3) }) })));
  try {
    const image = el("img", { alt: "", src: URL.createObjectURL(await source.picture(number)) });
    await image.decode();
    URL.revokeObjectURL(image.src);
    frame.append(image);
  } catch { frame.append(el("span", { class: "quiet", text: t("cannotshow") })); }
}
