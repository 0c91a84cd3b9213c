// What the active step does, in words that follow the model: its title, its equation, its size and its cost.
import { data, isPlain } from "./data.js";
import { state } from "./state.js";
import { equationInside, isInside, SERVER_NAMES } from "./steps.js";
import { tokenName } from "./photo.js";
import { orElse, t } from "./text.js";

const $ = (id) => document.getElementById(id);
const short = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} G` : n >= 1e6 ? `${(n / 1e6).toFixed(2)} M` : n >= 1e3 ? `${(n / 1e3).toFixed(1)} k` : String(n));

export function drawCaption() {
  const { model, look } = data;
  if (!model || !look || !isPlain()) { for (const id of ["step-title", "step-equation", "step-why", "step-facts"]) $(id).textContent = ""; return; }
  const { step, layer } = state, name = step === "block" ? `blocks.${layer}` : SERVER_NAMES[step] ?? step;
  const inside = isInside(model, step), equation = inside ? equationInside(model, step) : model.equations[step === "block" ? "blocks" : name];
  $("step-title").textContent = inside ? `${t("short_block", { n: layer + 1 })} · ${t(`step_${step}`)}` : t(`step_${step}`, { n: layer + 1 });
  $("step-equation").textContent = equation;
  $("step-why").textContent = why(model, look, step);
  $("query").textContent = state.token === null ? "" : tokenName(state.token);
  const cost = data.walk?.steps.find((one) => one.name === name);
  $("step-facts").textContent = cost ? [`${t("shape")} ${cost.shape.join(" × ")}`, ...(cost.parameters ? [`${t("parameters")} ${cost.parameters.toLocaleString("en")}`] : []), ...(cost.macs ? [`${t("macs")} ${short(cost.macs)}`] : [])].join(" · ") : "";
}

function why(model, look, step) {
  const words = { w: look.size[1], h: look.size[0], rows: model.grid[0], columns: model.grid[1], p: model.patch, width: model.width, heads: model.heads, d: model.head_dim, hidden: model.hidden, classes: model.labels?.length ?? 0, list: prefixes(model) };
  const key = { patches: model.stem === "patch" ? "patches" : "patches_conv", embed: `embed_${model.stem}`, positions: `positions_${model.positions.includes("sincos") ? "sincos" : "learned"}`, pool: `pool_${model.pooling.replace("_norm", "")}` }[step] ?? step;
  const more = {
    scores: [...(model.positions.includes("rotary") ? ["scores_rotary"] : []), ...(model.positions.includes("relative") ? ["scores_relative"] : [])],
    add1: model.layer_scale ? ["add_scaled"] : [],
    add2: model.layer_scale ? ["add_scaled"] : [],
    pool: model.prefix.includes("class") ? [] : ["no_class"],
  }[step] ?? [];
  return [key, ...more].map((one) => t(`why_${one}`, words)).join(" ");
}

function prefixes(model) {
  const names = [...new Set(model.prefix)], count = (name) => model.prefix.filter((one) => one === name).length;
  return names.map((name) => `${orElse(`token_${name}`, name)}${count(name) > 1 ? ` × ${count(name)}` : ""}`).join(", ");
}
