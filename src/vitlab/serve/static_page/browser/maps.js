// Pictures of patches, computed from what a forward pass gave: the methods of vitlab/explain that need no gradients.

// Whose attention explains the answer: the class token's where the head reads it, else the mean of the patches'.
function queries({ pooling, prefix }, tokens) {
  const before = prefix.length;
  return pooling.startsWith("class") ? [0] : Array.from({ length: tokens - before }, (_, i) => before + i);
}

// attention (h, N, N) of the last layer -> (patches): mean over heads of the row that the head reads
export function lastAttention(model, attention, heads, tokens) {
  const row = new Float64Array(tokens), who = queries(model, tokens), share = 1 / (heads * who.length);
  for (let h = 0; h < heads; h++) for (const q of who) for (let k = 0, at = (h * tokens + q) * tokens; k < tokens; k++) row[k] += share * attention[at + k];
  return Float32Array.from(row.subarray(model.prefix.length));
}

// Attention rollout (arXiv:2005.00928): the row that the head reads, of A_L ... A_1 with A_l = (W_l + I) / its row sums.
// layers: one (h, N, N) each
export function rollout(model, layers, heads, tokens) {
  const who = queries(model, tokens);
  let row = new Float64Array(tokens);
  for (const q of who) row[q] = 1 / who.length;
  for (const attention of [...layers].reverse()) {
    const next = new Float64Array(tokens), mean = new Float64Array(tokens);
    for (let q = 0; q < tokens; q++) {
      if (row[q] === 0) continue;
      mean.fill(0);
      for (let h = 0; h < heads; h++) for (let k = 0, at = (h * tokens + q) * tokens; k < tokens; k++) mean[k] += attention[at + k] / heads;
      mean[q] += 1;
      let sum = 0;
      for (let k = 0; k < tokens; k++) sum += mean[k];
      for (let k = 0; k < tokens; k++) next[k] += (row[q] * mean[k]) / sum;
    }
    row = next;
  }
  return Float32Array.from(row.subarray(model.prefix.length));
}

// attention (h, N, N) -> (h): how far a head looks on average, in pixels between the centres of patches (figure 7 of ViT)
export function attentionDistance({ prefix, grid: [, columns], patch }, attention, heads, tokens) {
  const before = prefix.length, patches = tokens - before;
  const far = (a, b) => patch * Math.hypot(Math.floor(a / columns) - Math.floor(b / columns), (a % columns) - (b % columns));
  return Array.from({ length: heads }, (_, h) => {
    let total = 0, queries = 0;
    for (let q = 0; q < patches; q++) {
      let share = 0, reach = 0;
      for (let k = 0, at = (h * tokens + before + q) * tokens + before; k < patches; k++) { share += attention[at + k]; reach += attention[at + k] * far(q, k); }
      if (share > 0) { total += reach / share; queries++; }
    }
    return total / queries;
  });
}

// (n, D) -> (n, n): cosine of every row with every other
export function cosines(values, n, width) {
  const unit = new Float64Array(values.length), result = new Float32Array(n * n);
  for (let i = 0; i < n; i++) {
    let square = 0;
    for (let c = 0; c < width; c++) square += values[i * width + c] ** 2;
    const length = Math.max(Math.sqrt(square), 1e-12);
    for (let c = 0; c < width; c++) unit[i * width + c] = values[i * width + c] / length;
  }
  for (let i = 0; i < n; i++) for (let j = i; j < n; j++) {
    let sum = 0;
    for (let c = 0; c < width; c++) sum += unit[i * width + c] * unit[j * width + c];
    result[i * n + j] = result[j * n + i] = sum;
  }
  return result;
}

// (n, D) -> (n, 3), 0 to 1: the first three principal components, each from its lowest value to its highest
export function principalColours(values, n, width) {
  const centred = centre(values, n, width), directions = principalDirections(centred, n, width, 3);
  const colours = new Float32Array(n * 3);
  directions.forEach((direction, c) => {
    const places = Float64Array.from({ length: n }, (_, i) => dot(centred, i * width, direction, 0, width));
    const low = places.reduce((a, b) => Math.min(a, b)), high = places.reduce((a, b) => Math.max(a, b));
    if (high > low) places.forEach((place, i) => { colours[3 * i + c] = (place - low) / (high - low); });
  });
  return colours;
}

function centre(values, n, width) {
  const mean = new Float64Array(width), result = new Float64Array(values.length);
  for (let i = 0; i < n * width; i++) mean[i % width] += values[i] / n;
  for (let i = 0; i < n * width; i++) result[i] = values[i] - mean[i % width];
  return result;
}

function dot(a, i, b, j, count) {
  let sum = 0;
  for (let c = 0; c < count; c++) sum += a[i + c] * b[j + c];
  return sum;
}

