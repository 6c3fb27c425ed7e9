// Videos are played and sent as files. The server samples their frames and caches them.

import { element } from "./dom.js";
import { tile } from "./images.js";

/** A video player, or the video's name if the browser cannot play it. */
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

/** The file's object URL, released with the file. */
function address(file) {
  if (!addresses.has(file)) {
    const url = URL.createObjectURL(file);
    addresses.set(file, url);
    forgotten.register(file, url);
  }
  return addresses.get(file);
}
