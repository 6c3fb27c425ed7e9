// The trace of a request, from the response's `saccade` field: one line that expands to its images
// and a timeline.

import { bytes, element, milliseconds, named, number } from "./dom.js";
import { markedPicture, picture } from "./images.js";

const CUT = 3; // the axis ends at this multiple of the time to first token, at the latest

const FOUND = named({
  none: ["new", "Fetched, decoded and encoded"],
  kv: ["cached: KV", "The prompt was cached up to and including this image"],
  embedding: ["cached: embedding", "Its embedding was cached: not decoded and not encoded"],
  pixels: ["cached: pixels", "Its pixels were cached: not decoded, but encoded again"],
  encoder: ["new: from an encoder", "Another server encoded it"],
});

const MISSED = named({
  kv: "no KV hit",
  embedding: "no embedding hit",
});

const WORDS = {
  prepare: "reading the request and its images",
  queue: "queued",
  fetch: "fetching",
  digest: "hashing",
  decode: "decoding",
  encode: "encoding",
  prefill: "prefill",
  answer: "decode",
};

/** The trace of an answer. images: the page's own objects for the trace's images, or null. */
export function showTrace({ trace, usage, model }, images) {
  return element(
    "details",
    { class: "trace" },
    element("summary", {}, summary(trace, usage)),
    element("p", { class: "small" }, sentence(trace, usage, model)),
    ...(trace.videos ?? []).map((video) => groupRow(video, nameOf(trace, video, images))),
    ...documents(trace).map((pages) => groupRow(pages, nameOf(trace, pages, images))),
    ...trace.images.flatMap((image, i) => (inGroup(trace, image) ? [] : [row(image, images[i])])),
    ...timeline(trace),
  );
}

const SEEN = ["kv", "embedding", "pixels"];

/** One line: new and cached images, the time to first token and the speed. */
function summary(trace, usage) {
  const pages = trace.images.filter((image) => documentOf(image));
  const alone = trace.images.filter((image) => !ofVideo(trace, image) && !documentOf(image));
  const levels = (images) => images.map(({ found }) => [found, 1]);
  const first = `first token ${milliseconds(Math.round(trace.ms.first_token) || 1)}`;
  return [
    counts(levels(alone), "image"),
    ...(trace.videos ?? []).map(({ found }) => momentsOf(found)),
    counts(levels(pages), "page"),
    first,
    speed(trace.ms, usage),
  ].filter(Boolean).join("; ");
}

/** Which parts of a video were new. found: number of frame pairs at each level. */
export const momentsOf = (found) => counts(Object.entries(found), "moment", " of video");

/** "2 new images", "1 cached page", or both counts. levels: [level, count]. */
function counts(levels, one, of = "") {
  const count = { seen: 0, new: 0 };
  for (const [level, number] of levels) count[SEEN.includes(level) ? "seen" : "new"] += number;
  const all = count.seen + count.new;
  const noun = `${one}${all === 1 ? "" : "s"}${of}`;
  if (!all) return "";
  if (!count.seen) return `${all} new ${noun}`;
  if (!count.new) return `${all} cached ${noun}`;
  return `${all} ${noun}: ${count.seen} cached, ${count.new} new`;
}

/** Tokens per second after the first. */
function speed({ first_token: first, total }, usage) {
  const more = (usage?.completion_tokens ?? 0) - 1;
  return more > 0 && total > first ? `${number((1000 * more) / (total - first))} tokens/s` : "";
}

export const DRAFTERS = {
  text: "the prompt",
  image: "earlier answers about the image",
  prediction: "the prediction",
};

function sentence({ ms, prompt, guesses = [] }, usage, model) {
  const accepted = guesses
    .filter(({ right }) => right)
    .map(({ source, right }) => `${right} from ${DRAFTERS[source] ?? source}`);
  const parts = [
    model ? `answered by ${model}` : "",
    `${usage?.prompt_tokens ?? "?"} prompt tokens, ${prompt.cached_tokens} cached`,
    usage ? `${usage.completion_tokens} output tokens` : "",
    accepted.length ? `draft tokens accepted: ${accepted.join(", ")}` : "",
    `${milliseconds(ms.total)} in total`,
  ];
  return parts.filter(Boolean).join(" · ");
}

const ofVideo = ({ videos = [] }, { place }) => videos.some((video) => video.place === place);

/** The path of the PDF that an image is a page of; undefined for other images. */
const documentOf = ({ place }) => /^(.*)\.pages\[\d+\]$/.exec(place)?.[1];

const inGroup = (trace, image) => ofVideo(trace, image) || documentOf(image);

/** For each PDF, the number of its pages found at each level. */
function documents(trace) {
  const found = new Map();
  for (const image of trace.images) {
    const place = documentOf(image);
    if (!place) continue;
    if (!found.has(place)) found.set(place, { place, found: named({}) });
    const levels = found.get(place).found;
    levels[image.found] = (levels[image.found] ?? 0) + 1;
  }
  return [...found.values()];
}

