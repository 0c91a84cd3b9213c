// Runs ONNX graphs and prepares photos beside the page, so that the page never stops moving.
//   { call: "prepare", blob, preprocess }            -> { input, pixels, geometry }
//   { call: "load", folder, graph, weights }         -> nothing; the graph is ready for the first pass
//   { call: "run", folder, graph, weights, feeds }   -> { name: { dims, data } }; feeds: { name: { type, dims, data } }
import * as ort from "./ort.wasm.min.mjs";
import { normalise, viewOf } from "./preprocess.js";

ort.env.logLevel = "error";
ort.env.wasm.numThreads = 1; // more threads need headers that a plain file server does not send
ort.env.wasm.wasmPaths = { mjs: new URL("./ort-wasm-simd-threaded.mjs", import.meta.url).href };

const weightsOf = new Map(), sessions = new Map(); // by address, as promises

async function bytes(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${new URL(address).pathname}: ${answer.status} ${answer.statusText}`);
  return new Uint8Array(await answer.arrayBuffer());
}

const runtime = bytes(new URL("./ort-wasm-simd-threaded.wasm", import.meta.url).href); // at once: it is the largest file
runtime.catch(() => {}); // whoever needs it will hear

// A download that failed is tried again by the next call.
function once(map, key, make) {
  if (!map.has(key)) map.set(key, make().catch((error) => { map.delete(key); throw error; }));
  return map.get(key);
}

// One after another: onnxruntime-web keeps one list of external files for all sessions that are being made.
let making = Promise.resolve();
function make(model, weights, external) {
  const made = making.then(() => ort.InferenceSession.create(model, {
    executionProviders: ["wasm"], graphOptimizationLevel: "all", logSeverityLevel: 3, externalData: [{ path: weights, data: external }],
  }));
  making = made.catch(() => {});
  return made;
}

function session(folder, graph, weights) {
  return once(sessions, folder + graph, async () => {
    const data = once(weightsOf, folder + weights, () => bytes(folder + weights));
    const [model, external, binary] = await Promise.all([bytes(folder + graph), data, runtime]);
    ort.env.wasm.wasmBinary ??= binary.buffer;
    return make(model, weights, external);
  });
}

const CALLS = {
  async prepare({ blob, preprocess }) {
    const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none", imageOrientation: "from-image" });
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
    const { pixels, geometry } = viewOf(preprocess, data, [bitmap.height, bitmap.width]);
    return { input: normalise(pixels, preprocess), pixels, geometry };
  },
  async load({ folder, graph, weights }) { await session(folder, graph, weights); },
  async run({ folder, graph, weights, feeds }) {
    const loaded = await session(folder, graph, weights), tensors = {};
    for (const [name, { type, dims, data }] of Object.entries(feeds)) tensors[name] = new ort.Tensor(type, data, dims);
    const outputs = await loaded.run(tensors), result = {};
    for (const [name, tensor] of Object.entries(outputs)) result[name] = { dims: [...tensor.dims], data: tensor.data };
    return result;
  },
};

async function answer({ id, call, ...options }) {
  try {
    const result = await CALLS[call](options);
    const buffers = new Set(Object.values(result ?? {}).map((value) => (value.data ?? value)?.buffer).filter(Boolean));
    self.postMessage({ id, result }, [...buffers]);
  } catch (error) {
    self.postMessage({ id, error: error.message ?? String(error) });
  }
}

let passes = Promise.resolve(); // one after another
self.onmessage = ({ data }) => {
  if (data.call === "run") passes = passes.then(() => answer(data));
  else answer(data);
};
