// What the stories say in numbers, computed from arrays of the network. Arrays are { data, shape }, row by row.
// A model is described by `about`: { grid: [rows, columns], prefix: [names], reads: token of the head, or null for the mean }.

export function indexOfHighest(values) { let best = 0; values.forEach((value, i) => { if (value > values[best]) best = i; }); return best; }
export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const mean = (values) => sum(values) / values.length;
export const norm = (vector) => Math.hypot(...vector);
export const cosine = (a, b) => sum(Array.from(a, (value, i) => value * b[i])) / (norm(a) * norm(b));

// (h, N, N) -> (N): what the tokens that the head reads give to every token, mean of these tokens and of all heads.
export function readerRow({ data, shape: [heads, tokens] }, about) {
  const first = about.prefix.length, queries = about.reads === null ? Array.from({ length: tokens - first }, (_, i) => first + i) : [about.reads];
  const row = new Float64Array(tokens), share = 1 / (heads * queries.length);
  for (let h = 0; h < heads; h++) for (const q of queries) for (let k = 0; k < tokens; k++) row[k] += share * data[(h * tokens + q) * tokens + k];
  return row;
}

// (h, N, N) -> (N): one head's weights of one query.
export const headRow = ({ data, shape: [, tokens] }, head, query) => data.subarray((head * tokens + query) * tokens, (head * tokens + query + 1) * tokens);

// Share of attention that two rows put in the same places: 1 where they are equal.
export const overlap = (a, b) => sum(Array.from(a, (value, i) => Math.min(value, b[i])));

// (h, N, N) -> (h): mean distance in patches from a patch to where it looks, as in Figure 7 of the ViT paper. Prefix tokens have no place.
export function meanDistances({ data, shape: [heads, tokens] }, about) {
  const first = about.prefix.length, patches = tokens - first, columns = about.grid[1];
  return Array.from({ length: heads }, (_, h) => {
    let total = 0, counted = 0;
    for (let q = 0; q < patches; q++) {
      let reach = 0, given = 0;
      for (let k = 0; k < patches; k++) {
        const weight = data[(h * tokens + first + q) * tokens + first + k];
        reach += weight * Math.hypot(Math.floor(q / columns) - Math.floor(k / columns), (q % columns) - (k % columns));
        given += weight;
      }
      if (given > 0) { total += reach / given; counted++; }
    }
    return total / counted;
  });
}

// The same for attention that is spread evenly over all patches.
export function evenDistance([rows, columns]) {
  const patches = rows * columns, even = { data: new Float32Array(patches * patches).fill(1 / patches), shape: [1, patches, patches] };
  return meanDistances(even, { prefix: [], grid: [rows, columns] })[0];
}

// (h, N, N) -> (h): over how many tokens a head spreads its attention, exp of the mean entropy: 1 to N.
export function spreads({ data, shape: [heads, tokens] }) {
  return Array.from({ length: heads }, (_, h) => {
    let entropy = 0;
    for (let i = h * tokens * tokens; i < (h + 1) * tokens * tokens; i++) if (data[i] > 0) entropy -= data[i] * Math.log(data[i]);
    return Math.exp(entropy / tokens);
  });
}

const NEIGHBOURS = [[-1, 0], [0, 1], [1, 0], [0, -1], [-1, -1], [-1, 1], [1, 1], [1, -1]]; // [rows down, columns right]

// (h, N, N) -> for each head the neighbour that its patches look at most: { offset: [down, right], share }, mean over the patches that have it.
export function habits({ data, shape: [heads, tokens] }, about) {
  const first = about.prefix.length, [rows, columns] = about.grid;
  return Array.from({ length: heads }, (_, h) => NEIGHBOURS.map(([down, right]) => {
    let total = 0, counted = 0;
    for (let r = Math.max(0, -down); r < rows - Math.max(0, down); r++) for (let c = Math.max(0, -right); c < columns - Math.max(0, right); c++) {
      const query = first + r * columns + c, key = query + down * columns + right;
      total += data[(h * tokens + query) * tokens + key];
      counted++;
    }
    return { offset: [down, right], share: counted ? total / counted : 0 };
  }).reduce((best, one) => (one.share > best.share ? one : best)));
}

// (r, c, r, c) similarities of all pairs of patches -> their means by where the two patches lie.
export function similarityByPlace({ data, shape: [rows, columns] }) {
  const patches = rows * columns, half = Math.max(rows, columns) / 2, kinds = { near: [], far: [], row: [], column: [], elsewhere: [] };
  for (let a = 0; a < patches; a++) for (let b = 0; b < patches; b++) {
    if (a === b) continue;
    const down = Math.abs(Math.floor(a / columns) - Math.floor(b / columns)), right = Math.abs((a % columns) - (b % columns)), value = data[a * patches + b];
    if (down + right === 1) kinds.near.push(value);
    if (Math.hypot(down, right) >= half) kinds.far.push(value);
    kinds[down === 0 ? "row" : right === 0 ? "column" : "elsewhere"].push(value);
  }
  return Object.fromEntries(Object.entries(kinds).map(([kind, values]) => [kind, mean(values)]));
}

// Probabilities by depth (L, classes) -> the first block from which on the last answer leads, 0-based.
export function settledAt(byDepth) {
  const answers = byDepth.map(indexOfHighest);
  return answers.findLastIndex((answer) => answer !== answers.at(-1)) + 1;
}
