"""Declarations of all metrics, and `Metrics`, which stores their values.

The front end, the engine and rank 0 each have a `Metrics`. For `GET /metrics`, the front end
requests the values that have changed in the engine (`Metrics.changed`). `edge/metrics_text.py`
renders the Prometheus format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Upper bounds of histogram buckets, in seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The name, type, help and labels of a metric. Histograms are in seconds, with `SECONDS` as
    buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    old_name: str = ""  # deprecated alias of a counter or gauge


DECLARED: tuple[Metric, ...] = (
    # The path of an image.
    Metric(
        "saccade_images_received_total",
        "counter",
        "Images in accepted requests, including repeated ones",
    ),
    Metric(
        "saccade_next_prompts_waiting",
        "gauge",
        "Sessions whose next prompt is being prefilled while idle",
    ),
    Metric(
        "saccade_prepared_tokens_total",
        "counter",
        "Prompt tokens prefilled in advance: computed, and later used or wasted",
        ("outcome",),
    ),
    Metric(
        "saccade_warm_waiting", "gauge", "Uploads that wait to be decoded and encoded in advance"
    ),
    Metric(
        "saccade_warm_total",
        "counter",
        "Uploads, by whether they were decoded and encoded in advance",
        ("outcome",),
    ),
    Metric("saccade_images_fetched_total", "counter", "Images fetched over HTTP(S)"),
    Metric("saccade_images_decoded_total", "counter", "Images decoded and resized"),
    Metric(
        "saccade_image_bytes_shipped_total",
        "counter",
        "Bytes of resized pixels sent to the engine",
    ),
    Metric("saccade_images_encoded_total", "counter", "Images encoded by the vision encoder"),
    Metric(
        "saccade_duplicate_images_total",
        "counter",
        "Images that share an embedding because their decoded pixels equal another image's",
        old_name="saccade_images_same_total",
    ),
    Metric(
        "saccade_image_patches_encoded_total", "counter", "Patches encoded by the vision encoder"
    ),
    Metric(
        "saccade_image_tiles_total",
        "counter",
        "Tiles of models that encode tiles independently: encoded (new), or reused from another "
        "image (seen)",
        ("outcome",),
    ),
    Metric(
        "saccade_tile_bytes_hashed_total",
        "counter",
        "Bytes of pixels hashed for tile cache keys",
        old_name="saccade_tile_bytes_named_total",
    ),
    Metric(
        "saccade_max_step_patches",
        "gauge",
        "Maximum patches encoded in one step so far",
        old_name="saccade_step_patches_largest",
    ),
    Metric(
        "saccade_image_hits_total",
        "counter",
        "Images of requests found in a cache, by its level",
        ("level",),
    ),
    Metric(
        "saccade_encoder_images_total",
        "counter",
        "Images requested from encoders, by outcome: embedding, or the reason why the image was "
        "encoded locally: unreachable, slow, refused, damaged (an invalid embedding), away (the "
        "encoder failed recently)",
        ("outcome",),
    ),
    Metric("saccade_encoder_bytes_total", "counter", "Bytes of embeddings received from encoders"),
    Metric(
        "saccade_embeddings_sent_total",
        "counter",
        "Embeddings sent to other servers: encoded for the request (tower), or already cached or "
        "being encoded (cache)",
        ("source",),
    ),
    Metric(
        "saccade_readouts_total",
        "counter",
        "Embeddings, ranks and decisions: computed by the model, or reused (cache)",
        ("source",),
    ),
    Metric(
        "saccade_cache_events_total",
        "counter",
        "Cache events published",
        ("cache",),
    ),
    Metric(
        "saccade_cache_events_dropped_total",
        "counter",
        "Cache events dropped because the queue was full",
        ("cache",),
    ),
    Metric("saccade_arena_bytes_in_use", "gauge", "Bytes of the shared pixel arena in use"),
    Metric("saccade_headers_read_total", "counter", "Image headers read by image workers"),
    Metric(
        "saccade_decodes_total",
        "counter",
        "Image decodes. One decode serves all sizes requested of the same bytes at that time",
    ),
    Metric(
        "saccade_early_decodes_total",
        "counter",
        "Image decodes started before the request had arrived (--tune early_decode=true)",
    ),
    Metric(
        "saccade_early_decodes_unused_total",
        "counter",
        "Requests whose early decodes were of no use",
    ),
    Metric(
        "saccade_video_frames_decoded_total",
        "counter",
        "Video frames requested from image workers",
    ),
    Metric("saccade_documents_opened_total", "counter", "PDFs in requests, repeats included"),
    Metric("saccade_pages_rendered_total", "counter", "PDF pages rendered by image workers"),
    Metric(
        "saccade_image_worker_restarts_total",
        "counter",
        "Image workers replaced after a crash, a timeout or excessive memory use",
    ),
    Metric(
        "saccade_image_worker_renewals_total",
        "counter",
        "Image workers replaced before they read the bytes of another client",
    ),
    Metric(
        "saccade_embedding_hits_total",
        "counter",
        "Image embeddings found in a tier",
        ("tier",),
    ),
    Metric(
        "saccade_embedding_misses_total",
        "counter",
        "Image embeddings not found in a tier",
        ("tier",),
    ),
    Metric("saccade_embedding_cache_bytes", "gauge", "Bytes of cached image embeddings", ("tier",)),
    Metric(
        "saccade_embedding_cache_budget_bytes",
        "gauge",
        "Maximum bytes of cached image embeddings",
        ("tier",),
    ),
    Metric("saccade_embeddings", "gauge", "Cached image embeddings", ("tier",)),
    Metric(
        "saccade_embedding_evictions_total",
        "counter",
        "Image embeddings evicted from a tier",
        ("tier",),
    ),
    Metric(
        "saccade_position_cache_lookups_total",
        "counter",
        "Lookups in the cache of position embeddings",
        ("kind", "outcome"),
    ),
    Metric("saccade_position_cache_bytes", "gauge", "Bytes of cached position embeddings"),
    # Tokens and steps.
    Metric("saccade_prompt_tokens_total", "counter", "Prompt tokens of admitted requests"),
    Metric("saccade_cached_tokens_total", "counter", "Prompt tokens reused from the prefix cache"),
    Metric(
        "saccade_batch_lines_total",
        "counter",
        "Lines of batch files, by outcome",
        ("outcome",),
    ),
    Metric("saccade_generated_tokens_total", "counter", "Tokens generated"),
    Metric("saccade_steps_total", "counter", "Engine steps"),
    Metric(
        "saccade_graph_replays_total",
        "counter",
        "Decode steps that replayed a CUDA graph, by its batch size",
        ("rows",),
    ),
    Metric(
        "saccade_mixed_graph_replays_total",
        "counter",
        "Prefill steps that replayed a CUDA graph, by its token count",
        ("tokens",),
    ),
    Metric(
        "saccade_preemptions_total",
        "counter",
        "Sequences preempted because KV pages ran out",
    ),
    Metric(
        "saccade_draft_tokens_total",
        "counter",
        "Draft tokens, by drafter",
        ("source",),
        old_name="saccade_guesses_total",
    ),
    Metric(
        "saccade_accepted_tokens_total",
        "counter",
        "Draft tokens accepted, by drafter",
        ("source",),
        old_name="saccade_right_guesses_total",
    ),
    Metric("saccade_requests_running", "gauge", "Running sequences"),
    Metric("saccade_requests_waiting", "gauge", "Sequences that wait for a slot or for KV pages"),
    Metric("saccade_kv_pages", "gauge", "KV pages by owner", ("owner",)),
    Metric(
        "saccade_kv_utilization", "gauge", "Fraction of KV pages used by running sequences, 0 to 1"
    ),
    Metric("saccade_kv_page_tokens", "gauge", "Tokens per KV page"),
    Metric(
        "saccade_cache_config_info",
        "gauge",
        "1, labelled with tokens per KV page and the number of pages, as vLLM exports them",
        ("block_size", "num_gpu_blocks"),
    ),
    Metric("saccade_kv_evictions_total", "counter", "KV pages evicted from the prefix cache"),
    Metric(
        "saccade_kv_tier_bytes",
        "gauge",
        "Bytes of KV pages and states in a tier",
        ("tier",),
        old_name="saccade_kv_kept_bytes",
    ),
    Metric(
        "saccade_kv_tier_budget_bytes",
        "gauge",
        "Maximum bytes of KV pages and states in a tier",
        ("tier",),
        old_name="saccade_kv_kept_budget_bytes",
    ),
    Metric(
        "saccade_kv_tier_entries",
        "gauge",
        "KV pages and states in a tier",
        ("tier",),
        old_name="saccade_kv_kept",
    ),
    Metric(
        "saccade_kv_tier_evictions_total",
        "counter",
        "KV pages evicted from a tier",
        ("tier",),
        old_name="saccade_kv_kept_evictions_total",
    ),
    Metric(
        "saccade_kv_tier_pages_total",
        "counter",
        "KV pages of a tier, by outcome: saved; not saved (disk full or too slow); read; or "
        "recomputed because they were damaged, missing, not read (I/O error), late, or slow (not "
        "started)",
        ("tier", "outcome"),
        old_name="saccade_kv_kept_total",
    ),
    Metric(
        "saccade_restored_tokens_total",
        "counter",
        "Prompt tokens loaded from a tier",
        ("tier",),
    ),
    Metric(
        "saccade_memory_released_bytes_total",
        "counter",
        "Bytes of cache released because the host or the cgroup was short of memory",
        ("what",),
        old_name="saccade_memory_given_back_bytes_total",
    ),
    Metric("saccade_snapshots", "gauge", "Recurrent states in the prefix cache"),
    Metric(
        "saccade_snapshot_evictions_total",
        "counter",
        "Recurrent states evicted from the prefix cache",
    ),
    Metric(
        "saccade_pinned",
        "gauge",
        "Size of pinned entries, in pages (kv) or bytes (embeddings, kv host, kv disk)",
        ("cache",),
    ),
    Metric(
        "saccade_pins",
        "gauge",
        "Pinned prompt prefixes and embeddings, counted once per client",
        ("cache",),
    ),
    Metric(
        "saccade_pins_evicted_total",
        "counter",
        "Pins evicted before they expired: the pin limit was reached, or no other entry could be "
        "evicted",
        ("cache",),
        old_name="saccade_pins_given_way_total",
    ),
    Metric(
        "saccade_engine_stalled",
        "gauge",
        "1 while the engine is alive and has work but makes no progress",
    ),
    # Requests as clients see them.
    Metric("saccade_requests_total", "counter", "Finished requests, by outcome", ("outcome",)),
    Metric(
        "saccade_http_responses_total",
        "counter",
        "HTTP responses, by status code and error code",
        ("code", "reason"),
    ),
    Metric(
        "saccade_build_info",
        "gauge",
        "Always 1. The labels are the version and the model",
        ("version", "model"),
    ),
    Metric("saccade_requests_in_flight", "gauge", "Requests in flight"),
    Metric(
        "saccade_request_bytes_buffered",
        "gauge",
        "Bytes of bodies and encoded images buffered for requests in flight",
        old_name="saccade_request_bytes_held",
    ),
    Metric(
        "saccade_stored_body_bytes",
        "gauge",
        "Bytes stored so that later bodies can reference them by hash",
        old_name="saccade_sent_bytes_held",
    ),
    Metric(
        "saccade_referenced_bytes_total",
        "counter",
        "Bytes that bodies referenced by hash instead of sending them",
        old_name="saccade_named_bytes_total",
    ),
    Metric(
        "saccade_traces_dropped_total",
        "counter",
        "Request traces that did not reach the collector (--otlp-traces-endpoint)",
    ),
    Metric(
        "saccade_stored_responses",
        "gauge",
        "Responses stored for previous_response_id",
        old_name="saccade_responses_kept",
    ),
    Metric(
        "saccade_stored_responses_bytes",
        "gauge",
        "Bytes of stored responses and conversations",
        old_name="saccade_responses_bytes",
    ),
    Metric("saccade_connections", "gauge", "Open HTTP connections"),
    Metric(
        "saccade_connections_closed_total",
        "counter",
        "HTTP connections closed by the server: over the connection limit (crowd), headers too "
        "slow (head), response not read (unread), rejected body still being sent (body)",
        ("reason",),
    ),
    Metric(
        "saccade_adapter_requests",
        "gauge",
        "Running and waiting requests with an adapter (LoRA), by its name",
        ("adapter", "state"),
    ),
    Metric("saccade_adapters_max", "gauge", "Maximum loaded adapters"),
    Metric("saccade_queue_seconds", "histogram", "Time from arrival to the start of prefill"),
    Metric("saccade_ttft_seconds", "histogram", "Time to first token"),
    Metric("saccade_itl_seconds", "histogram", "Time between tokens"),
    Metric("saccade_e2e_seconds", "histogram", "Time from arrival to the end of the response"),
)

_OF_ANY_SERVER = (
    "saccade_request_bytes_buffered",
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
        "saccade_route_in_flight",
        "gauge",
        "Requests in flight from this router to a worker",
        ("worker",),
    ),
    Metric(
        "saccade_route_ready", "gauge", "1 while a worker reports that it is ready", ("worker",)
    ),
    Metric(
        "saccade_route_retries_total",
        "counter",
        "Requests retried on another worker because the first failed before it responded",
    ),
    Metric(
        "saccade_route_broken_total", "counter", "Responses cut short because their worker exited"
    ),
    Metric(
        "saccade_route_rank_seconds",
        "histogram",
        "Time from the complete body to the choice of a worker",
    ),
)
"""The metrics that `saccade route` reports."""

Key = tuple[str, tuple[str, ...]]
"""The name of a metric, and the values of its labels in the declared order."""


class Histogram:
    """The number of observations per bucket of `SECONDS` (not cumulative), and their sum. The last
    bucket is +Inf.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value


