// A conversation as the server takes it, and back; and where the server's words for its places lead.

import { fromPart, part } from "./files.js";

/** The turns of a conversation as messages. */
export async function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, text, images } of turns) {
    const parts = await Promise.all(images.map(part));
    if (parts.length && text) parts.push({ type: "text", text });
    messages.push({ role, content: parts.length ? parts : text });
  }
  return messages;
}

/** Messages as turns: what `messagesOf` makes, and what is like it. Throws Error for what is not. */
export async function turnsOf(messages) {
  const turns = [];
  for (const { role, content } of messages) {
    if (role === "system") continue;
    if (!["user", "assistant"].includes(role)) throw new Error(`a message of "${role}"`);
    const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
    const text = parts.filter(({ type }) => type === "text").map((each) => String(each.text));
    const others = parts.filter(({ type }) => type !== "text");
    const turn = { role, text: text.join("\n"), images: await Promise.all(others.map(fromPart)) };
    turns.push(role === "user" ? turn : { ...turn, reasoning: "", seen: [], note: null });
  }
  return turns;
}

/** For every file of it the place that the server calls it, as [turn, file]. */
export function placesOf(turns, system) {
  const places = new Map();
  turns.forEach(({ images }, i) =>
    images.forEach((_, j) =>
      places.set(`messages[${i + (system ? 1 : 0)}].content[${j}]`, [i, j]),
    ),
  );
  return places;
}

/** The part of a message that a place is in: of a page, its PDF. */
export const partOf = (place) => /^messages\[\d+\]\.content\[\d+\]/.exec(place)?.[0];

/** The files at these places. */
export const imagesAt = (turns, seen) =>
  seen.map((at) => (at ? turns[at[0]]?.images[at[1]] : null));
