// The curves of a run, while it trains.
import { source } from "./source.js";
import { chart, clear, el } from "./draw.js";
import { t } from "./text.js";

let timer = null;
export function stop() { clearTimeout(timer); timer = null; }

export const offered = () => true;

export async function show(box, panel) {
  const names = await source.runs();
  if (!panel.current()) return;
  if (!names.length) { box.append(el("p", { text: t("noruns") })); return; }
  const choose = el("select", { id: "run" }, ...names.map((name) => el("option", { value: name, text: name }))), state = el("p", { role: "status", class: "quiet" }), curves = el("div", { class: "cards", id: "curves" });
  box.append(el("label", {}, `${t("run")} `, choose), state, curves);
  let lines = [], after = 0;
  const follow = async () => {
    const name = choose.value;
    await panel.guard(async () => {
      const found = await source.run(name, after);
      if (!panel.current() || name !== choose.value) return;
      lines = found.after < after ? found.lines : lines.concat(found.lines); // less: the log was written anew
      after = found.after;
      state.textContent = `${name} ${t(found.ended ? "over" : "going")}`;
      if (found.lines.length || !curves.childElementCount) draw(curves, lines);
      if (!found.ended || found.lines.length) timer = setTimeout(follow, 2000);
    });
  };
  choose.addEventListener("change", () => { stop(); [lines, after] = [[], 0]; clear(curves); follow(); });
  await follow();
}

function draw(box, lines) {
  const points = (kind, key, times = 1) => lines.filter((l) => l.kind === kind && Number.isFinite(l[key])).map((l) => [l.step, times * l[key]]);
  clear(box);
  for (const [title, series, y] of [["c_loss", points("train", "loss"), ""], ["c_val", points("val", "top1", 100), "%"], ["c_lr", points("train", "lr"), ""]])
    if (series.length) box.append(el("figure", { class: "card" }, el("figcaption", { text: t(title) }), chart([series], { name: t(title), width: 310, x: t("step"), y })));
}
