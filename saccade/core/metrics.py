"""Every metric, declared once: name, kind, help, label names. `Metrics` holds the values.

The front, the engine and the answering worker have one `Metrics` each. A look at `/metrics` makes
the front ask the engine for changed values (`Metrics.changed`). `edge/metrics_text.py` renders the
text for Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
"""Histogram bucket bounds, in seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric. Histograms are in seconds with the bucket bounds `SECONDS`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


DECLARED: tuple[Metric, ...] = (
    # The path of an image.
    Metric(
        "saccade_images_received_total",
        "counter",
        "Images named in accepted requests, repeats included",
    ),
    Metric("saccade_next_prompts_waiting", "gauge", "Sessions whose next prompts are computed"),
    Metric(
        "saccade_prepared_tokens_total",
        "counter",
        "Tokens of next prompts: computed while idle, and used or wasted since",
        ("outcome",),
    ),
    Metric("saccade_warm_waiting", "gauge", "Uploads that wait to be got ready"),
    Metric("saccade_warm_total", "counter", "Uploads got ready when idle, or not", ("outcome",)),
    Metric("saccade_images_fetched_total", "counter", "Images fetched over http(s)"),
    Metric("saccade_images_decoded_total", "counter", "Images decoded and resized"),
    Metric(
        "saccade_image_bytes_shipped_total",
        "counter",
        "Bytes of resized pixels handed to the engine",
    ),
    Metric("saccade_images_encoded_total", "counter", "Images run through the vision tower"),
    Metric(
        "saccade_images_same_total",
        "counter",
        "Images whose pixels, once decoded, were those of another, and share its embedding",
    ),
    Metric(
        "saccade_image_patches_encoded_total", "counter", "Patches run through the vision tower"
    ),
    Metric(
        "saccade_image_tiles_total",
        "counter",
        "Tiles of encoded images, where the vision tower sees tiles apart: run through it (new), "
        "or taken from another image (seen)",
        ("outcome",),
    ),
    Metric("saccade_tile_bytes_named_total", "counter", "Bytes of pixels hashed to name tiles"),
    Metric(
        "saccade_step_patches_largest",
        "gauge",
        "Most patches run through the vision tower in one step so far",
    ),
    Metric(
        "saccade_image_hits_total",
        "counter",
        "Images of requests found at a level of cache",
        ("level",),
    ),
    Metric(
        "saccade_encoder_images_total",
        "counter",
        "Images that an encoder was asked for, by what came of it: an embedding; or, encoded here: "
        "unreachable, slow, refused, damaged (what came was no such embedding), away (it failed a "
        "moment ago)",
        ("outcome",),
    ),
    Metric("saccade_encoder_bytes_total", "counter", "Bytes of embeddings that encoders have sent"),
    Metric(
        "saccade_embeddings_sent_total",
        "counter",
        "Embeddings sent to other servers: encoded for the request (tower), or found (cache; also "
        "what another request was having encoded)",
        ("source",),
    ),
    Metric(
        "saccade_readouts_total",
        "counter",
        "Embeddings, ranks and decisions: made by the model, or kept from before (cache)",
        ("source",),
    ),
    Metric("saccade_arena_bytes_in_use", "gauge", "Bytes of the shared pixel arena in use"),
    Metric("saccade_headers_read_total", "counter", "Image headers read by image workers"),
    Metric(
        "saccade_decodes_total",
        "counter",
        "Runs of an image decoder; one serves all sizes asked of the same bytes at the time",
    ),
    Metric(
        "saccade_video_frames_decoded_total",
        "counter",
        "Frames of video files that an image worker was asked for",
    ),
    Metric("saccade_documents_opened_total", "counter", "PDFs in requests, repeats included"),
    Metric("saccade_pages_rendered_total", "counter", "Pages of PDFs drawn by an image worker"),
    Metric(
        "saccade_image_worker_restarts_total",
        "counter",
        "Image workers replaced after a crash, a hang or a memory blow-up",
    ),
    Metric(
        "saccade_image_worker_renewals_total",
        "counter",
        "Image workers replaced before they read another client's bytes",
    ),
    Metric(
        "saccade_embedding_hits_total",
        "counter",
        "Image embeddings found in a tier by a sequence that needed them",
        ("tier",),
    ),
    Metric(
        "saccade_embedding_misses_total",
        "counter",
        "Image embeddings looked for in a tier and not found",
        ("tier",),
    ),
    Metric(
        "saccade_embedding_cache_bytes", "gauge", "Bytes of image embeddings resident", ("tier",)
    ),
    Metric(
        "saccade_embedding_cache_budget_bytes",
        "gauge",
        "Bytes that image embeddings may take",
        ("tier",),
    ),
    Metric("saccade_embeddings", "gauge", "Image embeddings resident", ("tier",)),
    Metric(
        "saccade_embedding_evictions_total",
        "counter",
        "Image embeddings evicted from a tier",
        ("tier",),
    ),
    Metric(
        "saccade_position_cache_lookups_total",
        "counter",
        "Lookups of what follows from a grid alone",
        ("kind", "outcome"),
    ),
    Metric("saccade_position_cache_bytes", "gauge", "Bytes of what follows from a grid alone"),
    # Tokens and steps.
    Metric("saccade_prompt_tokens_total", "counter", "Prompt tokens of admitted requests"),
    Metric(
        "saccade_cached_tokens_total", "counter", "Prompt tokens that came from the prefix cache"
    ),
    Metric(
        "saccade_batch_lines_total",
        "counter",
        "Lines of batches, by what came of them",
        ("outcome",),
    ),
    Metric("saccade_generated_tokens_total", "counter", "Tokens generated"),
    Metric("saccade_steps_total", "counter", "Steps of the engine"),
    Metric(
        "saccade_graph_replays_total",
        "counter",
        "Steps that only decoded, by the rows of the CUDA graph that was replayed",
        ("rows",),
    ),
    Metric(
        "saccade_mixed_graph_replays_total",
        "counter",
        "Steps with tokens of prompts, by the tokens of the CUDA graph that was replayed",
        ("tokens",),
    ),
    Metric(
        "saccade_preemptions_total",
        "counter",
        "Sequences sent back to waiting because pages ran out",
    ),
    Metric("saccade_guesses_total", "counter", "Tokens guessed, by where", ("source",)),
    Metric("saccade_right_guesses_total", "counter", "Guesses that were right", ("source",)),
    Metric("saccade_requests_running", "gauge", "Sequences that hold a slot"),
    Metric("saccade_requests_waiting", "gauge", "Sequences that wait for a slot or for pages"),
    Metric("saccade_kv_pages", "gauge", "KV pages by owner", ("owner",)),
    Metric(
        "saccade_kv_utilization", "gauge", "Fraction of the KV pages that sequences use, 0 to 1"
    ),
    Metric("saccade_kv_page_tokens", "gauge", "Tokens of a KV page"),
    Metric("saccade_kv_evictions_total", "counter", "Pages evicted from the prefix cache"),
    Metric(
        "saccade_kv_kept_bytes", "gauge", "Bytes of KV pages and states kept in a tier", ("tier",)
    ),
    Metric("saccade_kv_kept_budget_bytes", "gauge", "Bytes that KV may take of a tier", ("tier",)),
    Metric("saccade_kv_kept", "gauge", "KV pages and states kept in a tier", ("tier",)),
    Metric("saccade_kv_kept_evictions_total", "counter", "KV pages evicted from a tier", ("tier",)),
    Metric(
        "saccade_kv_kept_total",
        "counter",
        "KV pages of a tier by what became of them: saved; not saved (disk full, or behind); read; "
        "and, computed again: damaged, missing, not read (an error of the disk), late, slow (not "
        "begun)",
        ("tier", "outcome"),
    ),
    Metric(
        "saccade_restored_tokens_total",
        "counter",
        "Cached prompt tokens that were read from a tier",
        ("tier",),
    ),
    Metric(
        "saccade_memory_given_back_bytes_total",
        "counter",
        "Bytes that caches gave back while the machine, or the cgroup, was short of memory",
        ("what",),
    ),
    Metric("saccade_snapshots", "gauge", "States of sequences that the prefix cache holds"),
    Metric("saccade_snapshot_evictions_total", "counter", "Snapshots that went for others' sake"),
    Metric(
        "saccade_pinned",
        "gauge",
        "What clients asked to be kept: pages (cache kv), bytes (embeddings, kv host, kv disk)",
        ("cache",),
    ),
    Metric(
        "saccade_pins",
        "gauge",
        "Places up to which prompts are kept, and embeddings that are, once per client",
        ("cache",),
    ),
    Metric(
        "saccade_pins_given_way_total",
        "counter",
        "Pins that ended before their time, for the share was full or nothing else could go",
        ("cache",),
    ),
    Metric(
        "saccade_engine_stalled",
        "gauge",
        "1 while the engine makes no progress though it lives and work is due",
    ),
    # Requests as clients see them.
    Metric("saccade_requests_total", "counter", "Requests ended, by outcome", ("outcome",)),
    Metric(
        "saccade_http_responses_total",
        "counter",
        "HTTP responses by status code, and by the code of the error if there is one",
        ("code", "reason"),
    ),
    Metric(
        "saccade_build_info", "gauge", "1, with the version and the model", ("version", "model")
    ),
    Metric("saccade_requests_in_flight", "gauge", "Requests accepted and not yet ended"),
    Metric(
        "saccade_request_bytes_held",
        "gauge",
        "Bytes of bodies and encoded images held for requests in flight",
    ),
    Metric("saccade_sent_bytes_held", "gauge", "Bytes kept so that later bodies may name them"),
    Metric(
        "saccade_named_bytes_total", "counter", "Bytes that bodies named and did not carry again"
    ),
    Metric(
        "saccade_traces_dropped_total",
        "counter",
        "Traces of requests that did not reach the collector of --otlp-traces-endpoint",
    ),
    Metric("saccade_responses_kept", "gauge", "Responses kept for previous_response_id"),
    Metric("saccade_responses_bytes", "gauge", "Bytes of kept responses and conversations"),
    Metric("saccade_connections", "gauge", "HTTP connections that are open"),
    Metric(
        "saccade_connections_closed_total",
        "counter",
        "HTTP connections that the server ended early: another needed the place (crowd), the head "
        "came too slowly (head), answers were not read (unread), a refused body went on (body)",
        ("reason",),
    ),
    Metric("saccade_queue_seconds", "histogram", "Time from arrival to the start of prefill"),
    Metric("saccade_ttft_seconds", "histogram", "Time to first token"),
    Metric("saccade_itl_seconds", "histogram", "Time between tokens"),
    Metric("saccade_e2e_seconds", "histogram", "Time from arrival to the end of the answer"),
)

