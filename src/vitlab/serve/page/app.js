// The frame of the page: an image, the models that look at it, tabs. Each tab is a module with show(panel, page).
import { json, blob, look, setToken, Refused } from "./net.js";
import { language, switchLanguage, t } from "./text.js";
import { clear, el } from "./draw.js";
import * as trying from "./try.js";
import * as walk from "./walk.js";
import * as attention from "./attention.js";
import * as fewer from "./fewer.js";
import * as more from "./more.js";
import * as training from "./training.js";

const TABS = { try: trying, walk, attention, fewer, more, training };
const $ = (id) => document.getElementById(id);

export const page = {
  models: [], index: null, chosen: new Set(), focus: null, image: null, tab: "try", looks: new Map(), views: new Map(), kept: new Map(), turn: 0,
  about(name) { return this.models.find((m) => m.name === name); },
  // The image as `model` sees it, kept at the server under a number.
  async look(model) {
    if (!this.looks.has(model)) this.looks.set(model, look(model, this.image));
    return this.looks.get(model);
  },
  async view(model) {
    if (!this.views.has(model)) this.views.set(model, this.look(model).then((n) => blob(`page/look/${n}/view`)).then(createImageBitmap));
    return this.views.get(model);
  },
  // What a part of a model says of the image, asked once.
  async part(model, part, options, read = json) {
    const number = await this.look(model), query = new URLSearchParams(options || {}).toString(), key = `${model} ${part} ${query}`;
    if (!this.kept.has(key)) this.kept.set(key, read(`page/look/${number}/${part}${query ? `?${query}` : ""}`));
    try { return await this.kept.get(key); }
    catch (error) { this.kept.delete(key); throw error; }
  },
  // One place to say that something went wrong; whatever is asked for must pass through here.
  async guard(work) {
    try { $("alert").hidden = true; return await work(); }
    catch (error) { this.complain(error); return undefined; }
  },
  complain(error) {
    if (!(error instanceof Refused)) console.warn(error);
    if (error.status === 401) { $("ask-token").hidden = false; $("token").focus(); }
    $("alert").textContent = error.status === 0 ? t("gone") : error.message;
    $("alert").hidden = false;
    $("status").textContent = "";
  },
};

function words() {
  document.documentElement.lang = language();
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  $("language").lang = language() === "en" ? "zh-CN" : "en";
  document.title = `vitlab: ${t("title")}`;
}

function tabs() {
  const list = clear($("tabs"));
  for (const name of Object.keys(TABS)) {
    const chosen = name === page.tab;
    list.append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(chosen), "aria-controls": `panel-${name}`, tabindex: chosen ? 0 : -1, text: t(`tab_${name}`), onclick: () => open(name) }));
  }
}

function open(name) { page.tab = name; tabs(); $(`tab-${name}`).focus(); show(); }

$("tabs").addEventListener("keydown", (event) => {
  const names = Object.keys(TABS), at = names.indexOf(page.tab);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  open(names[(next + names.length) % names.length]);
});

export async function show() {
  const turn = ++page.turn, name = page.tab;
  training.stop();
  const panel = el("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, tabindex: 0 });
  clear($("panels")).append(panel);
  const inside = ["walk", "attention", "fewer"].includes(name);
  $("focus-row").hidden = !inside;
  if (!["more", "training"].includes(name) && !page.image) { panel.append(el("p", { text: t("noimage") })); return; }
  $("status").textContent = t("working");
  await page.guard(() => TABS[name].show(panel, page, () => turn === page.turn));
  if (turn === page.turn && $("status").textContent === t("working")) $("status").textContent = t("ready");
}

function focusList() {
  const list = clear($("focus"));
  for (const model of page.models.filter((m) => m.offers.includes("walk"))) list.append(el("option", { value: model.name, text: model.name, selected: model.name === page.focus }));
}

function modelList() {
  const box = clear($("models"));
  for (const model of page.models) {
    const tick = el("input", { type: "checkbox", value: model.name, checked: page.chosen.has(model.name), onchange: () => { tick.checked ? page.chosen.add(model.name) : page.chosen.delete(model.name); if (page.tab === "try") show(); } });
    box.append(el("label", {}, tick, ` ${model.name}`));
  }
}

async function sampleList() {
  const box = clear($("samples"));
  for (const name of await json("page/samples")) {
    const button = el("button", { type: "button", "aria-label": t("sample", { name }), title: t("sample", { name }), onclick: () => page.guard(async () => take(await blob(`page/samples/${encodeURIComponent(name)}`))) });
    button.append(el("img", { src: URL.createObjectURL(await blob(`page/samples/${encodeURIComponent(name)}`)), alt: "" }));
    box.append(button);
  }
}

export function take(image) {
  page.image = image;
  URL.revokeObjectURL($("at-hand").src);
  $("at-hand").src = URL.createObjectURL(image);
  for (const kept of [page.looks, page.views, page.kept]) kept.clear();
  return show();
}

function offered(files) {
  const file = [...(files || [])][0];
  if (!file) return;
  if (file.type && !file.type.startsWith("image/")) page.complain(new Refused(415, t("notimage", { name: file.name }), ""));
  else take(file);
}

$("file").addEventListener("change", (event) => { offered(event.target.files); event.target.value = ""; }); // the same file may come again
for (const [kind, hidden] of [["load", false], ["error", true]]) $("at-hand").addEventListener(kind, () => { $("at-hand").hidden = hidden; }); // a browser cannot show all kinds
for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]])
  $("drop").addEventListener(kind, (event) => { event.preventDefault(); $("drop").classList.toggle("over", over); if (kind === "drop") offered(event.dataTransfer.files); });
window.addEventListener("paste", (event) => offered(event.clipboardData.files));
$("focus").addEventListener("change", (event) => { page.focus = event.target.value; show(); });
$("language").addEventListener("click", () => { switchLanguage(); words(); tabs(); modelList(); show(); page.guard(sampleList); });
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("ask-token").addEventListener("submit", (event) => { event.preventDefault(); setToken($("token").value); $("ask-token").hidden = true; begin(); });

function theme(name) { document.documentElement.dataset.theme = name; localStorage.setItem("vitlab-theme", name); }

async function begin() {
  words();
  tabs();
  await page.guard(async () => {
    [page.models, page.index] = await Promise.all([json("page/models"), json("page/index")]);
    const able = page.models.filter((m) => m.offers.includes("predict"));
    page.chosen = new Set((able.length ? able : page.models).map((m) => m.name));
    page.focus = (page.models.find((m) => m.name === "cifar10") || page.models.find((m) => m.offers.includes("fewer")) || page.models.find((m) => m.offers.includes("walk")) || {}).name;
    modelList();
    focusList();
    await sampleList();
    show();
  });
}

theme(localStorage.getItem("vitlab-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
window.vitlab = { page, timings: [] }; // for tests: how long redraws took
begin();
