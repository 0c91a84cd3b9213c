// Links the attention view to Python. The view is a page in a frame, which tells by messages what is chosen, and is told
// so. A cell's output holds that frame as plain HTML already; where there is none (in a box of widgets), it is made here.
const NAMES = ["image", "layer", "head", "patch"];
const WAIT = 400; // milliseconds until a frame of the same output is in the document

// Light or dark as the notebook is, by the brightness of its text.
function theme(el) {
  const [red, green, blue] = (getComputedStyle(el).color.match(/[\d.]+/g) || [0, 0, 0]).map(Number);
  return 0.3 * red + 0.59 * green + 0.11 * blue > 128 ? "dark" : "light";
}

function render({ model, el }) {
  const name = model.get("frame"), heard = new Set(); // windows of frames that have told something
  let teller = null; // the window whose news are being taken over: they are not told back to it

  const frames = () => [...document.querySelectorAll("iframe")].filter((frame) => frame.name === name);
  const asked = () => Object.fromEntries(NAMES.map((part) => [part, model.get(part)]));
  function tell() {
    const windows = new Set([...heard, ...frames().map((frame) => frame.contentWindow)]);
    for (const one of windows) if (one && one !== teller) one.postMessage({ vitlab: { theme: theme(el), ...asked() } }, "*");
  }

  function hear(event) {
    const news = event.data && event.data.vitlab;
    if (!news || news.frame !== name) return;
    const frame = frames().find((one) => one.contentWindow === event.source);
    if (frame) frame.style.height = `${news.height}px`;
    if (!heard.has(event.source)) {
      heard.add(event.source);
      event.source.postMessage({ vitlab: { theme: theme(el), ...asked() } }, "*");
    }
    if (!news.chosen) return;
    const changed = NAMES.filter((part) => model.get(part) !== news.chosen[part]);
    teller = event.source;
    for (const part of changed) model.set(part, news.chosen[part]);
    teller = null;
    if (changed.length) model.save_changes();
  }

  const make = setTimeout(() => {
    if (frames().length) { tell(); return; }
    const frame = document.createElement("iframe");
    Object.assign(frame, { name, title: model.get("title"), srcdoc: model.get("page") });
    frame.setAttribute("sandbox", "allow-scripts");
    frame.style.cssText = model.get("style");
    el.append(frame);
  }, WAIT);
  for (const part of NAMES) model.on(`change:${part}`, tell);
  window.addEventListener("message", hear);
  return () => {
    clearTimeout(make);
    window.removeEventListener("message", hear);
    for (const part of NAMES) model.off(`change:${part}`, tell);
  };
}

export default { render };
