// Guided stories: a card beside the picture that tells of the network scene by scene, while the picture follows.
//
// A story (story_*.js) is data:
//   name, title, summary                  texts are { en, zh }
//   needs: { offers, without, family, readsClassToken }     what a model must have for it; model: the same in words
//   facts(ask)                            numbers for all of its scenes; ask: story_questions.js
//   scenes: [{
//     facts(ask, facts)                   more numbers for this scene
//     state: patch or (facts) => patch    what the picture shows; the rest is as the page opens
//     highlight                           "photo" or "answer", where these are meant and not the step
//     en, zh                              the text; {name} is a fact
//     reveal: { en, zh, state }           the answer, where the text is a question
//     figure(ask, facts)                  pictures beside the text: story_figures.js
//     panel                               a panel (panels.js) to go on with after the story
//   }]
// A new story is a file and a line in STORIES.
import { data, onData } from "./data.js";
import { clear, el } from "./draw.js";
import { source } from "./source.js";
import { setState, state } from "./state.js";
import { language, t } from "./text.js";
import { drawFigures } from "./story_figures.js";
import { questions } from "./story_questions.js";
import { fill, readingSeconds } from "./story_words.js";
import { story as patch } from "./story_patch.js";
import { story as classToken } from "./story_class_token.js";
import { story as positions } from "./story_positions.js";
import { story as heads } from "./story_heads.js";
import { story as fewer } from "./story_fewer.js";
import { story as mae } from "./story_mae.js";
import { story as dino } from "./story_dino.js";
import { story as clip } from "./story_clip.js";

export const STORIES = [patch, classToken, positions, heads, fewer, mae, dino, clip];

const START = "vitlab serve"; // serves the bundled models, one for each story
const MOST_TOKENS = 600; // attention between all tokens of all blocks must fit in memory

// Whether this model can show the story.
export function suits(story, about) {
  const { offers, without = [], family = /./, readsClassToken } = story.needs;
  const tokens = about.grid && about.prefix.length + about.grid[0] * about.grid[1];
  return offers.every((name) => about.offers.includes(name)) && !without.some((name) => about.offers.includes(name)) && family.test(`${about.family} ${about.name}`)
    && (!offers.includes("attention") || tokens <= MOST_TOKENS)
    && (!readsClassToken || about.reads !== null);
}

// What this source cannot do for the story (a key of text.js), or undefined.
const refusal = ({ needs: { offers } }) => offers.map((name) => source.capabilities[name]).find(Boolean);

const BEGINNING = { layer: 0, head: 0, step: "image", edit: {}, panel: null, heat: null }; // each scene shows what it says, and no more
const THINKING_SECONDS = 4; // between a question and its answer, while playing
const PAUSE_SECONDS = 1.5; // after a text

// The image in this model, as soon as the page has it.
function lookOf(model) {
  if (data.look?.model === model) return Promise.resolve(data.look);
  setState({ model, token: null });
  return new Promise((resolve) => { const stop = onData((name) => { if (name === "look" && data.look?.model === model) { stop(); resolve(data.look); } }); });
}

const spoken = () => (language() === "en" ? "en" : "zh");

