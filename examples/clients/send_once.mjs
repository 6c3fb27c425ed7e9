// Sends the bytes of each image to a Saccade server once, then their digest alone.
//
//     import OpenAI from "openai";
//     import { sendOnce } from "./send_once.mjs";
//     const client = new OpenAI({ baseURL: "http://HOST:8000/v1", fetch: sendOnce() });
//
// Any SDK that takes a `fetch` can use it, in Node.js, Deno, Bun and browsers. Bodies are
// multipart/related: the JSON, with cid:NAME@BOUNDARY in place of base64, then the bytes that the
// server lacks. Other servers get bodies as they are. `sendOnce(...).savings` counts bytes.

const LEAST = 1024; // characters of base64 that are worth a name
const MAX_NAMES = 8192; // as servers read them
const MAX_REMEMBERED = 65536;
const MAX_UNASKED = 2; // of more unknown images the server may have some, from an earlier run
const NO_NAMES = ["unknown_digests", "invalid_multipart", "wrong_digest", "too_many_names"];
const KEYS = ["authorization", "x-api-key", "api-key"];

export function sendOnce(send = globalThis.fetch) {
  const servers = new Map(); // by URL before /v1: whether it reads names, and which it has
  const savings = { bytesIn: 0, bytesOut: 0, sent: 0, named: 0 }; // of bodies; of images

  async function sending(input, init = {}) {
    const headers = new Headers(init.headers);
    const type = (headers.get("content-type") ?? "").split(";")[0].trim().toLowerCase();
    const plain = typeof init.body === "string" && init.method?.toUpperCase() === "POST";
    if (input instanceof Request || !plain || type !== "application/json") return send(input, init);
    const url = new URL(input);
    const server = `${url.origin}${url.pathname.slice(0, Math.max(0, url.pathname.lastIndexOf("/v1/")))}`;
    if (!servers.has(server)) servers.set(server, { reads: undefined, has: new Set() });
    savings.bytesIn += init.body.length;
    return (await sendNamed(input, init, headers, server)) ?? count(init.body.length, send(input, init));
  }

  // Returns the answer, or undefined where the body has to go as it is.
  async function sendNamed(input, init, headers, server) {
    const known = servers.get(server);
    if (known.reads === false) return undefined;
    const named = await nameBase64(init.body);
    if (named.blobs.size === 0) return undefined;
    known.reads ??= await readsNames(send, server, headers, init.signal);
    if (!known.reads) return undefined;
    const sender = KEYS.map((name) => headers.get(name) ?? "").join("\n");
    let brought = [...named.blobs.keys()].filter((name) => !known.has.has(sender + name));
    if (brought.length > MAX_UNASKED) brought = [];
    for (let attempt = 0; attempt < 2; attempt++) {
      const { body, boundary } = related(named, brought);
      headers.set("content-type", `multipart/related; boundary="${boundary}"; type="application/json"`);
      headers.delete("content-length");
      savings.sent += brought.length;
      savings.named += named.places - brought.length;
      const answer = await count(body.size, send(input, { ...init, headers, body }));
      const { code, digests } = await refusal(answer);
      if (code === "unsupported_media_type") {
        known.reads = undefined;
        return undefined;
      }
      if (!NO_NAMES.includes(code)) {
        if (answer.ok) for (const name of named.blobs.keys()) remember(known.has, sender + name);
        return answer;
      }
      for (const name of digests) known.has.delete(sender + name);
      brought = digests.filter((name) => named.blobs.has(name));
    }
    return undefined;
  }

  function count(bytes, answer) {
    savings.bytesOut += bytes;
    return answer;
  }

  return Object.assign(sending, { savings });
}

function remember(names, name) {
  names.delete(name);
  names.add(name);
  if (names.size > MAX_REMEMBERED) names.delete(names.values().next().value);
}

// Splits a body into texts with a name between each two, and the bytes by name.
async function nameBase64(body) {
  const texts = [];
  const names = [];
  const blobs = new Map();
  let begun = 0;
  for (const [at, end] of candidates(body)) {
    const bytes = decoded(body.slice(at, end));
    if (bytes === undefined) continue;
    const name = `sha256-${hex(await crypto.subtle.digest("SHA-256", bytes))}`;
    blobs.set(name, bytes);
    texts.push(body.slice(begun, at));
    names.push(name);
    begun = end;
    if (names.length === MAX_NAMES) break;
  }
  texts.push(body.slice(begun));
  return { texts, names, blobs, places: names.length };
}

// Yields the long texts that begin like base64 and end a JSON string.
function* candidates(body) {
  let begun = 0;
  for (let end; (end = body.indexOf('"', begun)) >= 0; begun = end + 1) {
    if (end - begun < LEAST) continue;
    const found = body.slice(begun, begun + 512).indexOf(";base64,");
    const at = found < 0 ? begun : begun + found + ";base64,".length;
    const likely = /^[A-Za-z0-9+/]{64}$/.test(body.slice(at, at + 64));
    if (end - at >= LEAST && (end - at) % 4 === 0 && likely) yield [at, end];
  }
}

// Returns the bytes, or undefined for what would not come back as it is.
function decoded(text) {
  if (!/^[A-Za-z0-9+/]*={0,2}$/.test(text)) return undefined;
  const raw = atob(text);
  if (btoa(raw.slice(-(raw.length % 3 || 3))).slice(-4) !== text.slice(-4)) return undefined;
  return Uint8Array.from(raw, (each) => each.charCodeAt(0));
}

function hex(buffer) {
  return Array.from(new Uint8Array(buffer), (each) => each.toString(16).padStart(2, "0")).join("");
}

function related({ texts, names, blobs }, brought) {
  const boundary = hex(crypto.getRandomValues(new Uint8Array(12)));
  const json = texts.map((text, i) => (i ? `cid:${names[i - 1]}@${boundary}${text}` : text)).join("");
  const pieces = [`--${boundary}\r\ncontent-type: application/json\r\n\r\n`, json];
  for (const name of brought) {
    pieces.push(`\r\n--${boundary}\r\ncontent-id: <${name}>\r\n\r\n`, blobs.get(name));
  }
  return { boundary, body: new Blob([...pieces, `\r\n--${boundary}--\r\n`]) };
}

// Returns whether a server reads bodies with names, or undefined where it cannot tell now.
async function readsNames(send, server, headers, signal) {
  const asking = new Headers(KEYS.flatMap((name) => (headers.has(name) ? [[name, headers.get(name)]] : [])));
  const answer = await send(`${server}/version`, { headers: asking, signal });
  const told = await answer.text();
  if (answer.status >= 500 || answer.status === 429) return undefined;
  try {
    return answer.ok && JSON.parse(told).accepts?.includes("multipart/related") === true;
  } catch {
    return false;
  }
}

// Returns a refusal's code in either API, and the names whose bytes the server lacks.
async function refusal(answer) {
  if (answer.status === 415) return { code: "unsupported_media_type", digests: [] };
  if (answer.status !== 400) return { digests: [] };
  try {
    const { error } = await answer.clone().json();
    const told = error.details ?? error;
    return { code: told.error_code ?? told.code, digests: told.digests ?? [] };
  } catch {
    return { digests: [] };
  }
}
