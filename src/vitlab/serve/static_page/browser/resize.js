// Pillow's resize of 8-bit images, to the bit: a canvas or an ONNX Resize gives other pixels, and so other logits.
// Each output pixel is a weighted sum of input pixels; the weights are fixed-point numbers of 22 bits, and the row pass
// is rounded to 8 bits before the column pass.

const BITS = 22, UNIT = 2 ** BITS, HALF = 2 ** (BITS - 1);

const sinc = (x) => (x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI));

// name -> [support: how far a filter reaches at scale 1, its weight at distance x]
const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => (Math.abs(x) >= 1 ? 0 : sinc(x) * (0.54 + 0.46 * Math.cos(x * Math.PI)))],
  bicubic: [2, (x) => cubic(Math.abs(x))],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

function cubic(x, a = -0.5) {
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

// For every output place along one axis: the first input place it reads, and the weights from there on.
function weightsAlong(before, after, filter) {
  const [support, weight] = FILTERS[filter];
  const scale = before / after, widened = Math.max(scale, 1), reach = support * widened;
  return Array.from({ length: after }, (_, place) => {
    const centre = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach + 0.5));
    const last = Math.min(before, Math.trunc(centre + reach + 0.5));
    const raw = Array.from({ length: last - first }, (_, i) => weight((i + first - centre + 0.5) * (1 / widened)));
    const sum = raw.reduce((total, w) => total + w, 0);
    const fixed = raw.map((w) => (sum === 0 ? w : w / sum)).map((w) => Math.trunc((w < 0 ? -0.5 : 0.5) + w * UNIT));
    return { first, weights: fixed };
  });
}

const to8Bit = (sum) => Math.min(255, Math.max(0, Math.floor(sum / UNIT)));

// pixels: Uint8Array (height, width, channels) -> (newHeight, newWidth, channels)
export function resize(pixels, [height, width], [newHeight, newWidth], channels, filter) {
  if (filter === "nearest") return nearest(pixels, [height, width], [newHeight, newWidth], channels);
  if (!FILTERS[filter]) throw new Error(`there is no filter ${filter}; there are nearest, ${Object.keys(FILTERS).join(", ")}.`);
  const columnsFirst = newHeight < height && height - newHeight > 2 * (width - newWidth); // as Pillow 13 decides
  if (columnsFirst) pixels = resizeColumns(pixels, height, newHeight, width, channels, filter);
  if (newWidth !== width) pixels = resizeRows(pixels, columnsFirst ? newHeight : height, width, newWidth, channels, filter);
  if (newHeight !== height && !columnsFirst) pixels = resizeColumns(pixels, height, newHeight, newWidth, channels, filter);
  return pixels;
}

function resizeRows(pixels, height, width, newWidth, channels, filter) {
  const result = new Uint8Array(height * newWidth * channels), along = weightsAlong(width, newWidth, filter);
  for (let y = 0, to = 0; y < height; y++) for (let x = 0; x < newWidth; x++) for (let c = 0; c < channels; c++) {
    const { first, weights } = along[x];
    let sum = HALF, at = (y * width + first) * channels + c;
    for (let i = 0; i < weights.length; i++, at += channels) sum += pixels[at] * weights[i];
    result[to++] = to8Bit(sum);
  }
  return result;
}

function resizeColumns(pixels, height, newHeight, width, channels, filter) {
  const row = width * channels, result = new Uint8Array(newHeight * row), along = weightsAlong(height, newHeight, filter);
  const sums = new Float64Array(row);
  for (let y = 0; y < newHeight; y++) {
    const { first, weights } = along[y];
    sums.fill(HALF);
    for (let k = 0, at = first * row; k < weights.length; k++) for (let i = 0; i < row; i++) sums[i] += pixels[at++] * weights[k];
    for (let i = 0; i < row; i++) result[y * row + i] = to8Bit(sums[i]);
  }
  return result;
}

function nearest(pixels, [height, width], [newHeight, newWidth], channels) {
  const rows = nearestAlong(height, newHeight), columns = nearestAlong(width, newWidth);
  const result = new Uint8Array(newHeight * newWidth * channels);
  let to = 0;
  for (const row of rows) for (const column of columns) for (let c = 0; c < channels; c++)
    result[to++] = pixels[(row * width + column) * channels + c];
  return result;
}

function nearestAlong(before, after) {
  let place = (0.5 * before) / after; // summed up step by step, as Pillow does: the last digits can decide
  return Array.from({ length: after }, () => {
    const found = Math.min(before - 1, Math.floor(place));
    place += before / after;
    return found;
  });
}
