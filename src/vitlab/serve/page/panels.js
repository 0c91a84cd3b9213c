// Panels, opened from the header: what goes beyond one pass of one model. Each is show(box, panel).
import { source } from "./source.js";
import { clear, el } from "./draw.js";
import { data } from "./data.js";
import { exerciseOf } from "./exercise.js";
import { setState, state } from "./state.js";
import { t } from "./text.js";
import * as compare from "./compare.js";
import * as heads from "./all_heads.js";
import * as fewer from "./fewer.js";
import * as mae from "./mae.js";
import * as alike from "./alike.js";
import * as sentences from "./sentences.js";
import * as search from "./search.js";
import * as training from "./training.js";

const keys = { offered: () => true, show: (box) => box.append(el("p", { text: t("keys_help") })) };
const PANELS = { compare, heads, fewer, mae, alike, sentences, search, training, keys };
const dialog = document.getElementById("panel"), body = document.getElementById("panel-body"), title = document.getElementById("panel-title");
const looks = new Map(); // model -> the image at hand in it; forgotten with the image
let turn = 0, complain = () => {};

export function forgetLooks() { looks.clear(); }
// What this source cannot do is offered too: its panel says why.
export function offeredPanels() { return Object.keys(PANELS).filter((name) => name in source.capabilities || PANELS[name].offered(data)); }

export async function drawPanel() {
  const mine = ++turn, name = state.panel;
  training.stop();
  if (!(name in PANELS)) { if (dialog.open) dialog.close(); return; }
  title.textContent = t(`panel_${name}`);
  clear(body);
  document.getElementById("panel-alert").hidden = true;
  if (!dialog.open) dialog.showModal();
  if (source.capabilities[name]) { body.append(el("p", { text: t(source.capabilities[name]) })); return; }
  const panel = {
    current: () => mine === turn,
    async look(model) {
      if (data.look?.model === model) return data.look;
      if (!looks.has(model)) looks.set(model, source.open(model, data.image));
      try { return await looks.get(model); } catch (error) { looks.delete(model); throw error; }
    },
    async guard(work) {
      try { return await work(); } catch (error) { if (mine === turn) complain(error, body); return undefined; }
    },
  };
  body.setAttribute("aria-busy", "true");
  await panel.guard(() => PANELS[name].show(body, panel));
  if (mine !== turn) return;
  const exercise = exerciseOf({ panel: name });
  if (exercise.length) body.append(el("p", { class: "quiet" }, ...exercise));
  body.removeAttribute("aria-busy");
}

export function onPanelError(handler) { complain = handler; }
dialog.addEventListener("close", () => setState({ panel: null }));
document.getElementById("panel-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); }); // beside the panel
