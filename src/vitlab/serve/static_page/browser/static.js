// Where the page's numbers come from when there is no server: ONNX graphs that run in this browser (worker.js). `source` has
// the functions that served.js describes.
import { Refused } from "./net.js";
import { cut } from "./photo_crop.js";
import { t } from "./text.js";
import { attentionDistance, cosines, lastAttention, principalColours, rollout } from "./maps.js";
import { toPixels } from "./preprocess.js";
import { torchPermutation, uniform } from "./random.js";
import { tokenIds } from "./tokenizer.js";

const ROOT = new URL("../static/", import.meta.url);
const KEPT = 4; // passes of one photo: knobs are turned back and forth
const TOP = 5; // classes in a short answer
const KNOBS = ["mask_patches", "drop_heads", "temperature", "scale_by_sqrt_d", "positions", "seed"];
const BEFORE = ["patch_embed", "prefix", "positions", "norm_pre"]; // steps before the blocks, in their order
const refuse = (key, values) => { throw new Refused(422, t(key, values), ""); };

// ---------------------------------------------------------------- the worker

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" }), waiting = new Map();
let calls = 0;
worker.onmessage = ({ data: { id, result, error } }) => {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  error === undefined ? resolve(result) : reject(new Refused(500, error, ""));
};
worker.onerror = (event) => {
  for (const { reject } of waiting.values()) reject(new Refused(500, event.message || t("static_gone"), ""));
  waiting.clear();
};

function call(name, options) {
  return new Promise((resolve, reject) => {
    waiting.set(++calls, { resolve, reject });
    worker.postMessage({ id: calls, call: name, ...options });
  });
}

const graphOf = (model, name) => ({ folder: new URL(`${model.files.folder}/`, ROOT).href, graph: model.files[name], weights: model.files.weights });
const run = (model, name, feeds) => call("run", { ...graphOf(model, name), feeds });
const floats = (data, dims) => ({ type: "float32", data: Float32Array.from(data), dims });
const wholes = (data, dims) => ({ type: "int64", data: BigInt64Array.from(data, BigInt), dims });

// ---------------------------------------------------------------- models and photos

async function file(address) {
  const answer = await fetch(address).catch(() => null);
  if (!answer?.ok) throw new Refused(answer?.status ?? 500, `${t("static_gone")} (${new URL(address, ROOT).pathname})`, "");
  return answer;
}

let contents = null;
async function about() {
  contents ??= file(new URL("page.json", ROOT)).then((answer) => answer.json());
  try { return await contents; } catch (error) { contents = null; throw error; }
}

async function open(name, image) {
  const model = (await about()).models.find((one) => one.name === name), size = model.preprocess.size;
  call("load", graphOf(model, "inside")).catch(() => {}); // while the photo is read; the first pass tells what fails
  const { input, geometry } = await call("prepare", { blob: image, preprocess: model.preprocess });
  const look = { model: name, about: model, size, input, passes: new Map(), heats: new Map() };
  pass(look).catch(() => {}); // asked for next
  const view = await bitmap(input, model);
  return Object.assign(look, { view, sharp: await cut(image, geometry, size, view) });
}

const bitmap = (input, { preprocess }) => createImageBitmap(new ImageData(toPixels(input, preprocess), preprocess.size[1], preprocess.size[0]));

// ---------------------------------------------------------------- a forward pass, and what an edit changes in it

// The edit as inputs of the graphs
function knobs(model, edit) {
  const unknown = Object.keys(edit).find((name) => !KNOBS.includes(name));
  if (unknown) refuse("static_edit", { name: unknown });
  const [rows, columns] = model.grid, patches = rows * columns, positions = edit.positions ?? "kept";
  if (positions !== "kept" && !model.files.positions) refuse("static_positions");
  const patchFactors = new Float32Array(patches).fill(1), headFactors = new Float32Array(model.depth * model.heads).fill(1);
  for (const patch of edit.mask_patches ?? []) patchFactors[patch] = 0;
  for (const [layer, head] of edit.drop_heads ?? []) headFactors[((layer + model.depth) % model.depth) * model.heads + head] = 0;
  const order = positions === "shuffled" ? torchPermutation(patches, edit.seed ?? 0) : Array.from({ length: patches }, (_, i) => i);
  return {
    patch_factors: floats(patchFactors, [patches]),
    head_factors: floats(headFactors, [model.depth, model.heads]),
    score_factor: floats([scoreFactor(model, edit)], [1]),
    position_factor: floats([positions === "removed" ? 0 : 1], [1]),
    position_order: wholes(order, [patches]),
  };
}