/** The file name of a video or a PDF. */
const nameOf = (trace, { place }, images) =>
  images[trace.images.findIndex((image) => (documentOf(image) ?? image.place) === place)]?.name ??
  "file";

/** One row for all images of a video or a PDF. */
function groupRow({ place, found, note }, name) {
  const levels = Object.entries(found).map(([level, count]) => {
    const key = level === "encoded" ? "none" : level;
    const [words, meaning] = FOUND[key] ?? [level, ""];
    return element("span", { class: `found ${key}`, title: meaning }, `${count} ${words}`);
  });
  const words = note ? `${name}: ${note}` : name;
  return element(
    "div",
    { class: "video", title: place },
    ...levels,
    element("span", { class: "small" }, words),
  );
}

function row(image, known) {
  const { size, resized, ms } = image;
  const [found, meaning] = FOUND[image.found] ?? [image.found, ""];
  const spent = ["fetch", "digest", "decode", "ship", "wait", "encode"]
    .filter((stage) => ms[stage] >= 0.01)
    .map((stage) => `${stage} ${milliseconds(ms[stage])}`);
  const missed = Object.entries(image.missed)
    .filter(([, why]) => why !== "never seen") // new images need no reason
    .map(([level, why]) => `${MISSED[level] ?? level}: ${why}`);
  const where = image.tier ? [TIERS[image.tier] ?? image.tier] : [];
  const facts =
    `${image.format} ${bytes(image.bytes)}, ${size.width} × ${size.height}` +
    ` → ${resized.width} × ${resized.height}, ${image.tokens} tokens · `;
  return element(
    "div",
    { class: "image", "data-found": found, "data-tier": image.tier ?? "" },
    picture(known),
    element(
      "div",
      {},
      element("span", { class: `found ${image.found}`, title: meaning }, found),
      element("span", { class: "small" }, [...where, ...missed].join("; ")),
      element("div", { class: "small" }, spent.join(" · ")),
      element(
        "div",
        { class: "small" },
        facts,
        element("code", { title: `blake3 ${image.digest}` }, image.digest.slice(0, 16)),
      ),
      ...(image.tiles ? tilesOf(image.tiles, known) : []),
    ),
  );
}

/** Which tiles of an image were new, as text and as marks on the image. The thumbnail has no mark. */
function tilesOf({ seen, new: fresh, places }, known) {
  if (!seen) return [element("div", { class: "small tiles-told" }, `all ${fresh} tiles are new`)];
  const marked = known?.url && places.length ? [markedPicture(known, places)] : [];
  const thumbnail = fresh > places.length ? " and the thumbnail" : "";
  const which = marked.length ? `: ${places.length} marked here${thumbnail}` : "";
  const words = `${fresh} of ${seen + fresh} tiles are new${which}`;
  return [element("div", { class: "small tiles-told" }, words), ...marked];
}

export const TIERS = named({
  device: "in device memory",
  host: "in host memory",
  disk: "on disk",
});

/** Stages as [class, start, end], in ms since the request arrived. */
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

/** The lanes, and a legend below them. */
function timeline(trace) {
  const { ms } = trace;
  const end = Math.max(1, Math.min(ms.total, CUT * ms.first_token));
  const lanes = [["request", stages(ms)]];
  trace.images.forEach((image, i) => {
    if (!inGroup(trace, image)) lanes.push([`image ${i + 1}`, imageStages(image)]);
  });
  const made = element("div", { class: "timeline", role: "img", "aria-label": "When each stage ran" });
  const used = new Set();
  for (const [name, parts] of lanes) {
    const lane = element("div", { class: "lane" });
    for (const [stage, from, to] of parts) {
      lane.append(span(stage, from, to, end));
      used.add(stage);
    }
    made.append(element("span", { class: "small" }, name), lane);
  }
  const until =
    ms.total > end
      ? `cut at ${milliseconds(end)} of ${milliseconds(ms.total)}`
      : milliseconds(end);
  made.append(element("span"), element("span", { class: "end small" }, until));
  const legend = [...used].map((stage) =>
    element("span", {}, element("i", { class: `stage ${stage}` }), WORDS[stage]),
  );
  return [made, element("div", { class: "legend small" }, ...legend)];
}

function span(stage, from, to, end) {
  const words = `${WORDS[stage]}: ${milliseconds(to - from)}, from ${milliseconds(from)}`;
  const made = element("span", { class: `stage ${stage}`, title: words });
  const [left, right] = [Math.max(0, from), Math.min(end, to)].map((at) => (100 * at) / end);
  made.style.left = `${left}%`;
  made.style.width = `${Math.max(0, right - left)}%`;
  if (to > end) made.classList.add("cut");
  return made;
}
