// What the page asks of the server, and the key that it sends with it. Knows nothing of what is
// shown. Paths are relative: the server may stand behind a prefix.

const STORE = "saccade-key";

export const storedKey = () => sessionStorage.getItem(STORE);

export function storeKey(key) {
  if (key) sessionStorage.setItem(STORE, key);
  else sessionStorage.removeItem(STORE);
}

/** The server's refusal, in its words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The answer to a request; throws Refused. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = storedKey();
  try {
    if (key) headers.set("authorization", `Bearer ${key}`);
  } catch {
    throw new Refused(401, "the key has characters that no header can carry");
  }
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) throw new Refused(answer.status, await reason(answer));
  return answer;
}

async function reason(answer) {
  const text = await answer.text();
  try {
    const { message, param } = JSON.parse(text).error;
    return param ? `${param}: ${message}` : message;
  } catch {
    return text.slice(0, 500) || `status ${answer.status}`;
  }
}

/** The chunks of a streamed chat; throws Refused, also for an error in the middle. */
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
    if (chunk.error) throw new Refused(200, chunk.error.message);
    yield chunk;
  }
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
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
