// Files that a user adds to a question, and which of them the server supports. A file is sent byte
// for byte, because its hash is its key in the server's caches.

import { dataUrl, isForServers, picture, readImage, tile } from "./images.js";
import { player } from "./videos.js";

/** A file that was not added. `sure`: the user may add it anyway. */
export class LeftOut extends Error {
  constructor(why, sure = false) {
    super(why);
    this.sure = sure;
  }
}

const PDF = "application/pdf";

/** The types and extensions of each kind of file, by its name in the server's state. */
const KINDS = [
  ["pdfs", /^application\/pdf$/, /\.pdf$/i],
  ["heic", /^image\/hei[cf]/, /\.hei[cf]$/i],
  ["images", /^image\/(?!svg)/, /\.(jpe?g|png|webp|gif|bmp|tiff?|avif)$/i],
  ["videos", /^video\//, /\.(mp4|m4v|mov|mkv|webm|avi|m?ts|m2ts)$/i],
];

const TAKEN =
  "supported are images (JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, HEIC), videos (MP4, MOV, MKV, " +
  "WebM, AVI, TS), and PDFs";

/** Why the server does not support a kind of file, by its state. */
function lack(kind, takes) {
  const extra = (what, name) =>
    `${what} needs the extra "${name}" on the server. Its operator can install it with ` +
    `pip install '.[${name}]' in the directory of Saccade's source`;
  if (kind === "pdfs") return extra("a PDF", "documents");
  if (kind === "heic" && takes.includes("images")) return `${extra("HEIC", "heic")}; JPEG is supported`;
  if (kind === "videos" && takes.includes("frames")) return extra("a video file", "video");
  return `this model does not support ${kind === "videos" ? "videos" : "images"}`;
}

/** A file as it is sent and shown: an image {name, url, thumbnail}, or {name, file}. Throws LeftOut.
 * takes: the kinds that the server takes, or null where nobody knows yet. */
export async function read(file, takes, sure = false) {
  const kind = KINDS.find(([, type, ending]) =>
    file.type ? type.test(file.type) : ending.test(file.name),
  )?.[0];
  if (!kind) throw new LeftOut(TAKEN);
  if (takes && !takes.includes(kind)) throw new LeftOut(lack(kind, takes));
  if (!file.size) throw new LeftOut("the file is empty");
  const copy = await copied(file, kind === "pdfs" ? PDF : file.type);
  const name = file.name || kind.slice(0, -1);
  if (kind === "pdfs" || kind === "videos") return { name, file: copy };
  const image = await readImage(name, copy);
  if (!image.thumbnail && !sure && !(await isForServers(copy)))
    throw new LeftOut("this browser cannot read the image; it may be damaged", true);
  return image;
}

/** A copy, which does not change with the file. */
async function copied(file, type) {
  try {
    return new Blob([await file.arrayBuffer()], { type });
  } catch {
    throw new LeftOut("the file cannot be read");
  }
}

/** A file as a part of a message. frames: of a shared screen. */
export async function part({ name, url, file, frames, seconds, pixels }) {
  if (frames) return { type: "video", video: frames, fps: 1 / seconds, max_pixels: pixels };
  if (!file) return { type: "image_url", image_url: { url } };
  const data = await dataUrl(file);
  if (file.type === PDF) return { type: "file", file: { filename: name, file_data: data } };
  return { type: "video_url", video_url: { url: data } };
}

/** A message that this page cannot show; says why, after "message 2". */
export class Unreadable extends Error {}

/** A part of a message as it is shown and sent; of data in the message alone. Throws Unreadable. */
export async function fromPart(given) {
  switch (given.type) {
    case "image_url":
      return readImage("image", blobOf(given.image_url?.url, "image/"));
    case "video_url":
      return { name: "video", file: blobOf(given.video_url?.url, "") };
    case "file":
      return { name: nameOf(given.file?.filename), file: blobOf(given.file?.file_data, PDF) };
    case "video":
      return watched(given);
    default:
      throw new Unreadable("has a part of an unsupported type");
  }
}

const nameOf = (name) => (typeof name === "string" && name ? name : "file");

function watched({ video: frames, fps, max_pixels: pixels }) {
  if (!Array.isArray(frames) || !frames.length || !(fps > 0 && pixels > 0))
    throw new Unreadable("has a video without frames");
  for (const frame of frames) blobOf(frame, "image/");
  return { name: "screen", frames, seconds: 1 / fps, pixels };
}

/** The bytes of a data URL. type: the required prefix of its type. */
function blobOf(url, type) {
  const [, found, data] =
    (typeof url === "string" && /^data:([^;,]*);base64,([A-Za-z0-9+/]*)={0,2}$/.exec(url)) || [];
  if (!found?.startsWith(type) || data.length % 4 === 1)
    throw new Unreadable("has a file that is not a base64 data: URL");
  return new Blob([Uint8Array.from(atob(data), (each) => each.charCodeAt(0))], { type: found });
}

/** The element that shows a file. */
export function shown(given) {
  if (given.frames) {
    const last = given.frames.at(-1);
    return picture({ name: given.name, url: last, thumbnail: last });
  }
  if (!given.file) return picture(given);
  return given.file.type === PDF ? tile(given) : player(given);
}
