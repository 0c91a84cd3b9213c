// Where the page's numbers come from when there is no server: ONNX graphs that run in this browser (worker.js). The same
// functions as served.js has.
import { cosines, lastAttention, principalColours, rollout } from "./maps.js";
import { toPixels } from "./preprocess.js";
import { torchPermutation, uniform } from "./random.js";
import { tokenIds } from "./tokenizer.js";

const ROOT = new URL("../static/", import.meta.url);
const KEPT = 4; // results of one photo: sliders are moved back and forth

// ---------------------------------------------------------------- the worker

let worker = null, calls = 0;
const waiting = new Map();

function call(name, options) {
  if (!worker) {
    worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = waiting.get(id);
      waiting.delete(id);
      error === undefined ? resolve(result) : reject(new Error(error));
    };
    worker.onerror = (event) => {
      for (const { reject } of waiting.values()) reject(new Error(event.message || "the worker could not be loaded"));
      waiting.clear();
    };
  }
  return new Promise((resolve, reject) => {
    waiting.set(++calls, { resolve, reject });
    worker.postMessage({ id: calls, call: name, ...options });
  });
}

const run = (model, graph, feeds) => call("run", { folder: new URL(`${model.files.folder}/`, ROOT).href, graph, weights: model.files.weights, feeds });
const floats = (data, dims) => ({ type: "float32", data: Float32Array.from(data), dims });
const wholes = (data, dims) => ({ type: "int64", data: BigInt64Array.from(data, BigInt), dims });

// ---------------------------------------------------------------- models and photos

let contents = null;
async function about() {
  contents ??= fetch(new URL("page.json", ROOT)).then((answer) => {
    if (!answer.ok) throw new Error(`page.json: ${answer.status}`);
    return answer.json();
  }).catch((error) => { contents = null; throw error; });
  return contents;
}

export const models = async () => (await about()).models;
export const samples = async () => (await about()).samples.map((sample) => ({ ...sample, url: new URL(sample.file, ROOT).href }));
const named = async (name) => (await models()).find((model) => model.name === name);

// A photo as a model sees it: { model, view, geometry }
export async function open(name, image) {
  const model = await named(name);
  const { input, geometry } = await call("prepare", { blob: image, preprocess: model.preprocess });
  const [h, w] = model.preprocess.size;
  const view = await createImageBitmap(new ImageData(toPixels(input, model.preprocess), w, h));
  return { model: name, about: model, view, geometry, input, results: new Map(), heats: new Map() };
}

// ---------------------------------------------------------------- a forward pass, and what an edit changes in it

const KNOBS = ["mask_patches", "drop_heads", "temperature", "scale_by_sqrt_d", "positions", "seed"];

function knobs(model, edit) {
  const unknown = Object.keys(edit).find((name) => !KNOBS.includes(name));
  if (unknown) throw new Error(capabilities.edit(unknown));
  const [rows, columns] = model.grid, patches = rows * columns, positions = edit.positions ?? "kept";
  if (positions !== "kept" && !model.offers.includes("positions")) throw new Error(capabilities.positions);
  const patchFactors = new Float32Array(patches).fill(1), headFactors = new Float32Array(model.depth * model.heads).fill(1);
  for (const patch of edit.mask_patches ?? []) patchFactors[patch] = 0;
  for (const [layer, head] of edit.drop_heads ?? []) headFactors[((layer + model.depth) % model.depth) * model.heads + head] = 0;
  const order = positions === "shuffled" ? torchPermutation(patches, edit.seed ?? 0) : Array.from({ length: patches }, (_, i) => i);
  return {
    patch_factors: floats(patchFactors, [patches]),
    head_factors: floats(headFactors, [model.depth, model.heads]),
    score_factor: floats([scoreFactor(model, edit)], [1]),
    position_factor: floats([positions === "removed" || positions === "none" ? 0 : 1], [1]),
    position_order: wholes(order, [patches]),
  };
}

const scoreFactor = (model, edit) => (edit.scale_by_sqrt_d === false ? Math.sqrt(model.head_dim) : 1) / (edit.temperature ?? 1);
const image = (look) => floats(look.input, [1, look.about.preprocess.mean.length, ...look.about.preprocess.size]);

