// 5. Models that learned without labels, or from words; and a search among images, where there is an index.
import { array } from "./net.js";
import { bars, board, clear, el, frame, heat } from "./draw.js";
import { t } from "./text.js";
import { follow } from "./looking.js";
import { searchCard } from "./search.js";

export async function show(panel, page, current) {
  const having = (part) => page.models.find((m) => m.offers.includes(part));
  const dino = page.models.find((m) => m.name === "dino") || page.models.find((m) => m.offers.includes("similarity") && !m.offers.includes("predict")) || having("similarity");
  const parts = [[having("painted"), mae], [dino, tokens], [having("sentences"), words]].filter(([model]) => model && page.image);
  if (!page.image) panel.append(el("p", { text: t("noimage") }));
  else if (!parts.length) panel.append(el("p", { text: t("none_more") }));
  for (const [model, make] of parts) {
    const card = el("article", { class: "card" });
    panel.append(card);
    await make(card, page, model);
    if (!current()) return;
  }
  if (page.index) panel.append(searchCard(page));
}

async function mae(card, page, model) {
  const view = await page.view(model.name), [rows, columns] = model.grid, zoom = Math.max(2, Math.round(260 / view.width));
  const mask = new Uint8Array(rows * columns);
  let seed = 0, painting = null, asked = 0;
  const hide = el("input", { type: "range", id: "hide", min: 1, max: 99, value: 75 }), hideText = el("span"), again = el("button", { type: "button", text: t("again") });
  const seen = board(view, zoom, t("left")), made = board(view, zoom, t("made"));
  [seen.className, made.className, seen.id, made.id] = ["seen", "seen", "mae-seen", "mae-made"];
  seen.style.width = made.style.width = "16rem";
  card.append(el("h2", { text: t("mae") }), el("p", { class: "quiet", text: t("maehow") }), el("div", { class: "controls" }, el("label", {}, hideText, hide)), again,
    el("div", { class: "row pair" }, el("figure", {}, seen, el("figcaption", { class: "quiet", text: t("left") })), el("figure", {}, made, el("figcaption", { class: "quiet", text: t("made") }))));
  const draw = (options) => page.guard(async () => {
    const mine = ++asked, found = await page.part(model.name, "painted", options);
    if (mine !== asked) return;
    const [, high, wide] = found.shape, size = high * wide * 3, bytes = Uint8Array.from(atob(found.pixels), (one) => one.charCodeAt(0));
    mask.set([...found.mask].map(Number));
    [[seen, 1], [made, 2]].forEach(([canvas, which]) => put(canvas, bytes.subarray(which * size, (which + 1) * size), wide, high));
    made.dataset.done = String(Number(made.dataset.done || 0) + 1);
  });
  const random = () => { hideText.textContent = t("hide", { n: hide.value }); return draw({ percent: hide.value, seed }); };
  const chosen = () => { if (mask.some((m) => m) && mask.some((m) => !m)) draw({ mask: mask.join("") }); };
  hide.addEventListener("input", random);
  again.addEventListener("click", () => { seed++; random(); });
  let at = -1;
  const toggle = (patch) => { mask[patch] = 1 - mask[patch]; chosen(); };
  seen.addEventListener("pointerdown", () => { painting = true; at = -1; });
  window.addEventListener("pointerup", () => { painting = null; });
  follow(seen, model.grid, (patch) => { if (painting && patch !== at) { toggle(patch); } at = patch; });
  seen.addEventListener("keydown", (event) => { if (event.key === " " || event.key === "Enter") { event.preventDefault(); toggle(Math.max(at, 0)); } });
  await random();
}

function put(canvas, bytes, width, height) {
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) image.data.set([bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2], 255], 4 * i);
  const off = new OffscreenCanvas(width, height);
  off.getContext("2d").putImageData(image, 0, 0);
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.drawImage(off, 0, 0, canvas.width, canvas.height);
}

async function tokens(card, page, model) {
  const [view, like, colours] = await Promise.all([page.view(model.name), page.part(model.name, "similarity", null, array), page.part(model.name, "colours", null, array)]);
  const [title, how] = model.offers.includes("predict") ? ["alike_title", "alike_how"].map((words) => t(words)) : [t("dino"), t("dinohow")];
  const zoom = Math.max(2, Math.round(260 / view.width)), near = board(view, zoom, title), main = board(view, zoom, title), count = like.shape[0];
  near.id = "similarity";
  near.className = main.className = "seen";
  near.style.width = main.style.width = "16rem";
  const draw = (patch) => { const began = performance.now(), row = like.data.subarray(patch * count, (patch + 1) * count); heat(near, view, model.grid, row, { least: Math.min(...row) }); frame(near, model.grid, patch); window.vitlab.timings.push(performance.now() - began); };
  follow(near, model.grid, draw);
  put(main, colours.data, colours.shape[1], colours.shape[0]);
  draw(Math.floor(model.grid[0] / 2) * model.grid[1] + Math.floor(model.grid[1] / 2));
  card.append(el("h2", { text: `${title}: ${model.name}` }), el("p", { class: "quiet", text: how }),
    el("div", { class: "row pair" }, ...[[near, "dinonear"], [main, "dinomain"]].map(([canvas, words]) => el("figure", {}, canvas, el("figcaption", { class: "quiet", text: t(words) })))));
}

async function words(card, page, model) {
  const text = el("textarea", { id: "sentences", "aria-label": t("cliphow") }), found = el("div", { class: "cards", id: "clip-answers", "aria-live": "polite" });
  text.value = "a photo of a cat\na photo of a dog\na photo of a ship\na photo of a frog";
  const askit = () => page.guard(async () => {
    const answer = await page.part(model.name, "sentences", { texts: text.value }), view = await page.view(model.name);
    clear(found);
    answer.texts.forEach((sentence, i) => {
      const canvas = board(view, Math.max(2, Math.round(200 / view.width)), sentence);
      canvas.className = "seen";
      heat(canvas, view, [answer.maps[i].length, answer.maps[i][0].length], answer.maps[i].flat(), { least: Math.min(...answer.maps[i].flat()) });
      found.append(el("div", {}, bars([{ label: sentence, probability: answer.probability[i] }]), canvas, el("p", { class: "quiet", text: t("cosine", { n: answer.cosine[i].toFixed(3) }) })));
    });
  });
  card.append(el("h2", { text: t("clip") }), el("p", { class: "quiet", text: t("cliphow") }), text, el("button", { type: "button", id: "ask", text: t("askit"), onclick: askit }), found);
  await askit();
}
