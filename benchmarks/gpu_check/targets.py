"""What a figure is held against on an H200, and what to try where it is far off: data only.

A metric's name is matched by `fnmatch`. Floors that depend on the machine come with the figure;
those here are what bytes and operations allow on an H200 (4.3 TB/s of copy, 600 TFLOP/s of bf16).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

GPU = "H200"
"""Targets hold for a GPU whose name has this in it."""
COPY_BYTES_PER_S = 4.3e12
"""Of an H200, read and written together; a stage measures its own where it can."""
PRODUCT_FLOPS = 6e14
"""Of products in bf16 on an H200, as large ones reach them."""
FAR = 0.7
"""A figure that has less of its floor (or, where there is none, of its target) is far from it."""


@dataclass(frozen=True, slots=True)
class Target:
    """`floor`: what the hardware allows. `anchor`: what others have published, and `source` where.
    `target`: what we want. All in the metric's unit; None: nobody knows.
    """

    metric: str
    target: float | None
    floor: float | None = None
    anchor: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """`advice` for metrics whose share of the floor (or of the target) is below `below`."""

    metric: str
    advice: str
    below: float = FAR


PUBLISHED_7B = "published for a 7B"
ESTIMATE = "estimate for vLLM"
SGLANG = "SGLang, published"

TARGETS = (
    Target("decode, qwen3-vl-8b, batch 1", 220, 281, 210, ESTIMATE),
    Target("decode, qwen3-vl-8b, batch 64", 9000, 11_200, 8000, ESTIMATE),
    Target("decode, qwen3-vl-8b, batch 256", 13_000, None, 12_450, PUBLISHED_7B),
    Target("prefill, qwen3-vl-8b, chunks of 8192", 42_000, 55_000, 42_000, ESTIMATE),
    Target("tower, qwen3-vl-8b, 720p, best", 11, None, 17, SGLANG),
    Target("tower, qwen3-vl-8b, 1080p, best", 34, None, 39, SGLANG),
    Target("tower, qwen3-vl-8b, 1440p, best", 85, None, 88, SGLANG),
    Target("chat at 1440p, TTFT of round 8", 350, 310, 2172, SGLANG),
    Target("ITL P99 beside images, in decode steps", 2),
)

RULES = (
    Rule(
        "decode, *, batch 1",
        "Read `profile` at batch 1: gaps mean that no graph is replayed (count "
        "saccade_graph_replays_total) or that the host is late; busy means products of one row: "
        "compare `product` figures, try F.linear with the weight transposed, or a GEMV in Triton.",
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
        "Compare `paged prefill` TFLOP/s (tiles) and products at 8192 rows: whichever is further "
        "from 600 TFLOP/s is the next step. 16-bit products alone allow ~39,000 tok/s at 600.",
    ),
    Rule(
        "tower, *",
        "Attention is up to 80 % of a large image: take the fastest way of `tower attention` as "
        "--mm-attention-backend, and put it into TOWER_ATTENTION in engine/sizing.py with this "
        "table as its source.",
    ),
    Rule(
        "chat at *, TTFT of round *",
        "Add up ViT of one image, prefill of its tokens over the context (`paged prefill, 3650 "
        "over 25k`), and intake (chat-*.jsonl has the stages of each request): the largest first.",
    ),
    Rule(
        "ITL P99 beside images*",
        "Answers wait for the tower or for its launches: give decode's stream a higher priority, "
        "lower --max-encode-patches, look for synchronising copies of a new grid.",
        below=1.0,
    ),
    Rule(
        "paged decode, *",
        "Compare pieces in the same table: if another size is faster, change LEAST_PIECE in "
        "kernels/paged_decode_gpu.py; if none is, try DECODE tiles of 32 or 128 keys, or 3 "
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
        "in kernels/segments_gpu.py.",
        below=0.6,
    ),
    Rule(
        "sampler, greedy *",
        "One program per row leaves most of the GPU idle at few rows: split a row among programs "
        "and merge, as paged decode does.",
        below=0.3,
    ),
    Rule(
        "sampler, *",
        "Each bisection reads the row again from L2: count passes; keep a row's candidates in "
        "shared memory after the first one, or split a row among programs.",
        below=0.05,
    ),
    Rule(
        "pass, *",
        "Far from a copy: look at bytes per access and occupancy with `python -m lab.aot`; one "
        "token per program is small at few columns, try two.",
    ),
    Rule(
        "product, *, 1 rows*",
        "Few rows are the weights' way through memory: split the inputs among programs where "
        "outputs alone do not fill 132 multiprocessors (kernels/fp8_gpu.py).",
    ),
    Rule(
        "product, *",
        "Beside `scaled_mm` and cuBLAS in the same table: where either is faster, dispatch by "
        "row count at load.",
        below=0.6,
    ),
    Rule(
        "profile, *, share of the step in which the GPU computes",
        "Gaps between kernels: look at the list in profile.md for what stands before them; a "
        "graph has none, so some step runs without.",
        below=0.9,
    ),
)


def target_of(metric: str) -> Target | None:
    return next((each for each in TARGETS if each.metric == metric), None)


def advice_of(metric: str, share: float) -> str:
    """What to try; nothing where the share is good enough, or nobody has an idea."""
    rule = next((each for each in RULES if fnmatchcase(metric, each.metric)), None)
    return rule.advice if rule and share < rule.below else ""
