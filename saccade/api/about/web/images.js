// Images that a user gives: read from files, with a thumbnail that the browser makes. What is sent
// is the file itself, byte for byte: its digest is its name in the server's caches.

import { element } from "./dom.js";

const THUMBNAIL = 72; // pixels high, at twice the density

/** {name, url, thumbnail}: the file as a data URL, and a small copy, or null where the browser
 * cannot read the format (the server may). */
export async function read(file) {
  return { name: file.name || "image", url: await dataUrl(file), thumbnail: await shrink(file) };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function shrink(file) {
  try {
    const options = { resizeHeight: 2 * THUMBNAIL, resizeQuality: "medium" };
    const bitmap = await createImageBitmap(file, options);
    const canvas = element("canvas", { width: bitmap.width, height: bitmap.height });
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    bitmap.close();
    return canvas.toDataURL("image/png");
  } catch {
    return null;
  }
}

/** An image as it is shown: small, or by its name. */
export function picture(image) {
  if (!image) return element("span", { class: "thumbnail" }, "?");
  if (!image.thumbnail) return element("span", { class: "thumbnail", title: image.name }, image.name);
  return element("img", {
    class: "thumbnail",
    src: image.thumbnail,
    alt: image.name,
    title: image.name,
  });
}

/** The images of a drop or a paste. */
export function imagesOf(transfer) {
  return [...(transfer?.files ?? [])].filter(
    (file) => file.type.startsWith("image/") || file.type === "",
  );
}
