// Convert between conversations and the API's messages, and map field paths to files.

import { fromPart, part, Unreadable } from "./files.js";

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

/** Messages as turns, the inverse of `messagesOf`. Throws Unreadable. */
export async function turnsOf(messages) {
  const turns = [];
  for (const [i, message] of messages.entries())
    try {
      const turn = await turnOf(message);
      if (turn) turns.push(turn);
    } catch (error) {
      if (error instanceof Unreadable) throw new Unreadable(`message ${i + 1} ${error.message}`);
      throw error;
    }
  return turns;
}

/** A message as a turn; null for one that is not shown. */
async function turnOf(message) {
  if (!isObject(message)) throw new Unreadable("is not an object");
  const { role, content } = message;
  if (role === "system") return null;
  if (role !== "user" && role !== "assistant")
    throw new Unreadable('needs a role of "user", "assistant" or "system"');
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  if (!Array.isArray(parts) || !parts.every(isObject))
    throw new Unreadable("has neither a text nor a list of parts");
  const texts = parts.filter(({ type }) => type === "text").map(({ text }) => text);
  if (!texts.every((text) => typeof text === "string"))
    throw new Unreadable("has a text part without a text");
  const images = await Promise.all(parts.filter(({ type }) => type !== "text").map(fromPart));
  const text = texts.join("\n");
  if (role === "user") return { role, text, images };
  return { role, ...split(text, message.reasoning_content), images, seen: [], note: null };
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** An answer's {text, reasoning}: other servers leave the latter between its tags, the first of
 * which may have been a part of the prompt. */
function split(text, reasoning) {
  if (typeof reasoning === "string" && reasoning) return { text, reasoning };
  const [opening, closing] = ["<think>", "</think>"].map((tag) => text.indexOf(tag));
  const begins = opening >= 0 && !text.slice(0, opening).trim();
  const bare = closing >= 0 && (opening < 0 || opening > closing);
  if (!begins && !bare) return { text, reasoning: "" };
  const end = closing < 0 ? text.length : closing;
  return {
    text: text.slice(end).replace("</think>", "").trimStart(),
    reasoning: text.slice(begins ? opening + "<think>".length : 0, end).trim(),
  };
}

/** [turn, file] of each file, by the field path that the server reports. */
export function placesOf(turns, system) {
  const places = new Map();
  turns.forEach(({ images }, i) =>
    images.forEach((_, j) =>
      places.set(`messages[${i + (system ? 1 : 0)}].content[${j}]`, [i, j]),
    ),
  );
  return places;
}

/** The message part that a field path belongs to: for a page, its PDF. */
export const partOf = (place) => /^messages\[\d+\]\.content\[\d+\]/.exec(place)?.[0];

/** The files at these field paths. */
export const imagesAt = (turns, seen) =>
  seen.map((at) => (at ? turns[at[0]]?.images[at[1]] : null));
