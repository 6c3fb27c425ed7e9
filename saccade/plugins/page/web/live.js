// The live view of caches and requests, from /metrics and /saccade/state. Polls once a second while
// the page is visible.

import { look } from "./api.js";
import { bar, byId, bytes, duration, element, milliseconds, number, percent } from "./dom.js";
import { DRAFTERS, TIERS } from "./trace.js";

const PERIOD = 1000; // ms between two polls
const AFTER_FAILURE = 5000;

/** Poll until the page closes. Awaits `onRefused` after a 401 and `onState(state)` after each poll. */
export async function watch(onRefused, onState) {
  let before = null;
  for (;;) {
    await seen();
    let wait = PERIOD;
    try {
      const now = { ...(await look()), at: performance.now() };
      show(now, before);
      await onState(now.state);
      before = now;
    } catch (error) {
      wait = AFTER_FAILURE;
      status("failed", failureWords(error));
      if (error.status === 401) {
        await onRefused(error);
        wait = 0;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function failureWords({ status, message }) {
  if (status === 401) return "API key required";
  return status ? message : "unreachable";
}

function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) =>
    document.addEventListener("visibilitychange", resolve, { once: true }),
  );
}

function status(name, words) {
  const shown = byId("status");
  shown.className = name;
  shown.textContent = words;
}

function show({ state, metrics, at }, before) {
  byId("model").textContent = state.model;
  document.title = `${state.model} – Saccade`;
  status(state.status, state.reason || state.status);
  if (byId("live").hidden) return;
  const value = (name, labels = {}) => pick(metrics, name, labels);
  const rate = (name) =>
    before ? (1000 * (value(name) - pick(before.metrics, name, {}))) / (at - before.at) : 0;
  byId("first-figures").replaceChildren(...firstFigures(value));
  byId("other-figures").replaceChildren(
    requests(state, value, rate),
    kv(state, metrics, value),
    embeddings(metrics, value),
    images(value),
    ...guesses(metrics, value),
    element(
      "p",
      { class: "small" },
      `Saccade ${state.version}, up ${duration(state.uptime)}; ` +
        `${number(state.context_length ?? 0)} tokens of context`,
    ),
  );
}

/** The main metrics since the server started. */
function firstFigures(value) {
  const seen = ["kv", "embedding", "pixels"]
    .map((level) => value("saccade_image_hits_total", { level }))
    .reduce((sum, count) => sum + count);
  const others = Math.max(0, value("saccade_images_received_total") - seen);
  const saved = value("saccade_cached_tokens_total");
  const first = value("saccade_ttft_seconds_sum") / (value("saccade_ttft_seconds_count") || 1);
  const figure = (words, ...figures) =>
    element("div", { class: "figure" }, element("b", {}, ...figures), element("span", {}, words));
  return [
    figure("cached + new images", number(seen), element("i", {}, ` + ${number(others)}`)),
    figure(
      `of ${number(value("saccade_prompt_tokens_total"))} prompt tokens cached`,
      number(saved),
    ),
    figure("mean time to first token", first ? milliseconds(1000 * first) : "–"),
  ];
}

/** The sum of a metric over all series that have these labels. */
function pick(metrics, name, labels) {
  let sum = 0;
  for (const [has, value] of metrics.get(name) ?? [])
    if (Object.entries(labels).every(([key, wanted]) => has[key] === wanted)) sum += value;
  return sum;
}

function panel(title, ...children) {
  return element("section", { class: "panel" }, element("h2", {}, title), ...children);
}

/** A list of names and values. */
function figures(...lines) {
  return element(
    "dl",
    {},
    ...lines.flatMap(([name, figure]) => [element("dt", {}, name), element("dd", {}, figure)]),
  );
}

function requests(state, value, rate) {
  const made = panel(
    "Requests",
    figures(
      ["running", number(value("saccade_requests_running"))],
      ["waiting", number(value("saccade_requests_waiting"))],
      ["tokens/s", number(rate("saccade_generated_tokens_total"))],
    ),
  );
  if (state.answers.length) {
    const head = ["age", "prompt", "images", "answer"].map((name) => element("th", {}, name));
    const rows = state.answers.map((each) =>
      element(
        "tr",
        {},
        element("td", {}, milliseconds(1000 * each.seconds)),
        ...[each.prompt_tokens, each.images, each.generated].map((n) =>
          element("td", {}, number(n)),
        ),
      ),
    );
    made.append(element("table", {}, element("tr", {}, ...head), ...rows));
  }
  return made;
}

const OWNERS = { sequences: "active", prefix: "cached", free: "free" };

function kv(state, metrics, value) {
  const pages = Object.keys(OWNERS).map((owner) => [owner, value("saccade_kv_pages", { owner })]);
  const all = pages.reduce((sum, [, count]) => sum + count, 0);
  const prompt = value("saccade_prompt_tokens_total");
  return panel(
    "Prompts (KV pages)",
    bar(
      pages.map(([owner, count]) => [
        owner,
        all ? count / all : 0,
        `${OWNERS[owner]}: ${number(count)}`,
      ]),
    ),
    figures(
      ...pages.map(([owner, count]) => [OWNERS[owner], number(count)]),
      ["pinned", number(value("saccade_pinned", { cache: "kv" }))],
      ["evicted", number(value("saccade_kv_evictions_total"))],
      ["prompt tokens cached", percent(value("saccade_cached_tokens_total"), prompt)],
      ["token capacity", number(state.kv_tokens ?? 0)],
    ),
    ...keptPages(metrics, value),
  );
}

/** KV offloaded from the device, for each tier. */
function keptPages(metrics, value) {
  const tiers = (metrics.get("saccade_kv_tier_bytes") ?? []).map(([labels]) => labels.tier);
  return tiers.flatMap((tier) => {
    const used = value("saccade_kv_tier_bytes", { tier });
    const budget = value("saccade_kv_tier_budget_bytes", { tier });
    return [
      element("h3", {}, TIERS[tier] ?? tier),
      bar([["prefix", budget ? used / budget : 0, `${bytes(used)} of ${bytes(budget)}`]]),
      figures(
        ["pages", number(value("saccade_kv_tier_entries", { tier }))],
        ["size", `${bytes(used)} of ${bytes(budget)}`],
        ["tokens loaded", number(value("saccade_restored_tokens_total", { tier }))],
        ["evicted", number(value("saccade_kv_tier_evictions_total", { tier }))],
      ),
    ];
  });
}

function embeddings(metrics, value) {
  const tiers = (metrics.get("saccade_embedding_cache_bytes") ?? []).map(([labels]) => labels.tier);
  return panel(
    "Image embeddings",
    ...tiers.flatMap((tier) => {
      const used = value("saccade_embedding_cache_bytes", { tier });
      const budget = value("saccade_embedding_cache_budget_bytes", { tier });
      const hits = value("saccade_embedding_hits_total", { tier });
      const looks = hits + value("saccade_embedding_misses_total", { tier });
      return [
        element("h3", {}, TIERS[tier] ?? tier),
        bar([["prefix", budget ? used / budget : 0, `${bytes(used)} of ${bytes(budget)}`]]),
        figures(
          ["images", number(value("saccade_embeddings", { tier }))],
          ["size", `${bytes(used)} of ${bytes(budget)}`],
          ["hits", `${number(hits)} of ${number(looks)} (${percent(hits, looks)})`],
          ["evicted", number(value("saccade_embedding_evictions_total", { tier }))],
        ),
      ];
    }),
    ...(tiers.length ? [] : [element("p", { class: "small" }, "none yet")]),
  );
}

/** Speculative decoding, if it is on. */
function guesses(metrics, value) {
  const sources = (metrics.get("saccade_draft_tokens_total") ?? []).map(([labels]) => labels.source);
  const lines = sources.flatMap((source) => {
    const all = value("saccade_draft_tokens_total", { source });
    const right = value("saccade_accepted_tokens_total", { source });
    const shown = `${number(right)} of ${number(all)} accepted (${percent(right, all)})`;
    return all ? [[`from ${DRAFTERS[source] ?? source}`, shown]] : [];
  });
  return lines.length ? [panel("Speculative decoding", figures(...lines))] : [];
}

function images(value) {
  const level = (name) => value("saccade_image_hits_total", { level: name });
  const fetched = value("saccade_images_fetched_total");
  return panel(
    "Images",
    figures(
      ["received", number(value("saccade_images_received_total"))],
      ["cached: KV", number(level("kv"))],
      ["cached: embedding", number(level("embedding"))],
      ["cached: pixels", number(level("pixels"))],
      ["from an encoder", number(level("encoder"))],
      ["fetched from the web", number(fetched)],
      ["decoded", number(value("saccade_images_decoded_total"))],
      ["encoded", number(value("saccade_images_encoded_total"))],
    ),
  );
}