function kept(map, key, make) {
  if (!map.has(key)) {
    map.set(key, make().catch((error) => { map.delete(key); throw error; }));
    if (map.size > KEPT) map.delete(map.keys().next().value);
  }
  return map.get(key);
}

// Every output of the graph for this photo and edit: { name: { dims, data } }
async function pass(look, edit = {}) {
  return kept(look.results, JSON.stringify(edit), async () => run(look.about, look.about.files.inside, { images: image(look), ...knobs(look.about, edit) }));
}

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

export async function forward(look, edit) {
  const model = look.about, values = await pass(look, edit), lengths = {};
  for (const step of ["patch_embed", "prefix", "positions", "norm_pre"]) if (values[step]) lengths[step] = lengthsOf(values[step]);
  for (let layer = 0; layer < model.depth; layer++) lengths[`blocks.${layer}`] = lengthsOf(layerOf(values.tokens, layer));
  if (values.norm) lengths.norm = lengthsOf(values.norm);
  if (!values.logits) return { logits: null, probabilities: null, by_depth: null, lengths };
  const by_depth = rowsOf(values.by_depth).map((logits) => scores(model, logits));
  return { logits: Array.from(values.logits.data), probabilities: scores(model, values.logits.data), by_depth, lengths };
}

// One token's way through one block, by the names of vitlab.explain.block_view.
export async function block(look, { layer, head, token }, edit = {}) {
  const model = look.about, values = await pass(look, edit), arrays = {};
  const before = ["norm_pre", "positions", "prefix", "patch_embed"].find((step) => values[step]);
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
  arrays.heads = row(here("heads"));
  arrays.mixed = arrays.heads.slice(head * d, (head + 1) * d);
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

// (h, N, N)
export async function attention(look, layer, edit) {
  const { dims, data } = layerOf((await pass(look, edit)).attention, layer);
  return { shape: dims, data };
}

// (L, h, N): where one token looks in every layer and head
export async function rows(look, token, edit) {
  const { dims: [depth, heads, n], data } = (await pass(look, edit)).attention, result = new Float32Array(depth * heads * n);
  for (let i = 0; i < depth * heads; i++) result.set(data.subarray((i * n + token) * n, (i * n + token + 1) * n), i * n);
  return { shape: [depth, heads, n], data: result };
}

// ---------------------------------------------------------------- maps of the patches

// (r, c): how much each patch counts, by a method of vitlab.explain
export async function heat(look, method, label, edit = {}) {
  const model = look.about, shape = model.grid;
  if (method === "attention" || method === "rollout") {
    const { attention } = await pass(look, edit), [depth, heads, n] = attention.dims;
    const layers = Array.from({ length: depth }, (_, layer) => layerOf(attention, layer).data);
    return { shape, data: method === "rollout" ? rollout(model, layers, heads, n) : lastAttention(model, layers[depth - 1], heads, n) };
  }
  const weights = new Float32Array(model.labels?.length ?? 0);
  weights[label] = 1;
  const maps = await gradientMaps(look, weights, edit);
  if (!maps[method]) throw new Error(capabilities.method(method));
  return { shape, data: maps[method].data };
}

async function gradientMaps(look, weights, edit) {
  if (!look.about.files.heat) throw new Error(capabilities.classes);
  const key = JSON.stringify([edit, Array.from(weights)]);
  return kept(look.heats, key, async () => run(look.about, look.about.files.heat, { images: image(look), weights: floats(weights, [weights.length]), ...knobs(look.about, edit) }));
}

// (r, c, r, c): cosine of the position vectors; computed when the page was built
export async function positions(look) {
  const [r, c] = look.about.grid;
  if (!look.about.files.positions) throw new Error(capabilities.positions);
  const answer = await fetch(new URL(`${look.about.files.folder}/${look.about.files.positions}`, ROOT));
  return { shape: [r, c, r, c], data: new Float32Array(await answer.arrayBuffer()) };
}

// The patches' tokens after the last block and the final norm
async function patchTokens(look, edit) {
  const values = await pass(look, edit), last = values.norm ?? layerOf(values.tokens, look.about.depth - 1);
  const [tokens, width] = last.dims, before = look.about.prefix.length;
  return { data: last.data.subarray(before * width), count: tokens - before, width };
}

// (N, N)
export async function similarity(look, edit) {
  const { data, count, width } = await patchTokens(look, edit);
  return { shape: [count, count], data: cosines(data, count, width) };
}

// (r, c, 3), bytes
export async function colours(look, edit) {
  const { data, count, width } = await patchTokens(look, edit);
  return { shape: [...look.about.grid, 3], data: Uint8Array.from(principalColours(data, count, width), (x) => Math.round(255 * x)) };
}

// ---------------------------------------------------------------- MAE, CLIP

// hide: { mask: "0110..." } with a 1 for each hidden patch, or { percent, seed }
export async function painted(look, hide) {
  const model = look.about, [rowCount, columnCount] = model.grid, patches = rowCount * columnCount;
  if (!model.files.reconstruction) throw new Error(capabilities.painted);
  const hidden = hide.mask ? Array.from(hide.mask, (bit) => bit === "1") : chosenByChance(patches, hide.percent / 100, hide.seed);
  const visible = hidden.flatMap((is, patch) => (is ? [] : [patch]));
  if (!visible.length || visible.length === patches) throw new Error(capabilities.mask);
  const { painted, errors } = await run(model, model.files.reconstruction, { images: image(look), visible: wholes(visible, [visible.length]) });
  const [h, w] = model.preprocess.size, channels = model.preprocess.mean.length, pasted = look.input.slice(), seen = look.input.slice();
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    if (!hidden[Math.floor((y * rowCount) / h) * columnCount + Math.floor((x * columnCount) / w)]) continue;
    for (let c = 0; c < channels; c++) { const at = (c * h + y) * w + x; pasted[at] = painted.data[at]; seen[at] = 0; }
  }
  let error = 0;
  hidden.forEach((is, patch) => { if (is) error += errors.data[patch] / (patches - visible.length); });
  const images = await Promise.all([look.input, seen, pasted].map((one) => createImageBitmap(new ImageData(toPixels(one, model.preprocess), w, h))));
  return { images, mask: hidden.map(Number).join(""), error };
}

