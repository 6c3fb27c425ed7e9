// Read images, create thumbnails, and show them.

import { button, byId, element } from "./dom.js";

const THUMBNAIL = 96; // pixels high, at twice the density

/** {name, url, thumbnail}: the file as a data URL, and a small copy, or null where the browser cannot
 * read it. */
export async function readImage(name, file) {
  return { name, url: await dataUrl(file), thumbnail: await shrink(file) };
}

/** Whether a file has a format that servers support and many browsers do not. */
export async function isForServers(file) {
  const start = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  return /^(II\*\0|MM\0\*)/.test(start) || /^....ftyp(mif1|msf1|he[iv])/s.test(start);
}

export function dataUrl(file) {
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

/** A thumbnail that a click enlarges, or the image's name. */
export function picture(image) {
  if (!image) return element("span", { class: "tile" }, "?");
  if (!image.thumbnail) return tile(image);
  const small = element("img", { src: image.thumbnail, alt: "", draggable: "false" });
  const made = button("", () => enlarge(image), {
    class: "thumbnail",
    title: image.name,
    "aria-label": `Enlarge ${image.name}`,
  });
  made.append(small);
  return made;
}

/** An image with marks on parts of it: [top, left, bottom, right] in fractions of its edges. */
export function markedPicture({ name, url }, parts) {
  const marks = parts.map(([top, left, bottom, right]) => {
    const mark = element("i");
    const edges = { top, left, height: bottom - top, width: right - left };
    for (const [edge, part] of Object.entries(edges)) mark.style[edge] = `${100 * part}%`;
    return mark;
  });
  const alt = `${name}, its new tiles marked`;
  return element("div", { class: "marked" }, element("img", { src: url, alt }), ...marks);
}

/** The name of a file that the browser cannot show. */
export const tile = ({ name }) =>
  element(
    "span",
    { class: "tile", title: name },
    element("b", {}, /\.(\w{1,5})$/.exec(name)?.[1].toUpperCase() ?? "FILE"),
    element("span", {}, name),
  );

function enlarge({ name, url }) {
  const [dialog, large] = [byId("viewer"), byId("viewer-image")];
  large.src = url;
  large.alt = name;
  byId("viewer-name").textContent = name;
  dialog.showModal();
}

/** Escape, the button or a click closes the viewer. */
export function wireViewer() {
  const dialog = byId("viewer");
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => byId("viewer-image").removeAttribute("src"));
}
