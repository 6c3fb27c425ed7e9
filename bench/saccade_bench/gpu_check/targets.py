"""References for figures, scaled from one GPU to another, and advice for figures that are far off.

Metrics are matched by `fnmatch`. Floors and targets are for an H200. For a machine with another
measured bandwidth or matrix product speed, they are scaled in proportion. Results published by
others are only shown for the same GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of a GPU.

    name: part of the GPU's name.
    copy: bytes per second, read and written together.
    products: operations per second of large bf16 matrix products.
    """

    name: str
    copy: float
    products: float


H100 = Speeds("H100", 3.0e12, 7.98e14)
H200 = Speeds("H200", 4.3e12, 7.90e14)
GPUS = (H100, H200)
"""GPUs with targets, and their measured speeds, which are used until a machine is measured. The
last one is used for a machine without a GPU.
"""
COPY, PRODUCTS = "copy", "products of bf16"
"""The metrics of these speeds, in GB/s and TFLOP/s."""
FAR = 0.7
"""A figure is far off if its fraction of the floor (or else of the target) is lower."""


@dataclass(frozen=True, slots=True)
class Target:
    """References for a metric, in its unit. None: unknown.

    floor, target: the hardware's bound and our aim on an H200.
    bound: the speed with which they scale.
    anchors: results published for SGLang or vLLM with this model, by GPU.
    """

    metric: str
    target: float | None
    floor: float | None = None
    bound: Literal["copy", "products"] | None = None
    anchors: Mapping[str, float] = field(default_factory=dict)

    def on(self, speeds: Speeds, *, more: bool) -> Target:
        """Scale the target to a GPU's speeds. `more`: higher values of the metric are better."""
        if self.bound is None:
            return self
        by_copy = self.bound == "copy"
        ratio = speeds.copy / H200.copy if by_copy else speeds.products / H200.products
        factor = ratio if more else 1 / ratio
        target, floor = (
            None if each is None else each * factor for each in (self.target, self.floor)
        )
        return replace(self, target=target, floor=floor)


@dataclass(frozen=True, slots=True)
class Rule:
    """`advice` for metrics whose fraction of the floor (or else of the target) is below `below`."""

    metric: str
    advice: str
    below: float = FAR


TARGETS = (
    Target("decode, qwen3-vl-8b, batch 1", 253, 281, "copy"),
    Target("decode, qwen3-vl-8b, batch 64", 9990, 11_100, "copy"),
    Target("decode, qwen3-vl-8b, batch 256", 16_000, 17_800, "copy"),
    # includes attention: 158 ms of matrix products and 27 of attention at 722 TFLOP/s
    Target("prefill, qwen3-vl-8b, chunks of 8192", 43_600, 48_500, "products"),
    # SGLang's result in its issue 22038; vLLM's is 532
    Target("tower, qwen3-vl-8b, 720p, best", 11, None, "products", {"H200": 17}),
    Target("tower, qwen3-vl-8b, 1080p, best", 34, None, "products", {"H200": 39}),
    Target("tower, qwen3-vl-8b, 1440p, best", 85, None, "products", {"H200": 88}),
    Target("chat at 720p, TTFT of round 1", None, anchors={"H200": 108}),
    Target("chat at 1080p, TTFT of round 1", None, anchors={"H200": 244}),
    Target("chat at 1440p, TTFT of round 1", None, anchors={"H200": 532}),
    Target("chat at 720p, TTFT of round 8", 90, None, "products", {"H200": 516}),
    Target("chat at 1080p, TTFT of round 8", 220, None, "products", {"H200": 1223}),
    Target("chat at 1440p, TTFT of round 8", 350, 310, "products", {"H200": 2172}),
    Target("ITL P99 beside images, in decode steps", 2),
)

RULES = (
    Rule(
        "decode, *, batch 1",
        "Read `profile` at batch 1: gaps mean that no graph is replayed (count "
        "saccade_graph_replays_total) or that the host is late; busy means products of one row: "
        "try F.linear with the weight transposed, or a GEMV in Triton.",
    ),
    Rule(
        "decode, *, batch 64",
        "Read `profile` at batch 64: if `_decode` leads, look at `paged decode` figures (splits); "
        "if argmax or the head does, draw in the graph; if gaps, host work between steps.",
    ),
    Rule(
        "decode, *, batch 256",
        "At 256 rows the host's share is largest: compare step time with `profile`'s busy time; "
        "beyond it, plan and apply are on the critical path.",
    ),
    Rule(
        "prefill, *",
        "Compare `paged prefill` TFLOP/s (tiles) with its floor, and the rest with products: "
        "16-bit ones allow ~39,000 tok/s at 600 TFLOP/s.",
    ),
    Rule(
        "tower, *",
        "Attention is up to 80 % of a large image: take the fastest way of `tower attention` as "
        "--tune mm_attention_backend, and put it into TOWER_ATTENTION in plugins/gpu/backend.py "
        "with this table as its source.",
    ),
    Rule(
        "chat at *, TTFT of round *",
        "Add up ViT of one image, prefill of its tokens over the context (`paged prefill, 3650 "
        "over 25k`), and intake (chat-*.jsonl has the stages of each request): the largest first.",
    ),
    Rule(
        "ITL P99 beside images*",
        "Answers wait for the tower or for its launches: give decode's stream a higher priority, "
        "lower --tune max_encode_patches, look for synchronising copies of a new grid.",
        below=1.0,
    ),
    Rule(
        "paged decode, *",
        "Compare pieces in the same table: if another size is faster, change MIN_PIECE in "
        "plugins/gpu/triton/paged_decode.py; if none is, try DECODE tiles of 32 or 128 keys, or 3 "
        "PROGRAMS a multiprocessor.",
    ),
    Rule(
        "paged prefill, *",
        "Compare tiles in the same table and change PREFILL; below 400 TFLOP/s with all of them, "
        "try 4 warps per 64 rows, or keys and values loaded by descriptors (TMA).",
        below=0.55,
    ),
    Rule(
        "tower attention, *, best",
        "If a library leads, choose it inside graphs; if Triton's best tile leads, make it TILE "
        "in plugins/gpu/triton/segments.py.",
        below=0.6,
    ),
    Rule(
        "profile, *, share of the step in which the GPU computes",
        "Gaps between kernels: look at the list in profile.md for what stands before them; a "
        "graph has none, so some step runs without.",
        below=0.9,
    ),
)


def target_of(metric: str, speeds: Speeds, *, more: bool) -> Target | None:
    found = next((each for each in TARGETS if fnmatchcase(metric, each.metric)), None)
    return found and found.on(speeds, more=more)


def speeds_of(gpu: str, copy: float | None = None, products: float | None = None) -> Speeds | None:
    """Return the measured or default speeds of a GPU by its name. None if it has no targets."""
    known = next((each for each in GPUS if each.name in gpu), None)
    return known and replace(known, copy=copy or known.copy, products=products or known.products)


def advice_of(metric: str, share: float) -> str:
    """Return advice for a metric, or "" if its ratio is good enough or there is none."""
    rule = next((each for each in RULES if fnmatchcase(metric, each.metric)), None)
    return rule.advice if rule and share < rule.below else ""
