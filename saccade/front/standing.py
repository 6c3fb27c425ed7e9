"""Progress of answers, for people who look at a server. Knows nothing of content."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InFlight:
    """An answer in flight. `seconds`: since its request arrived. `generated`: tokens so far."""

    seconds: float
    prompt_tokens: int
    images: int
    generated: int
