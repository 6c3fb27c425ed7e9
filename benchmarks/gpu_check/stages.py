"""The stages of a check, the most valuable first: data only.

Each is a process of its own, `python -m benchmarks.gpu_check.MODULE`, that writes its figures as
it finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_check.machine import COMMON, ENGINE, SERVER, TESTS


@dataclass(frozen=True, slots=True)
class Stage:
    """`least`: seconds without which it would say nothing. `limit`: it may take so many at most.
    `options`: of its process, beside those that all have.
    """

    name: str
    module: str
    about: str
    needs: tuple[str, ...]
    least: float
    limit: float
    options: tuple[str, ...] = ()


STAGES = (
    Stage(
        "correctness",
        "correctness",
        "kernels beside their references, the engine by every path",
        TESTS,
        20,
        170,
    ),
    Stage("speed", "speed", "decode and prefill through the engine", ENGINE, 30, 130),
    Stage("tower", "tower", "the vision tower by size and attention", COMMON, 15, 50),
    Stage("serving", "serving", "chats, streams beside images, probe, over HTTP", SERVER, 45, 150),
    Stage("attention", "attention", "bake-off of attention", COMMON, 15, 90),
    Stage("profile", "profile_step", "one decode step, kernel by kernel", ENGINE, 20, 60),
    Stage("products", "products", "bake-off of products, 8 and 16 bits", COMMON, 10, 30),
    Stage("products-int4", "products_int4", "bake-off of products, 4 bits", COMMON, 10, 30),
    Stage("experts", "experts", "bake-off of a layer's experts", COMMON, 10, 30),
    Stage("passes", "passes", "bake-off of what memory bounds; the sampler", COMMON, 10, 30),
    Stage(
        "speed-fp8",
        "speed",
        "decode and prefill with FP8 weights",
        ENGINE,
        30,
        60,
        ("--fp8", "--preset", "qwen3-vl-4b"),
    ),
)
"""In this order. The limits add up to more than the budget: few stages reach theirs."""
