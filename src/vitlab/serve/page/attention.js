// 3. Where each patch looks, by layer and head; the maps of other methods, as the server lists them; how far the heads look.
import { array } from "./net.js";
import { board, chart, el, frame, heat, heatColour, highest } from "./draw.js";
import { orElse, t } from "./text.js";
import { follow, rowOf } from "./looking.js";

export async function show(panel, page, current) {
  const name = page.focus, about = page.about(name), view = await page.view(name), grid = about.grid;
  if (!current()) return;
  const layers = Array(about.depth).fill(null), state = { mode: "attention", layer: about.depth - 1, head: null, patch: null, map: null };
  const method = () => about.methods.find((m) => m.name === state.mode), byClass = () => Boolean(method()?.by_class);
  const mode = el("select", { id: "mode" }, el("option", { value: "attention", text: t("m_attention") }), ...about.methods.map((m) => el("option", { value: m.name, text: orElse(`m_${m.name}`, m.title) })));
  const layer = el("input", { type: "range", id: "layer", min: 1, max: about.depth, value: about.depth });
  const layerText = el("span"), heads = el("select", { id: "head" }, el("option", { value: "", text: t("mean") }), ...Array.from({ length: about.heads }, (_, i) => el("option", { value: i, text: String(i + 1) })));
  const classes = el("select", { id: "class" }), classRow = el("label", { hidden: true }, t("theclass"), classes);
  const canvas = board(view, Math.max(2, Math.round(420 / view.width)), t("hover")), told = el("p", { id: "told", "aria-live": "polite" });
  canvas.id = "attention";
  const all = el("canvas", { id: "all-heads", role: "img", "aria-label": t("allheads") }), plot = el("div");
  panel.append(el("div", { class: "split" },
    el("div", {}, canvas, el("p", { class: "quiet", text: t("hover") }), told),
    el("div", {}, el("div", { class: "controls" }, el("label", {}, t("mode"), mode), el("label", {}, layerText, layer), el("label", {}, t("head"), heads), classRow),
      el("h3", { text: t("allheads") }), all, el("h3", { text: t("distance") }), plot)));

  const draw = () => {
    const began = performance.now();
    layerText.textContent = t("layer", { n: state.layer + 1, all: about.depth });
    let values = state.map;
    if (state.mode === "attention") {
      const found = layers[state.layer];
      if (!found) return;
      values = rowOf(found.data, found.shape, about, state.patch, state.head);
      const sum = values.reduce((a, b) => a + b, 0), most = values.indexOf(highest(values));
      const place = { share: (100 * sum).toFixed(1), r2: Math.floor(most / grid[1]) + 1, c2: (most % grid[1]) + 1 };
      told.textContent = state.patch !== null ? t("lookpatch", { ...place, r: Math.floor(state.patch / grid[1]) + 1, c: (state.patch % grid[1]) + 1 })
        : t("looktoken", { ...place, token: t(about.reads < about.prefix.length ? "t_class" : "t_mean") });
    } else told.textContent = "";
    if (!values) return;
    const least = state.mode === "attention" ? 0 : method().signed ? -highest(values.map(Math.abs)) : Math.min(...values);
    heat(canvas, view, grid, values, { least, most: method()?.signed ? -least : null });
    if (state.mode === "attention" && state.patch !== null) frame(canvas, grid, state.patch);
    window.vitlab.timings.push(performance.now() - began);
  };
  const load = async (n) => { layers[n] ||= await page.part(name, "attention", { layer: n }, array); };
  const change = () => page.guard(async () => {
    for (const control of [layer, heads]) control.disabled = state.mode !== "attention";
    classRow.hidden = !byClass();
    if (state.mode === "attention") await load(state.layer);
    else state.map = (await page.part(name, state.mode, byClass() ? { class: classes.value } : null, array)).data;
    if (current()) draw();
  });
  follow(canvas, grid, (patch) => { state.patch = patch; draw(); }, () => { state.patch = null; draw(); });
  mode.addEventListener("change", () => { state.mode = mode.value; change(); });
  layer.addEventListener("input", () => { state.layer = Number(layer.value) - 1; change(); });
  heads.addEventListener("change", () => { state.head = heads.value === "" ? null : Number(heads.value); draw(); });
  classes.addEventListener("change", change);
  if (about.methods.some((m) => m.by_class)) {
    const { labels } = await page.part(name, "walk"), first = (await page.part(name, "predict")).scores[0].label;
    labels.forEach((label, i) => classes.append(el("option", { value: i, text: label, selected: label === first })));
  }
  await change();
  const { distance } = await page.part(name, "distance");
  if (!current()) return;
  plot.append(chart([distance.flatMap((row, l) => row.map((far) => [l + 1, far]))], { name: t("distance"), dots: true, width: Math.min(460, plot.clientWidth), x: t("axis_layer"), y: "px" }));
  for (let n = 0; n < about.depth && current(); n++) await load(n);
  if (!current()) return;
  overview(all, about, layers);
  all.addEventListener("click", (event) => {
    const box = all.getBoundingClientRect();
    state.layer = Math.floor(((event.clientY - box.top) / box.height) * about.depth);
    state.head = Math.floor(((event.clientX - box.left) / box.width) * about.heads);
    [mode.value, state.mode, layer.value, heads.value] = ["attention", "attention", state.layer + 1, state.head];
    change();
  });
  document.getElementById("attention").dataset.loaded = "all";
}

// A small map for each layer and head, of the token that the head reads.
function overview(canvas, about, layers) {
  const gap = 3, side = Math.min(64, Math.floor(444 / about.heads) - gap), [rows, columns] = about.grid, off = new OffscreenCanvas(columns, rows), one = off.getContext("2d");
  [canvas.width, canvas.height] = [about.heads * (side + gap), about.depth * (side + gap)];
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  layers.forEach(({ data, shape }, l) => {
    for (let h = 0; h < about.heads; h++) {
      heatPixels(one, rowOf(data, shape, about, null, h), columns, rows);
      pen.drawImage(off, h * (side + gap), l * (side + gap), side, side);
    }
  });
}

function heatPixels(pen, values, columns, rows) {
  const pixels = pen.createImageData(columns, rows), top = highest(values);
  values.forEach((value, i) => pixels.data.set([...heatColour(top > 0 ? value / top : 0), 255], 4 * i));
  pen.putImageData(pixels, 0, 0);
}
