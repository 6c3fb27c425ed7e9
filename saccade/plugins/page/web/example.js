// Draws the example image, which is sent as any other file.

import { element } from "./dom.js";

export const QUESTION = "Describe the picture.";
const [WIDTH, HEIGHT] = [256, 192];

/** The canvas that the example is drawn on. */
export function drawn() {
  const canvas = element("canvas", { width: WIDTH, height: HEIGHT, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#f5f5f2";
  pen.fillRect(0, 0, WIDTH, HEIGHT);
  pen.fillStyle = "#e01c20";
  pen.beginPath();
  pen.arc(76, 98, 46, 0, 2 * Math.PI);
  pen.fill();
  pen.fillStyle = "#2d5fd7";
  pen.fillRect(146, 54, 80, 80);
  return canvas;
}

/** The drawing as a file. */
export async function example() {
  const data = await new Promise((resolve) => drawn().toBlob(resolve, "image/png"));
  return new File([data], "example.png", { type: "image/png" });
}
