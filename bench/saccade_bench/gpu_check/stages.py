"""The stages of a check, and the three commands that run them.

Each stage is a separate process, `python -m saccade_bench.gpu_check.MODULE`, that writes its
figures as it measures them. A machine is available for 1,800 seconds in total, including startup,
transfers and idle time, so the most valuable stages come first.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade_bench.gpu_check.machine import COMMON, ENGINE, SERVER, TESTS

STARTING_SECONDS = 8.0
"""Time to unpack wheels and to prepare the first stage."""
END_SECONDS = 3.0
"""How long a stage has to exit before its session is killed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage. `least` is the minimum time in seconds for useful results, and `limit` the maximum.
    `options` are additional arguments of its process.
    """

    name: str
    module: str
    about: str
    needs: tuple[str, ...]
    least: float
    limit: float
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """Stages that are sent to the machine together. It stops them after `seconds`."""

    name: str
    stages: tuple[Stage, ...]
    seconds: float

    @property
    def budget(self) -> float:
        """Seconds for the stages and the work between them."""
        return self.seconds - 10.0


FACTS = Stage("facts", "facts", "what the machine is", (), 0, 20)
CORRECTNESS = Stage(
    "correctness", "correctness", "kernels and the engine beside their references", TESTS, 20, 190
)
AGAIN = Stage("again", "correctness", "the tests that failed", TESTS, 10, 140)
UNPACED = ("--unpaced",)
FP8 = ("--fp8", "--preset", "qwen3-vl-4b")

A = Command(
    "a",
    (
        FACTS,
        CORRECTNESS,
        Stage("speeds", "speeds", "how fast the machine moves bytes and multiplies", COMMON, 5, 25),
        Stage("speed", "speed", "decode and prefill through the engine", ENGINE, 30, 80),
        Stage("tower", "tower", "the vision tower by size and attention", COMMON, 15, 35),
        Stage("profile", "profile_step", "steps kernel by kernel", ENGINE, 15, 75),
        Stage("attention", "attention", "bake-off of attention", COMMON, 15, 60),
        Stage("speed-fp8", "speed", "decode and prefill with FP8 weights", ENGINE, 25, 52, FP8),
    ),
    590.0,
)
B = Command(
    "b",
    (
        Stage("serving", "serving", "chats, streams, requests at once, probe", SERVER, 45, 330),
        Stage("serving-cold", "serving", "a chat without caches", SERVER, 30, 100, ("--cold",)),
        Stage(
            "published", "published", "published commands, mechanisms on and off", SERVER, 40, 130
        ),
    ),
    590.0,
)
C = Command(
    "c",
    (
        Stage("ranks", "ranks", "a model on two GPUs", SERVER, 30, 60),
        Stage("serving-unpaced", "serving", "streams beside whole chunks", SERVER, 30, 80, UNPACED),
        Stage("serving-fp8", "serving", "a server with FP8 weights", SERVER, 35, 75, FP8),
        Stage("peer", "peer", "transformers on the same card", TESTS, 20, 50),
        Stage("counters", "counters", "ncu on the slowest kernels", COMMON, 10, 50),
    ),
    350.0,
)
"""Tests that failed in the first command run before these. The last stages may then be skipped."""
COMMANDS = {each.name: each for each in (A, B, C)}
STAGES = (*A.stages, *B.stages, *C.stages)
"""All stages."""


def most_seconds(stages: tuple[Stage, ...]) -> float:
    """Return the maximum duration of stages, if each reaches its limit and must be killed."""
    return STARTING_SECONDS + sum(stage.limit + END_SECONDS for stage in stages)