// The card, in the element `box`. complain(error): says what went wrong.
// A story can be left anywhere: what it changed in the network is undone; layer, head and patch stay where they are.
export function storyCard(box, complain) {
  let now = null; // the story that is told: { story, ask, facts, scene, more: facts of the scene, revealed, playing, edit: as it was before }
  let parts = null; // the card's elements
  let timer = null, turn = 0, opener = null, chosen = null; // chosen: the model that the visitor looks into

  let target = null; // the story and scene that are shown, or will be when their numbers are there

  const valueOf = (patch, facts) => (typeof patch === "function" ? patch(facts) : patch);
  const words = (text) => fill(text[spoken()], now.more, spoken());

  // The visitor's model, where it suits, or else the first that does.
  const modelFor = (story) => [chosen, ...data.models].find((about) => suits(story, about));

  // What the state names: "all", the list, or a scene of a story.
  function open(button, name, scene) {
    if (target === `${name} ${scene}`) return;
    if (box.hidden) [opener, chosen] = [button, data.model];
    document.body.classList.add("with-story");
    box.hidden = false;
    const story = STORIES.find((one) => one.name === name), model = story && !refusal(story) ? modelFor(story) : undefined;
    model ? begin(story, model, Math.min(scene, story.scenes.length - 1)) : list();
  }

  function goTo(name, scene) {
    target = `${name} ${scene}`;
    setState({ story: name, scene });
  }

  function close() {
    if (box.hidden) return;
    end();
    target = null;
    box.hidden = true;
    document.body.classList.remove("with-story");
    setState({ story: null, scene: 0 });
    opener?.focus();
  }

  function end() {
    clearTimeout(timer);
    turn++;
    delete document.body.dataset.story;
    const edit = now?.edit;
    now = null;
    if (edit) setState({ edit });
  }

  function list() {
    end();
    goTo("all", 0);
    const items = STORIES.map((story) => {
      const refused = refusal(story), model = refused ? undefined : modelFor(story), text = [el("strong", { text: story.title[spoken()] }), el("span", { text: story.summary[spoken()] })];
      const choice = el("button", { type: "button", class: "story-choice", "data-story": story.name, disabled: !model, onclick: () => begin(story, model) }, ...text);
      const why = refused ? [t(refused)] : [t("story_needs", { model: story.model[spoken()] }), " ", el("code", { text: START })];
      return el("li", {}, choice, ...(model ? [] : [el("p", { class: "quiet" }, ...why)]));
    });
    clear(box).append(header(t("stories")), el("p", { class: "quiet", text: t("stories_how") }), el("ol", { class: "story-list" }, ...items));
    box.focus();
  }

  // Numbers take a while: what was asked for last wins.
  async function guard(work) {
    box.setAttribute("aria-busy", "true");
    const mine = ++turn;
    try { await work(() => mine === turn); }
    catch (error) { if (mine === turn) complain(error); }
    if (mine === turn) box.removeAttribute("aria-busy");
  }

  const begin = (story, about, scene = 0) => guard(async (current) => {
    goTo(story.name, scene);
    const edit = now?.edit ?? state.edit, playing = now?.playing ?? false, look = await lookOf(about.name);
    const ask = questions(source, look, about), facts = await story.facts(ask);
    if (!current()) return;
    now = { story, ask, facts, scene, more: facts, revealed: false, playing, edit };
    frame();
    box.focus();
    show(scene);
  });

  const show = (scene) => guard(async (current) => {
    goTo(now.story.name, scene);
    const { story, ask, facts } = now, one = story.scenes[scene], more = { ...facts, ...(await one.facts?.(ask, facts)) };
    if (!current()) return;
    Object.assign(now, { scene, more, revealed: false });
    setState({ ...BEGINNING, ...valueOf(one.state, more) });
    document.body.dataset.story = one.highlight ?? "step";
    const meant = document.getElementById(one.highlight ?? (state.step === "image" ? "photo" : ""));
    requestAnimationFrame(() => requestAnimationFrame(() => meant?.scrollIntoView({ block: "nearest", inline: "nearest" }))); // after the page has scrolled to the step
    draw();
    schedule();
  });

  function reveal() {
    const { reveal: answer } = now.story.scenes[now.scene];
    now.revealed = true;
    if (answer.state) setState(valueOf(answer.state, now.more));
    draw();
    schedule();
  }

  // While playing: on to the answer, to the next scene, to the end.
  function schedule() {
    clearTimeout(timer);
    parts.time.style.animation = "none";
    if (!now.playing) return;
    const one = now.story.scenes[now.scene], asks = one.reveal && !now.revealed;
    const seconds = readingSeconds(words(now.revealed ? one.reveal : one), spoken()) + (asks ? THINKING_SECONDS : PAUSE_SECONDS);
    if (!asks && now.scene === now.story.scenes.length - 1) { setPlaying(false); return; }
    void parts.time.offsetWidth; // without this the animation would not start anew
    parts.time.style.animation = `story-time ${seconds}s linear`;
    timer = setTimeout(asks ? reveal : () => show(now.scene + 1), 1000 * seconds);
  }

  function setPlaying(playing) {
    now.playing = playing;
    draw();
    schedule();
  }

  const move = (by) => { if (now.story.scenes[now.scene + by]) show(now.scene + by); };

  const button = (name, act) => el("button", { type: "button", "data-do": name, text: t(`story_${name}`), onclick: act });
  const header = (title, ...rest) => el("div", { class: "story-head" }, el("h2", { id: "story-title", text: title }), ...rest, el("button", { type: "button", class: "story-close", "aria-label": t("story_close"), title: t("story_close"), text: "×", onclick: close }));

  function frame() {
    const { scenes, title } = now.story;
    parts = {
      dots: scenes.map((_, i) => el("button", { type: "button", "aria-label": t("story_scene", { n: i + 1, all: scenes.length }), onclick: () => show(i) })),
      time: el("div", { class: "story-time", "aria-hidden": "true" }), text: el("div", { class: "story-text", "aria-live": "polite" }), figures: el("div", { class: "story-figures" }),
      reveal: button("reveal", reveal), panel: button("panel", () => { const { panel } = now.story.scenes[now.scene]; close(); setState({ panel }); }),
      all: button("all", list), back: button("back", () => move(-1)), play: button("play", () => setPlaying(!now.playing)), next: button("next", () => move(1)),
    };
    clear(box).append(
      header(title[spoken()], el("ol", { class: "story-dots" }, ...parts.dots.map((dot) => el("li", {}, dot))), el("div", { class: "story-buttons" }, parts.all, parts.back, parts.play, parts.next)), parts.time,
      el("div", { class: "story-scene" }, el("div", {}, parts.text, parts.reveal, parts.panel), parts.figures));
  }

  function draw() {
    const { story, scene, more, ask, revealed, playing } = now, one = story.scenes[scene], focused = box.contains(document.activeElement);
    clear(parts.text).append(...[one, ...(revealed ? [one.reveal] : [])].map((text) => el("p", { text: words(text) })));
    clear(parts.figures).append(...drawFigures(one.figure?.(ask, more) ?? [], ask, spoken()));
    parts.dots.forEach((dot, i) => (i === scene ? dot.setAttribute("aria-current", "step") : dot.removeAttribute("aria-current")));
    parts.reveal.hidden = !one.reveal || revealed;
    parts.panel.hidden = !one.panel;
    if (one.panel) parts.panel.textContent = t("story_panel", { panel: t(`panel_${one.panel}`) });
    parts.back.disabled = scene === 0;
    parts.next.disabled = scene === story.scenes.length - 1;
    parts.play.textContent = t(playing ? "story_pause" : "story_play");
    if (focused && !box.contains(document.activeElement)) box.focus(); // the button that was pressed is hidden or disabled now
  }

  // Another image or model in the middle of a story: it goes on with that one.
  onData((name) => {
    if (name !== "look" || !now || data.look === now.ask.look) return;
    chosen = data.model;
    suits(now.story, data.model) ? begin(now.story, data.model, now.scene) : list();
  });

  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { close(); return; }
    if (!now || event.ctrlKey || event.altKey || event.metaKey) return;
    const act = { ArrowRight: () => move(1), ArrowLeft: () => move(-1), Home: () => show(0), End: () => show(now.story.scenes.length - 1), p: () => setPlaying(!now.playing) }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation(); // the picture has arrow keys of its own
    act();
  });

  // In the language that is chosen now.
  function redraw() {
    if (box.hidden) return;
    if (!now) { list(); return; }
    frame();
    draw();
    schedule();
  }

  return { open, close, redraw };
}
