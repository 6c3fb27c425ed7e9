// Conversations as files: JSON, with all files, to import here or to send to any server with this
// API; and Markdown, to read.

import { element } from "./dom.js";
import { Unreadable } from "./files.js";
import { messagesOf, turnsOf } from "./messages.js";

const MAX_BYTES = 128 << 20; // of a file

/** {title, turns} as JSON. */
export async function asJson({ title, turns }) {
  const saved = { title, messages: await messagesOf(turns) };
  return new Blob([JSON.stringify(saved, null, 1)], { type: "application/json" });
}

/** {title, turns} as Markdown, with the names of files. */
export function asMarkdown({ title, turns }) {
  const parts = turns.map(({ role, text, images }) =>
    [
      `## ${role === "user" ? "Question" : "Answer"}`,
      ...images.map(({ name }) => `*File: ${name}*`),
      ...(text ? [text.trim()] : []),
    ].join("\n\n"),
  );
  return new Blob([`# ${title}\n\n${parts.join("\n\n")}\n`], { type: "text/markdown" });
}

/** {title, turns} from a file that `asJson` made. Throws Error, in words. */
export async function fromJson(file) {
  if (file.size > MAX_BYTES) throw new Error("the file is too large");
  let saved;
  try {
    saved = JSON.parse(await file.text());
  } catch {
    throw new Error("the file is not JSON");
  }
  const messages = saved?.messages;
  if (!Array.isArray(messages)) throw new Error('it has no list of "messages"');
  const turns = await readable(messages);
  if (!turns.length) throw new Error("the file has no messages");
  const title = typeof saved.title === "string" && saved.title ? saved.title : file.name;
  return { title: title.slice(0, 80), turns };
}

async function readable(messages) {
  try {
    return await turnsOf(messages);
  } catch (error) {
    if (error instanceof Unreadable) throw new Error(`its ${error.message}`);
    throw new Error("its messages cannot be shown");
  }
}

/** Have the browser save a file. */
export function download(title, ending, file) {
  const name = title.replace(/[^\p{L}\p{N} ._-]+/gu, " ").trim().slice(0, 60) || "chat";
  const url = URL.createObjectURL(file);
  element("a", { href: url, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
