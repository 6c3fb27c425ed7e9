"""How an answer ends, and what the front hears of it. Owns nothing."""

from __future__ import annotations

from saccade.core.types import Delta, FinishReason, TokenLogprobs
from saccade.sched.sequence import Sequence


def end_reason(
    sequence: Sequence, token: int, eos: frozenset[int], token_limit: int
) -> FinishReason | None:
    """Why the answer ends with `token`, its newest, if it does.

    The token that ends it does not count towards `min_tokens`.
    """
    sampling = sequence.request.sampling
    ends = token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)
    if ends and sequence.output_length > sampling.min_tokens:
        return "stop"
    if sequence.output_length >= sampling.max_tokens or len(sequence.tokens) >= token_limit:
        return "length"
    return None


def report(
    sequence: Sequence,
    reason: FinishReason | None,
    error: str | None = None,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    code: str | None = None,
) -> Delta:
    """News of a sequence. Its first tells what was found where."""
    cached, images = (0, ()) if sequence.reported else (sequence.cached or 0, sequence.outcomes())
    sequence.reported = True
    return Delta(sequence.request.id, tokens, logprobs, reason, error, cached, images, code=code)
