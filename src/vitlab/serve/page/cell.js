// A number of a matrix, opened below it: the products whose sum it is, largest first, each under the pointer.
import { clear, el, number, strongest } from "./draw.js";
import { matrix } from "./matrix.js";
import { t } from "./text.js";

const LISTED = 6; // products in the table
const still = matchMedia("(prefers-reduced-motion: reduce)");

// sum(i): a promise of { name, letters: [of inputs, of weights], inputs, weights, bias, of: what products belong to, term(n):
// to which product n belongs, columns: how the products stand, values of that many in a row }. Returns where it is shown, and what opens cell i.
export function openable(sum) {
  const box = el("div", { class: "opened", hidden: true, tabindex: -1 });
  let turn = 0;
  async function open(i) {
    const mine = ++turn, nodes = await sum(i).then(shown, (error) => [el("p", { class: "quiet", text: error.message })]);
    if (mine !== turn) return;
    const close = el("button", { type: "button", class: "story-close", "aria-label": t("close"), title: t("close"), text: "×", onclick: () => { turn++; box.hidden = true; } });
    clear(box).append(close, ...nodes);
    box.hidden = false;
    if (!still.matches) box.animate([{ clipPath: "inset(0 0 100% 0)", opacity: 0 }, { clipPath: "inset(0 0 0 0)", opacity: 1 }], { duration: 250, easing: "ease-out" });
    document.getElementById("spoken").textContent = box.querySelector(".worked-line")?.textContent ?? box.textContent;
  }
  return { box, open };
}

function shown({ name, letters: [x, w], inputs, weights, bias, of, term, columns }) {
  const products = inputs.map((value, n) => value * weights[n]), total = products.reduce((a, b) => a + b, 0), best = strongest(products.map(Math.abs), LISTED);
  const rest = total - best.reduce((sum, n) => sum + products[n], 0), line = (n) => `${of} ${term(n)}: ${number(inputs[n], 4)} × ${number(weights[n], 4)} = ${number(products[n], 4)}`;
  const rows = best.map((n) => el("tr", {}, ...[term(n), number(inputs[n]), number(weights[n]), number(products[n])].map((text) => el("td", { text }))));
  const last = products.length > best.length ? [el("tr", {}, el("td", { text: t("cell_rest", { n: products.length - best.length }), colspan: 3 }), el("td", { text: number(rest) }))] : [];
  return [
    el("p", { class: "worked-line", text: `${name} = Σ ${x} ${w}${bias ? ` + b = ${number(total)} + ${number(bias)}` : ""} = ${number(total + bias, 4)}` }),
    matrix(products, columns, { name: `${x} ${w}`, wide: 186, words: line }),
    el("table", {}, el("thead", {}, el("tr", {}, ...[of, x, w, "×"].map((text) => el("th", { text, scope: "col" })))), el("tbody", {}, ...rows, ...last)),
  ];
}