class Metrics:
    """Stores the values of declared metrics.

    Methods raise KeyError for an undeclared name, a metric of another type, or wrong labels.
    """

    def __init__(self, declared: Sequence[Metric] = DECLARED) -> None:
        self._declared: dict[str, Metric] = {}
        self._values: dict[Key, float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._sent: dict[Key, float] = {}
        self.declare(declared)

    def declare(self, more: Iterable[Metric]) -> None:
        """Add metrics to the declared ones, such as those of a plugin."""
        for metric in more:
            self._declared[metric.name] = metric
            if metric.kind == "histogram":
                self._histograms[metric.name] = Histogram()
            elif not metric.labels:
                self._values[metric.name, ()] = 0.0

    def _key(self, name: str, labels: Mapping[str, str]) -> Key:
        metric = self._declared[name]
        return name, tuple(labels[label] for label in metric.labels)

    def inc(self, name: str, n: float = 1, **labels: str) -> None:
        key = self._key(name, labels)
        self._values[key] = self._values.get(key, 0.0) + n

    def set(self, name: str, value: float, **labels: str) -> None:
        self._values[self._key(name, labels)] = value

    def set_all(self, name: str, values: Mapping[str, float], **labels: str) -> None:
        """Set a gauge for each value of its first label. Label values missing in `values` are set
        to 0.

        labels: the values of all other labels.
        """
        label = self._declared[name].labels[0]
        _, (_, *rest) = self._key(name, {label: "", **labels})
        had = [key[0] for found, key in self._values if found == name and [*key[1:]] == rest]
        for each in dict.fromkeys((*had, *values)):
            self.set(name, values.get(each, 0.0), **{label: each}, **labels)

    def observe(self, name: str, seconds: float) -> None:
        self._histograms[name].observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        return self._values.get(self._key(name, labels), 0.0)

    def changed(self) -> tuple[tuple[str, tuple[str, ...], float], ...]:
        """Return (name, label values, value) of each counter and gauge that has changed since the
        last call.
        """
        values = self._values.items()
        news = tuple(
            (name, labels, value)
            for (name, labels), value in values
            if self._sent.get((name, labels), 0.0) != value
        )
        self._sent = dict(self._values)
        return news

    def absorb(self, news: Iterable[tuple[str, tuple[str, ...], float]]) -> None:
        """Store values that `changed` returned in another process."""
        for name, labels, value in news:
            self._values[name, labels] = value

    def snapshot(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        """Return the values of counters and gauges, by metric and then by label values.

        A renamed metric is listed under both names.
        """
        by_metric: dict[Metric, dict[tuple[str, ...], float]] = {
            m: {} for m in self._declared.values() if m.kind != "histogram"
        }
        for (name, labels), value in self._values.items():
            by_metric[self._declared[name]][labels] = value
        renamed = [(metric, values) for metric, values in by_metric.items() if metric.old_name]
        for metric, values in renamed:
            help_text = f"Deprecated: use {metric.name}"
            by_metric[replace(metric, name=metric.old_name, help=help_text, old_name="")] = values
        return by_metric

    def histograms(self) -> dict[Metric, Histogram]:
        return {self._declared[name]: histogram for name, histogram in self._histograms.items()}
