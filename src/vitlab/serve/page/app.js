// The frame of the page: opens with an image and a model, and draws anew what the state or the numbers change.
import { source } from "./source.js";
import { Refused } from "./net.js";
import { language, orElse, switchLanguage, t } from "./text.js";
import { clear, el } from "./draw.js";
import { readUrl, setState, state, subscribe } from "./state.js";
import { closeLook, data, isPlain, onData, onError, openLook, refresh } from "./data.js";
import { drawHeatChoice, drawPhoto, setMask } from "./photo.js";
import { buildNetwork, drawNetwork } from "./network.js";
import { forgetBlock } from "./block.js";
import { drawAnswer } from "./answer.js";
import { buildKnobs, drawKnobs, dropHead, isDropped } from "./knobs.js";
import { drawCaption } from "./caption.js";
import { drawButton, frames, play, step } from "./play.js";
import { drawPanel, forgetLooks, offeredPanels, onPanelError } from "./panels.js";
import { isInside, isStep, stepsInside } from "./steps.js";

const $ = (id) => document.getElementById(id);

function words() {
  document.documentElement.lang = language();
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", t(node.dataset.label));
  for (const node of document.querySelectorAll("[data-title]")) { node.title = t(node.dataset.title); node.setAttribute("aria-label", t(node.dataset.title)); }
  $("language").lang = language() === "en" ? "zh-CN" : "en";
  document.title = `vitlab: ${t("title")}`;
  drawButton();
}

function complain(error, box = null) {
  if (!(error instanceof Refused)) console.warn(error);
  if (error.status === 401) { $("ask-token").hidden = false; $("token").focus(); }
  const place = box ? $("panel-alert") : $("alert");
  place.textContent = error.status === 0 ? t("gone") : error.message;
  place.hidden = false;
  $("status").textContent = "";
}

// --- header

async function drawSamples() {
  const box = clear($("samples"));
  for (const { name, url, licence } of data.samples) {
    const text = t("sample", { name: orElse(`name_${name}`, name), licence }), image = el("img", { alt: "" });
    box.append(el("button", { type: "button", "data-sample": name, "aria-label": text, title: text, "aria-pressed": String(state.sample === name), onclick: () => setState({ sample: name, token: null, edit: {} }) }, image));
    source.file(url).then((file) => { image.src = URL.createObjectURL(file); }, () => {});
  }
}

function drawHeader() {
  clear($("model")).append(...data.models.map(({ name }) => el("option", { value: name, text: name, selected: name === state.model })));
  clear($("panels")).append(...offeredPanels().map((name) => el("button", { type: "button", "data-panel": name, text: t(`panel_${name}`), onclick: () => setState({ panel: name }) })));
  for (const button of $("samples").children) button.setAttribute("aria-pressed", String(button.dataset.sample === state.sample));
  const plain = data.model && isPlain();
  $("transport").hidden = !plain;
  if (!plain) return;
  for (const [id, count, chosen] of [["layer", data.model.depth, state.layer], ["head", data.model.heads, state.head]])
    clear($(id)).append(...Array.from({ length: count }, (_, i) => el("option", { value: i, text: String(i + 1), selected: i === chosen })));
  const [first] = data.model.prefix;
  $("query-prefix").hidden = first === undefined;
  if (first !== undefined) $("query-prefix").textContent = orElse(`token_${first}`, first);
}

// --- what is shown

// An image by the state: a sample, or what the visitor gave.
async function openImage() {
  try {
    $("alert").hidden = true;
    if (state.sample) data.image = await source.file(data.samples.find((one) => one.name === state.sample).url);
    forgetLooks();
    await openModel();
  } catch (error) { complain(error); }
}

async function openModel() {
  closeLook();
  data.model = data.models.find((one) => one.name === state.model);
  $("status").textContent = t("working");
  $("main").setAttribute("aria-busy", "true");
  fitState();
  drawHeader();
  await openLook();
  $("main").removeAttribute("aria-busy");
  if (data.look) $("status").textContent = t("ready");
}

// A state that came from a link or from another model may not fit this one.
function fitState() {
  if (!isPlain()) return;
  const { model } = data, count = model.prefix.length + model.grid[0] * model.grid[1];
  setState({
    layer: Math.min(state.layer, model.depth - 1),
    head: Math.min(state.head, model.heads - 1),
    token: state.token === null || state.token < count ? state.token : null,
    step: isStep(model, state.step) ? state.step : "image",
  });
}

function take(image) {
  data.image = image;
  const before = state.sample;
  setState({ sample: null, token: null, edit: {} });
  if (before === null) openImage(); // otherwise the change of the sample has done so
}

function offered(files) {
  const file = [...(files || [])][0];
  if (!file) return;
  if (file.type && !file.type.startsWith("image/")) complain(new Refused(415, t("notimage", { name: file.name }), ""));
  else take(file);
}

subscribe((_, changed) => {
  if (changed.has("panel")) drawPanel();
  if (changed.has("story") || changed.has("scene")) state.story ? openStories() : stories?.close();
  if (changed.has("sample")) { openImage(); return; }
  if (changed.has("model")) { openModel(); return; }
  if (changed.has("layer")) $("layer").value = state.layer;
  if (changed.has("head")) $("head").value = state.head;
  if (changed.has("heat")) $("heat-choice").value = state.heat ?? "";
  refresh(changed);
  drawKnobs();
  drawPhoto();
  drawNetwork();
  drawCaption();
});

