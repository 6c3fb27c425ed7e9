// What became of a request's images, and when each stage of it ran: the `saccade` field of an
// answer, shown. Knows nothing of chats.

import { bytes, element, milliseconds } from "./dom.js";
import { picture } from "./images.js";

const CUT = 3; // the axis ends at so many times the time to the first token, at the latest

const FOUND = {
  kv: "KV cache: nothing of it was computed",
  embedding: "its embedding was kept: neither decoded nor encoded",
  pixels: "its pixels were kept: not decoded, but encoded again",
  none: "new: fetched, decoded and encoded",
};

const WORDS = {
  prepare: ": images read, prompt made of the messages",
  queue: ": waiting for a slot, or for images",
};

/** images: by place ("messages[0].content[1]"), as the page knows them. */
export function showTrace(trace, usage, images) {
  const { ms, prompt } = trace;
  const told = [
    `${usage ? usage.prompt_tokens : "?"} prompt tokens, ${prompt.cached_tokens} of them cached`,
    usage ? `${usage.completion_tokens} tokens` : "",
    `first token after ${milliseconds(ms.first_token)}`,
    `all after ${milliseconds(ms.total)}`,
  ];
  return element(
    "div",
    { class: "trace" },
    element("p", { class: "small" }, told.filter(Boolean).join(" · ")),
    ...trace.images.map((image) => row(image, images.get(image.place))),
    timeline(trace),
  );
}

function row(image, known) {
  const { size, resized, ms } = image;
  const spent = ["fetch", "digest", "decode", "wait", "encode"]
    .map((stage) => `${stage} ${milliseconds(ms[stage])}`)
    .join(" · ");
  const missed = Object.entries(image.missed).map(([level, why]) => `not in ${level}: ${why}`);
  const facts =
    `${image.format} ${bytes(image.bytes)}, ${size.width} × ${size.height}` +
    ` → ${resized.width} × ${resized.height}, ${image.tokens} tokens, `;
  return element(
    "div",
    { class: "image", "data-found": place(image) },
    picture(known),
    element(
      "div",
      {},
      element("span", { class: `found ${image.found}`, title: FOUND[image.found] }, place(image)),
      element("span", { class: "small" }, missed.join("; ")),
      element("div", { class: "small" }, spent),
      element(
        "div",
        { class: "small" },
        facts,
        element("code", { title: `blake3 ${image.digest}` }, image.digest.slice(0, 16)),
      ),
    ),
  );
}

const place = (image) => (image.tier ? `${image.found}: ${image.tier}` : image.found);

/** Stages as [class, begin, end], in ms from the arrival of the request. */
function stages(ms) {
  return [
    ["prepare", 0, ms.prepared],
    ["queue", ms.prepared, ms.admitted],
    ["prefill", ms.admitted, ms.first_token],
    ["answer", ms.first_token, ms.total],
  ];
}

function imageStages({ starts, ms }) {
  const found = [["fetch", starts.fetch, starts.fetch + ms.fetch]];
  found.push(["digest", starts.fetch + ms.fetch, starts.fetch + ms.fetch + ms.digest]);
  if (starts.decode !== undefined) found.push(["decode", starts.decode, starts.decode + ms.decode]);
  if (starts.encode !== undefined) found.push(["encode", starts.encode, starts.encode + ms.encode]);
  return found;
}

function timeline(trace) {
  const { ms } = trace;
  const end = Math.max(1, Math.min(ms.total, CUT * ms.first_token));
  const lanes = [["request", stages(ms)]];
  trace.images.forEach((image, i) => lanes.push([`image ${i + 1}`, imageStages(image)]));
  const made = element("div", { class: "timeline", "aria-label": "Timeline of the request" });
  const used = new Set();
  for (const [name, parts] of lanes) {
    const lane = element("div", { class: "lane" });
    for (const [stage, from, to] of parts) {
      const words = `${stage} ${milliseconds(to - from)}, from ${milliseconds(from)}${WORDS[stage] ?? ""}`;
      const span = element("span", { class: `stage ${stage}`, title: words });
      const [left, right] = [Math.max(0, from), Math.min(end, to)].map((at) => (100 * at) / end);
      span.style.left = `${left}%`;
      span.style.width = `${Math.max(0, right - left)}%`;
      if (to > end) span.classList.add("cut");
      used.add(stage);
      lane.append(span);
    }
    made.append(element("span", { class: "small" }, name), lane);
  }
  const legend = [...used].map((stage) =>
    element("span", {}, element("i", { class: `stage ${stage}` }), stage),
  );
  const until = ms.total > end ? `${milliseconds(end)} (the answer goes on)` : milliseconds(end);
  made.append(
    element("span"),
    element("div", { class: "legend small" }, ...legend, element("span", { class: "end" }, until)),
  );
  return made;
}
