// The steps of a forward pass, by what the model is made of, and the way from one to the next.
export const SERVER_NAMES = { image: "picture", embed: "patch_embed", answer: "softmax" }; // where the library's name differs

const has = (model, step) => model.steps.includes(step);

export const stepsBefore = (model) => ["image", "patches", "embed", ...["prefix", "positions", "norm_pre"].filter((step) => has(model, step))];
export const stepsAfter = (model) => [...["norm", "pool", "pre_logits", "head"].filter((step) => has(model, step)), ...(has(model, "head") ? ["answer"] : [])];
export const stepsInside = (model) => {
  const norms = model.norm === "post" ? [] : ["norm1", "norm2"];
  return ["norm1", "qkv", "scores", "softmax", "mix", "heads", "proj", "add1", "norm2", "fc1", "gelu", "fc2", "add2"].filter((step) => !step.startsWith("norm") || norms.includes(step));
};
export const isInside = (model, step) => stepsInside(model).includes(step);
export const isStep = (model, step) => step === "block" || isInside(model, step) || [...stepsBefore(model), ...stepsAfter(model)].includes(step);

// The first block is gone through step by step, the others as a whole; any block can be opened.
export function next(model, { step, layer }) {
  const before = stepsBefore(model), inside = stepsInside(model), after = stepsAfter(model), last = model.depth - 1;
  if (before.includes(step)) return step === before.at(-1) ? { layer: 0, step: inside[0] } : { step: before[before.indexOf(step) + 1] };
  if (inside.includes(step) && step !== inside.at(-1)) return { step: inside[inside.indexOf(step) + 1] };
  if (inside.includes(step) || step === "block") return layer === last ? { step: after[0] } : { layer: layer + 1, step: "block" };
  const at = after.indexOf(step);
  return at === after.length - 1 ? null : { step: after[at + 1] };
}

export function previous(model, { step, layer }) {
  const before = stepsBefore(model), inside = stepsInside(model), after = stepsAfter(model);
  if (before.includes(step)) return step === before[0] ? null : { step: before[before.indexOf(step) - 1] };
  if (inside.includes(step) && step !== inside[0]) return { step: inside[inside.indexOf(step) - 1] };
  if (inside.includes(step) || step === "block") return layer === 0 ? { step: before.at(-1) } : { layer: layer - 1, step: "block" };
  const at = after.indexOf(step);
  return at === 0 ? { layer: model.depth - 1, step: "block" } : { step: after[at - 1] };
}

// What a step inside a block computes, in the letters of ViT (arXiv:2010.11929), eqs. 2-3 and 5-8.
export function equationInside(model, step) {
  const { norm, layer_scale: scaled, gated, positions, qk_norm: normed } = model, z = norm === "post" ? "z" : "LN(z)";
  const q = normed ? "LN(q)" : "q", k = normed ? "LN(k)" : "k", bias = positions.includes("relative") ? " + b" : "";
  const turn = positions.includes("rotary"), score = `${turn ? `R${q}` : q} · ${turn ? `R${k}` : k}ₙ / √d${bias}`;
  const add = (branch, from, i) => { const sum = `${scaled ? `λ${i} ⊙ ` : ""}${branch} + ${from}`; return norm === "post" ? `LN(${sum})` : sum; };
  return {
    norm1: model.norm_kind === "RMSNorm" ? "γ ⊙ z / rms(z)" : "LN(z) = γ ⊙ (z − μ) / σ + β",
    qkv: `[q, k, v] = ${z} U_qkv`,
    scores: `sₙ = ${score}`,
    softmax: "Aₙ = exp(sₙ) / Σₘ exp(sₘ)",
    mix: "SA(z) = Σₙ Aₙ vₙ",
    heads: "[SA₁(z); SA₂(z); …; SAₕ(z)]",
    proj: "MSA(z) = [SA₁(z); …; SAₕ(z)] U_msa",
    add1: `z′ = ${add("MSA", "z", "₁")}`,
    norm2: model.norm_kind === "RMSNorm" ? "γ ⊙ z′ / rms(z′)" : "LN(z′) = γ ⊙ (z′ − μ) / σ + β",
    fc1: gated ? "[a, b] = LN(z′) W₁ + b₁" : `a = ${norm === "post" ? "z′" : "LN(z′)"} W₁ + b₁`,
    gelu: gated ? "σ(a) ⊙ b" : `${activation(model)}(a)`,
    fc2: `${gated ? "(σ(a) ⊙ b)" : `${activation(model)}(a)`} W₂ + b₂`,
    add2: `zₗ = ${add("MLP", "z′", "₂")}`,
  }[step];
}

export function activation(model) {
  const name = model.mlp.split(", ").at(-1);
  return { gelu: "GELU", gelu_tanh: "GELU", quick_gelu: "QuickGELU", relu: "ReLU", silu: "SiLU" }[name] ?? name;
}
