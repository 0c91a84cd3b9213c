// Playing: the active step is drawn from its beginning to its end, then comes the next.
import { data, isPlain } from "./data.js";
import { moveTo, reveal } from "./network.js";
import { setState, state, subscribe } from "./state.js";
import { isInside, next, previous, stepsBefore } from "./steps.js";
import { t } from "./text.js";

const DRAWN = 700, RESTS = { inside: 2600, other: 1700 }; // milliseconds: the motion of a step, and its whole time while playing
const button = document.getElementById("play"), speed = document.getElementById("speed"), still = matchMedia("(prefers-reduced-motion: reduce)");
let playing = false, began = 0, running = false;

export const frames = { count: 0, since: 0 }; // for measuring: frames drawn, and the time of the first

export function play(on = !playing) {
  if (!data.model || !isPlain()) return;
  if (on && next(data.model, state) === null) setState({ step: stepsBefore(data.model)[0] });
  playing = on;
  began = performance.now();
  [frames.count, frames.since] = [0, began];
  drawButton();
  run();
}

export function drawButton() {
  button.setAttribute("aria-pressed", String(playing));
  button.setAttribute("aria-label", t(playing ? "pause" : "play"));
  button.title = t(playing ? "pause" : "play");
  button.firstElementChild.textContent = playing ? "❚❚" : "▶";
}

export function step(forward) {
  if (!data.model || !isPlain()) return;
  const to = (forward ? next : previous)(data.model, state);
  if (to) setState(to);
}

function toStart() { play(false); setState({ step: stepsBefore(data.model)[0] }); }

function run() {
  if (running) return;
  running = true;
  requestAnimationFrame(draw);
}

function draw(now) {
  const spent = Math.max(now - began, 0) * Number(speed.value), share = still.matches ? 1 : Math.min(spent / DRAWN, 1);
  frames.count++;
  moveTo(1 - (1 - share) ** 3);
  if (playing && spent > RESTS[isInside(data.model, state.step) ? "inside" : "other"]) {
    const to = next(data.model, state);
    to ? setState(to) : play(false);
  }
  running = playing || share < 1;
  if (running) requestAnimationFrame(draw);
}

subscribe((_, changed) => {
  if (!changed.has("step") && !changed.has("layer")) return;
  began = performance.now();
  run();
  requestAnimationFrame(() => reveal(still.matches ? "auto" : "smooth"));
});
button.addEventListener("click", () => play());
document.getElementById("back").addEventListener("click", () => { play(false); step(false); });
document.getElementById("forth").addEventListener("click", () => { play(false); step(true); });
document.getElementById("start").addEventListener("click", toStart);