onData((name) => {
  if (name === "look") { buildNetwork(); drawHeatChoice(); drawKnobs(); }
  if (["look", "heat", "rows"].includes(name)) drawPhoto();
  if (name === "now") $("alert").hidden = true; // a change that was refused is undone, or the server is back
  if (["base", "now"].includes(name)) drawAnswer();
  if (["base", "now", "rows", "block"].includes(name)) drawNetwork();
  if (["look", "walk", "base"].includes(name)) drawCaption();
  if (name === "rows" && state.panel === "heads") drawPanel();
});
onError(complain);
onPanelError(complain);

// --- stories

let stories = null; // their modules are loaded when they are first asked for, so that the page opens sooner
async function openStories() {
  try {
    stories ??= (await import("./stories.js")).storyCard($("story"), complain);
    stories.open($("stories"), state.story, state.scene);
  } catch (error) { complain(error); }
}

// --- zoom

let zoom = 1;
function setZoom(to) {
  zoom = Math.min(Math.max(to, 0.4), 2.5);
  $("world").style.zoom = zoom;
  $("world").classList.toggle("near", zoom > 1.2);
}
function fit() {
  setZoom(1);
  setZoom(Math.min(1, $("main").clientWidth / $("world").scrollWidth));
}
$("main").addEventListener("wheel", (event) => { if (event.ctrlKey) { event.preventDefault(); setZoom(zoom * 2 ** (-event.deltaY / 300)); } }, { passive: false });
$("zoom-in").addEventListener("click", () => setZoom(zoom * 1.25));
$("zoom-out").addEventListener("click", () => setZoom(zoom / 1.25));
$("zoom-fit").addEventListener("click", fit);

// --- events

$("file").addEventListener("change", (event) => { offered(event.target.files); event.target.value = ""; }); // the same file may come again
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => { event.preventDefault(); offered(event.dataTransfer.files); });
addEventListener("paste", (event) => offered(event.clipboardData.files));
$("model").addEventListener("change", () => setState({ model: $("model").value, token: null, edit: {} }));
$("layer").addEventListener("change", () => setState({ layer: Number($("layer").value), step: isInside(data.model, state.step) ? state.step : "block" }));
$("head").addEventListener("change", () => setState({ head: Number($("head").value) }));
$("query-prefix").addEventListener("click", () => setState({ token: 0 }));
$("stories").addEventListener("click", () => setState({ story: "all", scene: 0 }));
$("language").addEventListener("click", () => { switchLanguage(); redraw(); });
$("theme").addEventListener("click", () => { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); forgetBlock(); drawNetwork(); });
$("ask-token").addEventListener("submit", (event) => { event.preventDefault(); source.setToken($("token").value); $("ask-token").hidden = true; $("alert").hidden = true; begin(); });
addEventListener("hashchange", () => { const { sample, ...rest } = readUrl(); setState(known({ sample: sample ?? state.sample, ...rest })); });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || state.panel || !data.model || !isPlain() || event.target.closest("input, select, textarea, summary")) return;
  if (event.target.closest("button") && (event.key === " " || event.key === "Enter")) return;
  const { model } = data, { layer, head, token } = state, other = (at, by, count) => (at + by + count) % count, by = event.shiftKey ? -1 : 1, patch = (token ?? 0) - model.prefix.length, able = model.offers.includes("edit");
  const act = {
    " ": () => play(),
    ArrowRight: () => { play(false); step(true); },
    ArrowLeft: () => { play(false); step(false); },
    b: () => setState({ layer: other(layer, by, model.depth), step: isInside(model, state.step) ? state.step : "block" }),
    o: () => setState({ step: isInside(model, state.step) ? "block" : stepsInside(model)[0] }),
    h: () => setState({ head: other(head, by, model.heads) }),
    m: () => able && patch >= 0 && setMask(patch, !(state.edit.mask_patches ?? []).includes(patch)),
    d: () => able && dropHead(layer, head, !isDropped(layer, head)),
    r: () => setState({ edit: {} }),
    "+": () => setZoom(zoom * 1.25),
    "=": () => setZoom(zoom * 1.25),
    "-": () => setZoom(zoom / 1.25),
    0: fit,
    "?": () => setState({ panel: "keys" }),
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

function redraw() {
  words();
  drawHeader();
  drawSamples();
  buildKnobs();
  if (!data.look) return;
  forgetBlock();
  buildNetwork();
  drawHeatChoice();
  drawPhoto();
  drawAnswer();
  drawCaption();
  drawPanel();
  stories?.redraw();
}

function theme(name) { document.documentElement.dataset.theme = name; localStorage.setItem("vitlab-theme", name); }

// Names that this server does not have give way to those it has.
function known(wanted) {
  const samples = data.samples.map(({ name }) => name), models = data.models.map(({ name }) => name);
  const best = data.models.find((m) => m.offers.includes("block") && m.labels) ?? data.models.find((m) => m.offers.includes("block")) ?? data.models[0];
  return { ...wanted, sample: samples.includes(wanted.sample) ? wanted.sample : data.image && !state.sample ? null : samples[0] ?? null, model: models.includes(wanted.model) ? wanted.model : best?.name ?? null };
}

async function begin() {
  words();
  buildKnobs();
  try {
    [data.models, data.samples, data.index, data.exercises] = await Promise.all([source.models(), source.samples(), source.index(), source.exercises()]);
    const wanted = known(readUrl());
    Object.assign(state, wanted, { panel: null, story: null, scene: 0 });
    drawSamples();
    await openImage();
    if (wanted.panel) setState({ panel: wanted.panel });
    if (wanted.story) setState({ story: wanted.story, scene: wanted.scene });
  } catch (error) { complain(error); }
}

theme(localStorage.getItem("vitlab-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
for (const id of ["knobs", "photo-options"]) $(id).open = !matchMedia("(max-width: 46rem)").matches; // controls fold on a phone
window.vitlab = { state, setState, subscribe, data, source, frames }; // for stories, and for tests
begin();