// The patches of lowest noise stay visible, as in vitlab.explain.reconstruct.
function chosenByChance(patches, ratio, seed) {
  const noise = uniform(patches, seed, 0), order = Array.from(noise.keys()).sort((a, b) => noise[a] - noise[b] || a - b);
  const visible = new Set(order.slice(0, Math.trunc(patches * (1 - ratio))));
  return Array.from(noise, (_, patch) => !visible.has(patch));
}

// Of each text: cosine with the photo, probability among the texts, relevance of the patches
export async function sentences(look, texts) {
  const model = look.about;
  if (!model.files.text) throw new Error(capabilities.sentences);
  const { embedding } = await pass(look), found = { texts, cosine: [], maps: [] };
  for (const text of texts) {
    const ids = tokenIds(model.tokenizer, text);
    const { embedding: words } = await run(model, model.files.text, { ids: wholes(ids, [1, ids.length]) });
    found.cosine.push(words.data.reduce((sum, x, i) => sum + x * embedding.data[i], 0));
    found.maps.push((await gradientMaps(look, words.data, {})).relevance.data);
  }
  const logits = found.cosine.map((x) => model.scale * x + (model.bias ?? 0));
  return { ...found, probability: softmax(logits) };
}

// ---------------------------------------------------------------- what it cannot do

const SERVE = "vitlab serve";
export const capabilities = {
  search: `Search needs an index of your photos: ${SERVE} --index INDEX.`,
  training: `A training run is followed by a server: ${SERVE}.`,
  fewer: `Merging and dropping tokens changes the network's shape, which this page computes in advance: ${SERVE}.`,
  sentences: `This model reads no sentences here: ${SERVE} with a CLIP.`,
  painted: "Only a masked autoencoder paints hidden patches.",
  mask: "Hide at least one patch, and leave at least one.",
  classes: "This model has no classes to explain.",
  positions: "This model has no position vectors that could be moved here.",
  method: (name) => `This page does not compute ${name}: ${SERVE}.`,
  edit: (name) => `This page cannot change ${name}: ${SERVE}.`,
};
