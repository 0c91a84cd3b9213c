// The part of a photo that a model sees, in the photo's own pixels, so that heat lies on a sharp picture.
const MOST = 720; // pixels of a side; more would not be seen

// geometry: the photo is resized to `resized`, then the model's view begins at (top, left); sizes are [height, width].
// A browser that cannot read the photo (TIFF) shows the model's view instead.
export async function cut(image, { original, resized, top, left }, size, view) {
  const photo = await createImageBitmap(image).catch(() => view);
  const own = photo === view, across = own ? 1 : original[1] / resized[1], down = own ? 1 : original[0] / resized[0];
  const wide = size[1] * across, high = size[0] * down, zoom = Math.max(MOST / Math.max(wide, high), own ? 1 : 0);
  const canvas = new OffscreenCanvas(Math.round(wide * zoom), Math.round(high * zoom)), pen = canvas.getContext("2d");
  pen.fillStyle = "#808080"; // what lies outside the photo is padding
  pen.fillRect(0, 0, canvas.width, canvas.height);
  const factorX = own ? 1 : photo.width / original[1], factorY = own ? 1 : photo.height / original[0];
  const x = own ? 0 : left * across, y = own ? 0 : top * down;
  pen.imageSmoothingEnabled = Math.min(photo.width, photo.height) > 100; // a digit of 8 x 8 pixels shows its pixels
  pen.imageSmoothingQuality = "high";
  pen.scale(zoom, zoom);
  pen.drawImage(photo, -x, -y, photo.width / factorX, photo.height / factorY);
  return canvas;
}