_OF_ANY_SERVER = (
    "saccade_request_bytes_held",
    "saccade_connections",
    "saccade_connections_closed_total",
)
ROUTED: tuple[Metric, ...] = (
    *(metric for metric in DECLARED if metric.name in _OF_ANY_SERVER),
    Metric(
        "saccade_route_requests_total",
        "counter",
        "Requests sent to a worker, retries included",
        ("worker",),
    ),
    Metric(
        "saccade_route_in_flight", "gauge", "Requests that a worker has of this router", ("worker",)
    ),
    Metric("saccade_route_ready", "gauge", "1 while a worker says that it is ready", ("worker",)),
    Metric(
        "saccade_route_retries_total",
        "counter",
        "Requests that went to another worker, for the first died before a byte of its answer",
    ),
    Metric(
        "saccade_route_broken_total", "counter", "Answers that ended early, for their worker died"
    ),
    Metric(
        "saccade_route_rank_seconds",
        "histogram",
        "Time from the whole body to the choice of a worker",
    ),
)
"""The counters of `saccade route`."""

Key = tuple[str, tuple[str, ...]]
"""A metric's name and its label values in declared order."""


class Histogram:
    """Cumulative-free bucket counts over `SECONDS` and the sum. The last bucket is +Inf."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value


class Metrics:
    """Values for the declared metrics: a server's, unless others are given.

    An undeclared name, a wrong kind or wrong labels are a bug and raise KeyError.
    """

    def __init__(self, declared: Sequence[Metric] = DECLARED) -> None:
        self._declared = {metric.name: metric for metric in declared}
        self._values: dict[Key, float] = {
            (m.name, ()): 0.0 for m in declared if m.kind != "histogram" and not m.labels
        }
        self._histograms: dict[str, Histogram] = {
            m.name: Histogram() for m in declared if m.kind == "histogram"
        }
        self._sent: dict[Key, float] = {}

    def _key(self, name: str, labels: Mapping[str, str]) -> Key:
        metric = self._declared[name]
        return name, tuple(labels[label] for label in metric.labels)

    def inc(self, name: str, n: float = 1, **labels: str) -> None:
        key = self._key(name, labels)
        self._values[key] = self._values.get(key, 0.0) + n

    def set(self, name: str, value: float, **labels: str) -> None:
        self._values[self._key(name, labels)] = value

    def observe(self, name: str, seconds: float) -> None:
        self._histograms[name].observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        return self._values.get(self._key(name, labels), 0.0)

    def changed(self) -> tuple[tuple[str, tuple[str, ...], float], ...]:
        """Return the values that changed since the last call."""
        values = self._values.items()
        news = tuple(
            (name, labels, value)
            for (name, labels), value in values
            if self._sent.get((name, labels), 0.0) != value
        )
        self._sent = dict(self._values)
        return news

    def absorb(self, news: Iterable[tuple[str, tuple[str, ...], float]]) -> None:
        """Take over another process's `changed` values."""
        for name, labels, value in news:
            self._values[name, labels] = value

    def snapshot(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        """Return counter and gauge values by metric and label values."""
        by_metric: dict[Metric, dict[tuple[str, ...], float]] = {
            m: {} for m in self._declared.values() if m.kind != "histogram"
        }
        for (name, labels), value in self._values.items():
            by_metric[self._declared[name]][labels] = value
        return by_metric

    def histograms(self) -> dict[Metric, Histogram]:
        return {self._declared[name]: histogram for name, histogram in self._histograms.items()}
