// Requests to the server, with the API key. Paths are relative because the server may be behind a
// path prefix.

const STORE = "saccade-key";

export const storedKey = () => sessionStorage.getItem(STORE);

export function storeKey(key) {
  if (key) sessionStorage.setItem(STORE, key);
  else sessionStorage.removeItem(STORE);
}

/** An error response. `param`: the request field that it is about, or "". */
export class Refused extends Error {
  constructor(status, message, param = "") {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The server did not respond, or the response was cut off. */
export class Unreachable extends Error {}

/** The response to a request. Throws Refused, Unreachable. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = storedKey();
  try {
    if (key) headers.set("authorization", `Bearer ${key}`);
  } catch {
    throw new Refused(401, "the key has characters that are not allowed in a header");
  }
  const answer = await reached(fetch(path, { ...options, headers }));
  if (!answer.ok) throw refusal(answer.status, await answer.text());
  return answer;
}

/** `fetch`, with network errors as Unreachable. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the server does not respond");
  }
}

function refusal(status, text) {
  try {
    const { message, param } = JSON.parse(text).error;
    const field = String(param ?? "");
    const doubled = field && String(message).startsWith(`${field}: `);
    return new Refused(status, String(message).slice(doubled ? field.length + 2 : 0), field);
  } catch {
    return new Refused(status, text.slice(0, 500) || `status ${status}`);
  }
}

/** The server's models and adapters: {id, parent}; the parent of a model is "". */
export async function models() {
  const { data } = await (await request("v1/models")).json();
  return data.map(({ id, parent }) => ({ id: String(id), parent: String(parent ?? "") }));
}

/** The chunks of a streamed chat. Throws Refused, Unreachable, also after the first chunk. */
export async function* chat(body, signal) {
  const answer = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw refusal(200, data);
    yield chunk;
  }
  throw new Unreachable("the connection was lost");
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

/** {state, metrics}: the server's state, and lists of [labels, value] by metric name. */
export async function look() {
  const [state, metrics] = await Promise.all([
    request("saccade/state").then((answer) => answer.json()),
    request("metrics").then((answer) => answer.text()),
  ]);
  return { state, metrics: parse(metrics) };
}

const LINE = /^([a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN)$/;

/** Parse Prometheus' text format, without histogram buckets. */
function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match || match[1].endsWith("_bucket")) continue;
    const [, name, labels, value] = match;
    const pairs = [...(labels ?? "").matchAll(/([a-z_]+)="([^"]*)"/g)];
    const entry = [Object.fromEntries(pairs.map(([, key, each]) => [key, each])), Number(value)];
    found.set(name, [...(found.get(name) ?? []), entry]);
  }
  return found;
}
