"""A simulated run beside the measured run that it replays.

Owns the comparison; counts must agree, times may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade_bench.lab.outcome import Outcome, Served
from saccade_bench.lab.trace import MeasuredTrace, RequestTrace


@dataclass(frozen=True, slots=True)
class RoundCheck:
    """One round of all chats.

    Cached tokens are sums, None where the server does not tell; TTFT in ms, means.
    """

    round: int
    calls: int
    cached_measured: int | None
    cached: int
    ttft_measured: float
    ttft: float

    @property
    def ttft_error(self) -> float:
        return self.ttft / self.ttft_measured - 1


@dataclass(frozen=True, slots=True)
class Check:
    """`wrong` of the `compared` calls have another number of cached tokens than was measured.
    `encoded`: pictures, measured and simulated, if the run has a trace.
    """

    compared: int
    wrong: int
    rounds: tuple[RoundCheck, ...]
    encoded: tuple[int, int] | None

    @property
    def exact(self) -> bool:
        return self.wrong == 0

    @property
    def ttft_error(self) -> float:
        """Of the mean over all calls."""
        measured = sum(line.ttft_measured * line.calls for line in self.rounds)
        return sum(line.ttft * line.calls for line in self.rounds) / measured - 1

    @property
    def rounds_error(self) -> float:
        return sum(abs(line.ttft_error) for line in self.rounds) / len(self.rounds)


def compare(trace: RequestTrace, outcome: Outcome) -> Check:
    """The comparison of `outcome`, of level "steps", with a measured trace."""
    pairs = [
        (served, measured)
        for served in outcome.served
        if (measured := trace.call(served.session, served.round).measured)
    ]
    told = [(served, measured) for served, measured in pairs if measured.cached_tokens is not None]
    numbers = sorted({served.round for served, _ in pairs})
    encoded = [measured.encoded for _, measured in pairs if measured.encoded is not None]
    return Check(
        compared=len(told),
        wrong=sum(served.cached_tokens != measured.cached_tokens for served, measured in told),
        rounds=tuple(
            _round(number, [pair for pair in pairs if pair[0].round == number])
            for number in numbers
        ),
        encoded=(sum(encoded), outcome.counts.images_encoded) if encoded else None,
    )


def _round(number: int, pairs: list[tuple[Served, MeasuredTrace]]) -> RoundCheck:
    cached = [measured.cached_tokens for _, measured in pairs if measured.cached_tokens is not None]
    return RoundCheck(
        round=number + 1,
        calls=len(pairs),
        cached_measured=sum(cached) if len(cached) == len(pairs) else None,
        cached=sum(served.cached_tokens for served, _ in pairs),
        ttft_measured=sum(measured.ttft for _, measured in pairs) / len(pairs),
        ttft=sum(served.ttft for served, _ in pairs) / len(pairs),
    )
