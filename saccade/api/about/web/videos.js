// Videos: played as files, and sent whole; the server looks at their frames, and knows those that it
// has seen.

import { element } from "./dom.js";
import { tile } from "./images.js";

/** A video as it is played; by its name where the browser cannot (the server may read it). */
export function player(video) {
  const made = element("video", {
    class: "player",
    controls: "",
    playsinline: "",
    preload: "metadata",
    title: video.name,
    "aria-label": video.name,
  });
  made.addEventListener("error", () => made.replaceWith(tile(video)));
  made.src = address(video.file);
  return made;
}

const addresses = new WeakMap();
const forgotten = new FinalizationRegistry((url) => URL.revokeObjectURL(url));

/** The file's, as long as anybody has it. */
function address(file) {
  if (!addresses.has(file)) {
    const url = URL.createObjectURL(file);
    addresses.set(file, url);
    forgotten.register(file, url);
  }
  return addresses.get(file);
}
