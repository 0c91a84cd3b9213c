// How a photo becomes a model's input: vitlab/images/preprocess.py once more, with the same pixels as its result.
import { resize } from "./resize.js";

// Where the model's view lies: the photo is resized to `resized`, then the view starts at (top, left).
export function geometryOf(preprocess, [H, W]) {
  const [h, w] = preprocess.size, original = [H, W];
  if (preprocess.how === "stretch") return { original, resized: [h, w], top: 0, left: 0 };
  if (preprocess.how === "fit") {
    const factor = Math.min(h / H, w / W);
    const resized = [Math.min(h, Math.max(1, roundHalfEven(H * factor))), Math.min(w, Math.max(1, roundHalfEven(W * factor)))];
    return { original, resized, top: -Math.floor((h - resized[0]) / 2), left: -Math.floor((w - resized[1]) / 2) };
  }
  const resized = resizedBeforeCrop(preprocess.resize, [H, W], [h, w]);
  return { original, resized, top: Math.floor((resized[0] - h) / 2), left: Math.floor((resized[1] - w) / 2) };
}

function resizedBeforeCrop(wanted, [H, W], [h, w]) {
  if (Array.isArray(wanted)) return wanted;
  if (wanted === null || wanted === undefined) // the smallest image that covers the view
    return h * W >= w * H ? [h, Math.trunc((h * W) / H)] : [Math.trunc((w * H) / W), w];
  return H <= W ? [wanted, Math.trunc((wanted * W) / H)] : [Math.trunc((wanted * H) / W), wanted];
}

function roundHalfEven(x) { // as Python rounds
  const down = Math.floor(x), rest = x - down;
  return rest > 0.5 || (rest === 0.5 && down % 2) ? down + 1 : down;
}

// What the model sees: Uint8Array (h, w, C). rgba: the photo's bytes, as ImageData has them.
export function viewOf(preprocess, rgba, [H, W]) {
  const channels = preprocess.mean.length, [h, w] = preprocess.size;
  const geometry = geometryOf(preprocess, [H, W]), { resized, top, left } = geometry;
  const pixels = resize(channelsOf(rgba, channels), [H, W], resized, channels, preprocess.interpolation);
  if (top === 0 && left === 0 && resized[0] === h && resized[1] === w) return { pixels, geometry };
  const fill = preprocess.mean.map((mean) => (preprocess.how === "fit" ? roundHalfEven(mean / preprocess.scale) : 0));
  const view = new Uint8Array(h * w * channels);
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) for (let c = 0; c < channels; c++) {
    const row = y + top, column = x + left;
    const inside = row >= 0 && row < resized[0] && column >= 0 && column < resized[1];
    view[(y * w + x) * channels + c] = inside ? pixels[(row * resized[1] + column) * channels + c] : fill[c];
  }
  return { pixels: view, geometry };
}

// (H, W, 4) -> (H, W, C): what is transparent lies on white paper; grey is Pillow's "L".
function channelsOf(rgba, channels) {
  const count = rgba.length / 4, result = new Uint8Array(count * channels);
  for (let i = 0, from = 0, to = 0; i < count; i++, from += 4) {
    const alpha = rgba[from + 3];
    const r = onWhite(rgba[from], alpha), g = onWhite(rgba[from + 1], alpha), b = onWhite(rgba[from + 2], alpha);
    if (channels === 1) result[to++] = (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16;
    else { result[to++] = r; result[to++] = g; result[to++] = b; }
  }
  return result;
}

function onWhite(value, alpha) {
  if (alpha === 255) return value;
  const sum = (value * alpha + 255 * (255 - alpha)) * 128 + 16384;
  return ((sum >> 8) + sum) >> 15;
}

// (h, w, C) -> Float32Array (C, h, w): (pixels * scale - mean) / std, rounded to float32 after each operation.
export function normalise(pixels, preprocess) {
  const { mean, std } = preprocess, [h, w] = preprocess.size, channels = mean.length, area = h * w;
  const divisor = Math.fround(1 / preprocess.scale), result = new Float32Array(channels * area);
  for (let c = 0; c < channels; c++) {
    const m = Math.fround(mean[c]), s = Math.fround(std[c]);
    for (let i = 0; i < area; i++)
      result[c * area + i] = Math.fround(Math.fround(Math.fround(pixels[i * channels + c] / divisor) - m) / s);
  }
  return result;
}

// The inverse, as RGBA bytes to draw.
export function toPixels(image, preprocess, [h, w] = preprocess.size) {
  const { mean, std, scale } = preprocess, channels = mean.length, area = h * w, rgba = new Uint8ClampedArray(4 * area).fill(255);
  for (let i = 0; i < area; i++) for (let c = 0; c < 3; c++) {
    const from = Math.min(c, channels - 1);
    rgba[4 * i + c] = Math.round((image[from * area + i] * std[from] + mean[from]) / scale);
  }
  return rgba;
}
