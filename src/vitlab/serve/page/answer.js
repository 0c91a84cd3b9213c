// The answer, as the pass is now, and beside it as it is without any change.
import { clear, el, number, percent, strongest } from "./draw.js";
import { data, isPlain } from "./data.js";
import { isEdited, setState } from "./state.js";
import { t } from "./text.js";

const SHOWN = 5;
const box = document.getElementById("answer");

export function drawAnswer() {
  const { model, base } = data, now = data.now ?? base;
  if (!model || !base) return;
  clear(box);
  if (model.task === "number" && base.probabilities) { drawValue(now.probabilities[0], base.probabilities[0]); return; }
  if (!model.labels) { noClasses(model); return; }
  if (!isPlain()) { box.append(rows(base.scores.map(({ label, probability }) => [label, probability, probability]), false)); return; }
  const before = base.probabilities, after = now.probabilities, edited = isEdited() && after !== before;
  const shown = strongest(before, SHOWN), risen = strongest(after, SHOWN).filter((i) => !shown.includes(i)).slice(0, 2);
  const order = [...shown, ...risen].sort((a, b) => after[b] - after[a]).slice(0, SHOWN + 1);
  box.append(el("p", { id: "verdict", class: "verdict", text: t("verdict", { label: model.labels[strongest(after, 1)[0]], share: percent(after[strongest(after, 1)[0]]) }) }));
  box.append(rows(order.map((i) => [model.labels[i], after[i], before[i]]), edited));
  if (edited) box.append(el("p", { class: "quiet", id: "unedited", text: t("unedited", { label: model.labels[strongest(before, 1)[0]], share: percent(before[strongest(before, 1)[0]]) }) }));
}

// The answer of a model that gives a number.
function drawValue(now, before) {
  box.append(el("p", { id: "verdict", class: "verdict", text: t("value", { n: number(now) }) }));
  if (now !== before) box.append(el("p", { class: "quiet", id: "unedited", text: t("value_unedited", { n: number(before) }) }));
}

function rows(found, edited) {
  const list = el("div", { class: `bars${edited ? " edited" : ""}` });
  for (const [label, now, before] of found) {
    const fill = el("span"), was = el("i");
    fill.style.width = `${100 * now}%`;
    was.style.left = `${100 * before}%`;
    list.append(el("span", { text: label }), el("div", { class: "bar", "aria-hidden": "true" }, fill, ...(edited ? [was] : [])), el("span", { class: "number", text: percent(now) }));
    if (edited) list.append(el("span", { class: "number was", text: percent(before), title: t("was") }));
  }
  return list;
}

// A model that learned without labels, or from words: what it has instead.
function noClasses(model) {
  const panel = model.offers.includes("sentences") ? "sentences" : model.offers.includes("painted") ? "mae" : "alike";
  box.append(el("p", { text: t("noclasses", { model: model.name }) }), el("button", { type: "button", text: t(`panel_${panel}`), onclick: () => setState({ panel }) }));
}
