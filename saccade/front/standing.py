"""How far an answer is, for people who look at a server. Knows nothing of what is said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InFlight:
    """An answer that is on its way. `seconds`: since its request arrived. `generated`: tokens of it
    so far.
    """

    seconds: float
    prompt_tokens: int
    images: int
    generated: int
