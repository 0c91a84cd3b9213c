// Asking the server. Arrays come as bytes, with their type and shape in the headers.
let token = sessionStorage.getItem("vitlab-token") || "";
export function setToken(value) { token = value; sessionStorage.setItem("vitlab-token", value); }

export class Refused extends Error {
  constructor(status, error, remedy) { super(`${error} ${remedy || ""}`.trim()); this.status = status; }
}

async function ask(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let answer;
  try { answer = await fetch(path, { ...options, headers }); }
  catch { throw new Refused(0, "gone", ""); }
  if (!answer.ok) {
    const about = await answer.json().catch(() => ({ error: answer.statusText, remedy: "" }));
    throw new Refused(answer.status, about.error, about.remedy);
  }
  return answer;
}

export const json = async (path) => (await ask(path)).json();
export const blob = async (path) => (await ask(path)).blob();
export const post = async (path, body) => (await ask(path, { method: "POST", body })).json();

export async function array(path) {
  const answer = await ask(path);
  const type = answer.headers.get("X-Type");
  const shape = answer.headers.get("X-Shape").split(",").map(Number);
  const bytes = await answer.arrayBuffer();
  const data = type === "float16" ? halves(new Uint16Array(bytes)) : type === "uint8" ? new Uint8Array(bytes) : new Float32Array(bytes);
  return { shape, data };
}

// Several float32 arrays, one after another: {name: Float32Array}.
export async function arrays(path) {
  const answer = await ask(path), shapes = JSON.parse(answer.headers.get("X-Arrays")), bytes = await answer.arrayBuffer(), found = {};
  let at = 0;
  for (const [name, shape] of Object.entries(shapes)) {
    const count = shape.reduce((a, b) => a * b, 1);
    found[name] = new Float32Array(bytes, at, count);
    at += 4 * count;
  }
  return found;
}

let table = null; // what each of the 65,536 half-precision numbers is
function halves(words) {
  if (!table) {
    table = new Float32Array(65536);
    for (let word = 0; word < 65536; word++) {
      const sign = word >> 15 ? -1 : 1, exponent = (word >> 10) & 31, fraction = word & 1023;
      table[word] = exponent === 31 ? (fraction ? NaN : sign * Infinity)
        : exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
    }
  }
  const found = new Float32Array(words.length);
  for (let i = 0; i < words.length; i++) found[i] = table[words[i]];
  return found;
}