// Eigenvectors of the smaller of X^T X and X X^T by cyclic Jacobi rotations, the strongest first; the largest entry of
// each direction is made positive, as in vitlab.explain.
function principalDirections(centred, n, width, count) {
  const small = n < width, size = small ? n : width;
  const matrix = new Float64Array(size * size);
  for (let i = 0; i < size; i++) for (let j = i; j < size; j++) {
    let sum = 0;
    if (small) sum = dot(centred, i * width, centred, j * width, width);
    else for (let k = 0; k < n; k++) sum += centred[k * width + i] * centred[k * width + j];
    matrix[i * size + j] = matrix[j * size + i] = sum;
  }
  return strongest(matrix, size, count).map((vector) => {
    const direction = small ? new Float64Array(width) : vector;
    if (small) for (let i = 0; i < n; i++) for (let c = 0; c < width; c++) direction[c] += vector[i] * centred[i * width + c];
    const length = Math.sqrt(dot(direction, 0, direction, 0, width));
    const largest = direction.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a), 0);
    return direction.map((x) => (length > 0 ? (x / length) * Math.sign(largest) : 0));
  });
}

// The `count` strongest eigenvectors of a symmetric matrix, by orthogonal iteration on a few more than are asked for:
// each step multiplies an error by the ratio of a lost eigenvalue to a kept one.
function strongest(matrix, size, count) {
  const kept = Math.min(size, count + 8);
  let basis = Array.from({ length: kept }, (_, k) => Float64Array.from({ length: size }, (_, i) => Math.sin(1 + (k + 1) * (i + 1) * 0.7548776662)));
  basis = orthonormal(basis);
  let before = null;
  for (let step = 0; step < 2000; step++) {
    basis = orthonormal(basis.map((vector) => times(matrix, vector, size)));
    if (step % 10) continue;
    basis = rotated(matrix, basis, size);
    const first = basis.slice(0, count);
    if (before && first.every((vector, k) => 1 - Math.abs(dot(vector, 0, before[k], 0, size)) < 1e-14)) break;
    before = first;
  }
  return rotated(matrix, basis, size).slice(0, count);
}

function times(matrix, vector, size) {
  return Float64Array.from({ length: size }, (_, i) => dot(matrix, i * size, vector, 0, size));
}

function orthonormal(vectors) {
  const done = [];
  for (const vector of vectors) {
    const rest = Float64Array.from(vector);
    for (let twice = 0; twice < 2; twice++) for (const other of done) {
      const share = dot(rest, 0, other, 0, rest.length);
      for (let i = 0; i < rest.length; i++) rest[i] -= share * other[i];
    }
    const length = Math.sqrt(dot(rest, 0, rest, 0, rest.length));
    done.push(length > 1e-300 ? rest.map((x) => x / length) : rest.fill(0));
  }
  return done;
}

// Inside the subspace of `basis`, its eigenvectors (Rayleigh-Ritz), by Jacobi rotations of a small matrix.
function rotated(matrix, basis, size) {
  const n = basis.length, images = basis.map((vector) => times(matrix, vector, size));
  const a = basis.map((u) => images.map((w) => dot(u, 0, w, 0, size)));
  const turns = a.map((_, i) => a.map((_, j) => Number(i === j)));
  for (let sweep = 0; sweep < 30; sweep++) {
    let off = 0, on = 0;
    for (let p = 0; p < n; p++) for (let q = 0; q < n; q++) p === q ? (on += a[p][q] ** 2) : (off += a[p][q] ** 2);
    if (off <= 1e-30 * on) break;
    for (let p = 0; p < n; p++) for (let q = p + 1; q < n; q++) {
      if (a[p][q] === 0) continue;
      const theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
      const t = Math.sign(theta || 1) / (Math.abs(theta) + Math.sqrt(theta * theta + 1)), c = 1 / Math.sqrt(t * t + 1), s = t * c;
      for (let k = 0; k < n; k++) [a[k][p], a[k][q]] = [c * a[k][p] - s * a[k][q], s * a[k][p] + c * a[k][q]];
      for (let k = 0; k < n; k++) [a[p][k], a[q][k]] = [c * a[p][k] - s * a[q][k], s * a[p][k] + c * a[q][k]];
      for (let k = 0; k < n; k++) [turns[k][p], turns[k][q]] = [c * turns[k][p] - s * turns[k][q], s * turns[k][p] + c * turns[k][q]];
    }
  }
  const order = a.map((_, i) => i).sort((i, j) => a[j][j] - a[i][i]);
  return order.map((j) => {
    const vector = new Float64Array(size);
    for (let k = 0; k < n; k++) for (let i = 0; i < size; i++) vector[i] += turns[k][j] * basis[k][i];
    return vector;
  });
}
