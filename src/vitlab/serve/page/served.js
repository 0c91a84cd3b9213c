// The source that asks the server. Answers are kept, so that going back and forth asks nothing twice.
//
//   models()    [{name, family, size: [H, W], patch, grid: [rows, columns], depth, heads, width, head_dim, hidden, prefix: [names],
//               reads (number of the token that the head reads; null: mean or attention pooling), pooling, stem, positions, norm,
//               norm_kind, qk_norm, layer_scale, gated, mlp, steps, equations, labels, task, offers: [names], methods, parameters}]
//   samples()   [{name, url, licence}]
//   exercises() [{exercise, titles: {en, zh}, command, steps: [names], panel, fragment}], as vitlab.learn.page_links returns them
//   open(model, blob)                          a look: {id, model, size: [H, W], view, sharp}
//                                              view: what the model sees, in its pixels; sharp: the same part of the photo, in the photo's
//   forward(look, edit)                        {logits, probabilities, by_depth, lengths: {step: [N]}}
//   block(look, {layer, head, token}, edit)    Float32Arrays by name, as vitlab.explain.block_view returns them
//   cell(look, {layer, token, step, channel, head}, edit)      one number of a block: {inputs, weights, bias}; null where it cannot be told
//   rows(look, token, edit)                    (L, h, N), where one token looks in every layer and head
//   attention(look, layer, edit)               (h, N, N)
//   heat(look, method, number, edit)           (rows, columns); number: of a class, where the method needs one
//   positions(look), similarity(look), colours(look), distance(look), walk(look), predict(look), fewer(look, reducer),
//   reconstruction(look, options), sentences(look, lines), search(what, top), picture(number), runs(), run(name, after), index()
//   capabilities                               {} or what this source cannot do: name -> key of a sentence in text.js
//
// Arrays are {shape, data}; layers, heads and tokens count from 0.
import { array, arrays, blob, json, post, setToken } from "./net.js";
import { cut } from "./photo_crop.js";

const MOST_KEPT = 400;
const kept = new Map();
let known = []; // models

async function once(path, read) {
  if (!kept.has(path)) {
    kept.set(path, read(path));
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  }
  try { return await kept.get(path); }
  catch (error) { kept.delete(path); throw error; }
}

function query(look, name, options = {}, edit = {}, read = json) {
  const parts = new URLSearchParams(options);
  if (Object.keys(edit).length) parts.set("edit", JSON.stringify(edit));
  const text = parts.toString();
  return once(`page/look/${look.id}/${name}${text ? `?${text}` : ""}`, read);
}

export const source = {
  capabilities: {},
  setToken,
  async models() {
    known = await json("page/models");
    return known;
  },
  samples: () => json("page/samples"),
  index: () => json("page/index"),
  exercises: () => json("page/exercises"),
  runs: () => json("page/runs"),
  run: (name, after) => json(`page/runs/${encodeURIComponent(name)}?after=${after}`),
  file: blob,

  async open(model, image) {
    const form = new FormData();
    form.append("image", image, "image");
    const { look, geometry, size } = await post(`page/look?model=${encodeURIComponent(model)}`, form);
    if (known.find(({ name }) => name === model)?.offers.includes("forward")) query({ id: look }, "forward").catch(() => {}); // asked for next: it need not wait for the view
    const view = await createImageBitmap(await blob(`page/look/${look}/view`));
    return { id: look, model, size, view, sharp: await cut(image, geometry, size, view) };
  },

  forward: (look, edit) => query(look, "forward", {}, edit),
  block: (look, { layer, head, token }, edit) => query(look, "block", { layer, head, token }, edit, arrays),
  cell: (look, options, edit) => query(look, "cell", options, edit, arrays),
  rows: (look, token, edit) => query(look, "rows", { token }, edit, array),
  attention: (look, layer, edit) => query(look, "attention", { layer }, edit, array),
  heat: (look, method, number, edit) => query(look, method, number === null ? {} : { class: number }, edit, array),

  positions: (look) => query(look, "positions", {}, {}, array),
  similarity: (look) => query(look, "similarity", {}, {}, array),
  colours: (look) => query(look, "colours", {}, {}, array),
  distance: (look) => query(look, "distance"),
  walk: (look) => query(look, "walk"),
  predict: (look) => query(look, "predict"),
  fewer: (look, reducer) => query(look, "fewer", { reducer }),
  reconstruction: (look, options) => query(look, "painted", options),
  sentences: (look, lines) => query(look, "sentences", { texts: lines }),

  search(what, top) {
    const form = new FormData();
    for (const [name, value] of Object.entries(what)) name === "image" ? form.append(name, value, "image") : form.append(name, value);
    return post(`search?top=${top}`, form);
  },
  picture: (number) => blob(`search/pictures/${number}`),
};
