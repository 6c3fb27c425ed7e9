// What the page asks of the server, and the key that it sends with it. Knows nothing of what is
// shown. Paths are relative: the server may stand behind a prefix.

const STORE = "saccade-key";

export const storedKey = () => sessionStorage.getItem(STORE);

export function storeKey(key) {
  if (key) sessionStorage.setItem(STORE, key);
  else sessionStorage.removeItem(STORE);
}

/** The server's refusal, in its words. `param`: the field of the request that it is about, or "". */
export class Refused extends Error {
  constructor(status, message, param = "") {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** No answer came, or it broke off. */
export class Unreachable extends Error {}

/** The answer to a request; throws Refused, Unreachable. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = storedKey();
  try {
    if (key) headers.set("authorization", `Bearer ${key}`);
  } catch {
    throw new Refused(401, "the key has characters that no header can carry");
  }
  const answer = await reached(fetch(path, { ...options, headers }));
  if (!answer.ok) throw refusal(answer.status, await answer.text());
  return answer;
}

/** What the network gives, its failures as Unreachable. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the server does not answer");
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

/** The server's models and their adapters: {id, parent}, the latter "" of a model. */
export async function models() {
  const { data } = await (await request("v1/models")).json();
  return data.map(({ id, parent }) => ({ id: String(id), parent: String(parent ?? "") }));
}

/** The chunks of a streamed chat; throws Refused, Unreachable, also in the middle. */
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
  throw new Unreachable("the answer broke off");
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

/** The server's state and its metrics: {state, metrics}, the latter by name, as [labels, value]. */
export async function look() {
  const [state, metrics] = await Promise.all([
    request("saccade/state").then((answer) => answer.json()),
    request("metrics").then((answer) => answer.text()),
  ]);
  return { state, metrics: parse(metrics) };
}

const LINE = /^([a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN)$/;

/** Prometheus' text format, histograms' buckets left out. */
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
