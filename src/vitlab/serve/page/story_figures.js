// Pictures in the card of a story. A figure is data with a caption { en, zh }:
//   { values, mark }         heat on the photo, one value for each patch; mark: a patch with a frame
//   { seen: true }           the image in the model's pixels
//   { crop }                 a part of the photo: [left, top, width, height], as shares of it
//   { scores }               labels and their probabilities
//   { bytes, size }          an image in the model's pixels: (height, width, 3)
//   { groups }               patches that share a token, by number; -1: dropped
import { bars, el, lowest } from "./draw.js";
import { board, frame, heat, pixels } from "./heat.js";
import { colour as drawGroups } from "./fewer.js";

const WIDTH = 360; // pixels

export function drawFigures(figures, { about: { grid }, look: { sharp, view } }, language) {
  return figures.map(({ caption, values, mark, seen, crop, scores, bytes, size, groups }) => {
    const text = caption[language], canvas = board(sharp, text, WIDTH);
    if (scores) return el("figure", { class: "scores" }, bars(scores), el("figcaption", { class: "quiet", text }));
    if (values) {
      heat(canvas, sharp, grid, values, { least: lowest(values) });
      if (mark !== undefined) frame(canvas, grid, mark);
    } else if (seen) {
      canvas.getContext("2d").imageSmoothingEnabled = false;
      canvas.getContext("2d").drawImage(view, 0, 0, canvas.width, canvas.height);
    } else if (crop) {
      const [left, top, width, height] = crop;
      canvas.getContext("2d").drawImage(sharp, left * sharp.width, top * sharp.height, width * sharp.width, height * sharp.height, 0, 0, canvas.width, canvas.height);
    } else if (bytes) pixels(canvas, bytes, size[1], size[0]);
    else drawGroups(canvas, sharp, grid, groups.flat());
    return el("figure", {}, canvas, el("figcaption", { class: "quiet", text }));
  });
}