const scoreFactor = (model, edit) => (edit.scale_by_sqrt_d === false ? Math.sqrt(model.head_dim) : 1) / (edit.temperature ?? 1);
const image = (look) => floats(look.input, [1, look.about.preprocess.mean.length, ...look.size]);

function kept(map, key, make) {
  if (!map.has(key)) {
    map.set(key, make().catch((error) => { map.delete(key); throw error; }));
    if (map.size > KEPT) map.delete(map.keys().next().value);
  }
  return map.get(key);
}

// Every output of the graph for this photo and edit: { name: { dims, data } }
const pass = (look, edit = {}) => kept(look.passes, JSON.stringify(edit), async () => run(look.about, "inside", { images: image(look), ...knobs(look.about, edit) }));

function softmax(values) {
  const most = values.reduce((a, b) => Math.max(a, b)), powers = Array.from(values, (x) => Math.exp(x - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((x) => x / sum);
}

// What a user reads: probabilities of classes; each label by itself; or numbers in their own units.
function scores(model, logits) {
  if (model.task.kind === "class") return softmax(logits);
  return Array.from(logits, (x) => (model.task.kind === "number" ? x * model.task.std + model.task.mean : 1 / (1 + Math.exp(-x))));
}

const rowsOf = ({ dims: [count, width], data }) => Array.from({ length: count }, (_, i) => data.subarray(i * width, (i + 1) * width));
const lengthsOf = (value) => Float32Array.from(rowsOf(value), (row) => Math.sqrt(row.reduce((sum, x) => sum + x * x, 0)));

// One layer of an output that is stacked over layers
function layerOf({ dims: [depth, ...dims], data }, layer) {
  const size = data.length / depth;
  return { dims, data: data.subarray(layer * size, (layer + 1) * size) };
}

async function forward(look, edit) {
  const model = look.about, values = await pass(look, edit), lengths = {};
  for (const step of BEFORE) if (values[step]) lengths[step] = lengthsOf(values[step]);
  for (let layer = 0; layer < model.depth; layer++) lengths[`blocks.${layer}`] = lengthsOf(layerOf(values.tokens, layer));
  if (values.norm) lengths.norm = lengthsOf(values.norm);
  if (!values.logits) return { logits: null, probabilities: null, by_depth: null, lengths };
  const by_depth = rowsOf(values.by_depth).map((logits) => scores(model, logits));
  return { logits: Array.from(values.logits.data), probabilities: scores(model, values.logits.data), by_depth, lengths };
}

// One token's way through one block, by the names of vitlab.explain.block_view.
async function block(look, { layer, head, token }, edit = {}) {
  const model = look.about, values = await pass(look, edit), arrays = {};
  const before = BEFORE.findLast((step) => values[step]);
  const row = ({ dims: [, width], data }) => data.slice(token * width, (token + 1) * width);
  const here = (name) => layerOf(values[name], layer);
  const ofHead = (name) => { const { dims: [, n, d], data } = here(name); return data.slice(head * n * d, (head + 1) * n * d); };
  arrays.input = row(layer === 0 ? values[before] : layerOf(values.tokens, layer - 1));
  if (values.norm1) arrays.norm1 = row(here("norm1"));
  const d = model.head_dim, n = here("keys").dims[1];
  arrays.q = ofHead("queries").slice(token * d, (token + 1) * d);
  arrays.keys = ofHead("keys");
  arrays.values = ofHead("values");
  arrays.scores = dots(arrays.q, arrays.keys, n, scoreFactor(model, edit) / Math.sqrt(d));
  arrays.weights_by_head = new Float32Array(model.heads * n);
  for (let h = 0; h < model.heads; h++) arrays.weights_by_head.set(here("attention").data.subarray((h * n + token) * n, (h * n + token + 1) * n), h * n);
  arrays.weights = arrays.weights_by_head.slice(head * n, (head + 1) * n);
  arrays.mixed = mix(arrays.weights, arrays.values, d); // of a dropped head what it found; `heads` has what is left of it
  arrays.heads = row(here("heads"));
  for (const name of ["proj", "after_attention", "norm2", "fc1_pre", "fc1", "fc2"]) if (values[name]) arrays[name] = row(here(name));
  for (const name of ["scale1", "scale2"]) if (values[name]) arrays[name] = here(name).data.slice();
  arrays.output = row(here("tokens"));
  return arrays;
}

function dots(query, keys, count, factor) {
  const d = query.length;
  return Float32Array.from({ length: count }, (_, i) => {
    let sum = 0;
    for (let c = 0; c < d; c++) sum += query[c] * keys[i * d + c];
    return sum * factor;
  });
}

function mix(weights, values, d) {
  const sum = new Float32Array(d);
  weights.forEach((weight, i) => { for (let c = 0; c < d; c++) sum[c] += weight * values[i * d + c]; });
  return sum;
}

// (h, N, N)
async function attention(look, layer, edit) {
  const { dims, data } = layerOf((await pass(look, edit)).attention, layer);
  return { shape: dims, data };
}

// (L, h, N): where one token looks in every layer and head
async function rows(look, token, edit) {
  const { dims: [depth, heads, n], data } = (await pass(look, edit)).attention, result = new Float32Array(depth * heads * n);
  for (let i = 0; i < depth * heads; i++) result.set(data.subarray((i * n + token) * n, (i * n + token + 1) * n), i * n);
  return { shape: [depth, heads, n], data: result };
}

// ---------------------------------------------------------------- maps of the patches

// Layers of attention, (h, N, N) each
async function attentionLayers(look, edit) {
  const { attention } = await pass(look, edit), [depth, heads, tokens] = attention.dims;
  return { layers: Array.from({ length: depth }, (_, layer) => layerOf(attention, layer).data), heads, tokens };
}

// (rows, columns): how much each patch counts, by a method of vitlab.explain
async function heat(look, method, number, edit = {}) {
  const model = look.about, shape = model.grid;
  if (method === "attention" || method === "rollout") {
    const { layers, heads, tokens } = await attentionLayers(look, edit);
    return { shape, data: method === "rollout" ? rollout(model, layers, heads, tokens) : lastAttention(model, layers.at(-1), heads, tokens) };
  }
  if (!model.files.heat || !model.classes) refuse("static_method", { name: method });
  const weights = new Float32Array(model.classes), { logits } = await pass(look);
  weights[number ?? logits.data.indexOf(Math.max(...logits.data))] = 1; // of no class in particular: the first, as in vitlab.explain
  const maps = await gradientMaps(look, weights, edit);
  if (!maps[method]) refuse("static_method", { name: method });
  return { shape, data: maps[method].data };
}

const gradientMaps = (look, weights, edit) => kept(look.heats, JSON.stringify([edit, Array.from(weights)]), async () =>
  run(look.about, "heat", { images: image(look), weights: floats(weights, [weights.length]), ...knobs(look.about, edit) }));

async function distance(look, edit) {
  const { layers, heads, tokens } = await attentionLayers(look, edit);
  return { distance: layers.map((layer) => attentionDistance(look.about, layer, heads, tokens)) };
}

// (r, c, r, c): cosine of the position vectors; computed when the page was built
async function positions(look) {
  const [r, c] = look.about.grid;
  if (!look.about.files.positions) refuse("static_positions");
  const answer = await file(new URL(`${look.about.files.folder}/${look.about.files.positions}`, ROOT));
  return { shape: [r, c, r, c], data: new Float32Array(await answer.arrayBuffer()) };
}

// The patches' tokens after the last block and the final norm
async function patchTokens(look, edit) {
  const values = await pass(look, edit), last = values.norm ?? layerOf(values.tokens, look.about.depth - 1);
  const [tokens, width] = last.dims, before = look.about.prefix.length;
  return { data: last.data.subarray(before * width), count: tokens - before, width };
}

// (N, N)
async function similarity(look, edit) {
  const { data, count, width } = await patchTokens(look, edit);
  return { shape: [count, count], data: cosines(data, count, width) };
}

// (r, c, 3), bytes
async function colours(look, edit) {
  const { data, count, width } = await patchTokens(look, edit);
  return { shape: [...look.about.grid, 3], data: Uint8Array.from(principalColours(data, count, width), (x) => Math.round(255 * x)) };
}

// ---------------------------------------------------------------- MAE, CLIP

// hide: { mask: "0110..." } with a 1 for each hidden patch, or { percent, seed }
async function reconstruction(look, hide) {
  const model = look.about, [rowCount, columnCount] = model.grid, patches = rowCount * columnCount, [h, w] = look.size;
  const hidden = hide.mask ? Array.from(hide.mask, (bit) => bit === "1") : chosenByChance(patches, Number(hide.percent) / 100, Number(hide.seed));
  const visible = hidden.flatMap((is, patch) => (is ? [] : [patch]));
  if (!visible.length || visible.length === patches) refuse("static_mask");
  const { painted, errors } = await run(model, "reconstruction", { images: image(look), visible: wholes(visible, [visible.length]) });
  const channels = model.preprocess.mean.length, pasted = look.input.slice(), seen = look.input.slice();
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    if (!hidden[Math.floor((y * rowCount) / h) * columnCount + Math.floor((x * columnCount) / w)]) continue;
    for (let c = 0; c < channels; c++) { const at = (c * h + y) * w + x; pasted[at] = painted.data[at]; seen[at] = 0; }
  }
  const error = hidden.reduce((sum, is, patch) => sum + (is ? errors.data[patch] : 0), 0) / (patches - visible.length);
  const pixels = [look.input, seen, pasted].flatMap((one) => Array.from(toPixels(one, model.preprocess)).filter((_, i) => i % 4 < 3));
  return { shape: [3, h, w, 3], pixels: base64(pixels), mask: hidden.map(Number).join(""), error };
}

function base64(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}

// The patches of lowest noise stay visible, as in vitlab.explain.reconstruct.
function chosenByChance(patches, ratio, seed) {
  const noise = uniform(patches, seed, 0), order = Array.from(noise.keys()).sort((a, b) => noise[a] - noise[b] || a - b);
  const visible = new Set(order.slice(0, Math.trunc(patches * (1 - ratio))));
  return Array.from(noise, (_, patch) => !visible.has(patch));
}

// Of each line: cosine with the photo, probability among the lines, relevance of the patches
async function sentences(look, lines) {
  const model = look.about, [rowCount, columnCount] = model.grid;
  const texts = [...new Set(lines.split("\n").map((line) => line.trim()).filter(Boolean))], cosine = [], maps = [];
  if (!texts.length) refuse("static_sentences");
  const { embedding } = await pass(look);
  for (const text of texts) {
    const ids = tokenIds(model.tokenizer, text);
    const { sentence: words } = await run(model, "text", { ids: wholes(ids, [1, ids.length]) });
    cosine.push(words.data.reduce((sum, x, i) => sum + x * embedding.data[i], 0));
    const { relevance } = await gradientMaps(look, words.data, {});
    maps.push(Array.from({ length: rowCount }, (_, r) => Array.from(relevance.data.subarray(r * columnCount, (r + 1) * columnCount))));
  }
  return { texts, cosine, probability: softmax(cosine.map((x) => model.scale * x + (model.bias ?? 0))), maps };
}

// ---------------------------------------------------------------- all of it

async function predict(look) {
  const began = performance.now(), { logits } = await run(look.about, "inside", { images: image(look), ...knobs(look.about, {}) });
  const milliseconds = performance.now() - began, probabilities = scores(look.about, logits.data);
  const best = Array.from(probabilities.keys()).sort((a, b) => probabilities[b] - probabilities[a]).slice(0, TOP);
  return { scores: best.map((number) => ({ label: look.about.labels[number], probability: probabilities[number] })), milliseconds };
}

export const source = {
  cell: null,
  capabilities: { cell: "static_cell", fewer: "static_fewer", search: "static_search", training: "static_training" },
  setToken() {}, // nobody asks for one
  models: async () => (await about()).models,
  samples: async () => (await about()).samples.map(({ file, ...sample }) => ({ ...sample, url: new URL(file, ROOT).href })),
  index: async () => null,
  exercises: async () => (await about()).exercises,
  runs: async () => [],
  file: async (url) => (await file(url)).blob(),
  open, forward, block, rows, attention, heat, positions, similarity, colours, distance, predict, reconstruction, sentences,
  walk: async (look) => look.about.walk, // shapes and costs, the same for every photo
  fewer: async () => refuse("static_fewer"),
  search: async () => refuse("static_search"),
};
