// The exercise of `vitlab learn` that a step or a panel belongs to; `vitlab learn` prints the way back, #step=... or #panel=...
import { data } from "./data.js";
import { el } from "./draw.js";
import { language, t } from "./text.js";

// What to put below the step or into the panel: [] where no exercise belongs to it.
export function exerciseOf({ step = null, panel = null }) {
  const link = data.exercises.find((one) => (panel ? one.panel === panel : one.steps.includes(step)));
  return link ? [t("exercise"), el("code", { text: link.command }), ` · ${link.titles[language() === "en" ? "en" : "zh"]}`] : [];
}
