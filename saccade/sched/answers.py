"""How an answer goes on and ends, and what the front hears of it. Owns nothing."""

from __future__ import annotations

from saccade.core.types import Delta, FinishReason, Request, TokenLogprobs
from saccade.sched.grammar_state import GrammarState
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


def follow(
    sequence: Sequence,
    guide: GrammarState,
    reason: FinishReason | None,
    eos: frozenset[int],
    token_limit: int,
) -> FinishReason | None:
    """Go on in the grammar after the newest token, which ends the answer for `reason` unless that
    is None; tokens that must follow join the sequence, untold, where nothing but the tokens is
    asked for. Why the answer ends with them, if it does.

    Raises InvalidRequest when the grammar has become too complex to follow.
    """
    run = sequence.run
    drawing = run.drawing if run else 0
    if guide.must_end:
        return "stop"
    if reason is not None:
        return reason
    if not jumps(sequence.request):
        guide.step()
    else:
        reason = _jump(sequence, guide, drawing, eos, token_limit)
        drawing = run.drawing if run else 0
    if reason is None:
        guide.go_on(planned=drawing > 0)
    return reason


def _jump(
    sequence: Sequence, guide: GrammarState, drawing: int, eos: frozenset[int], token_limit: int
) -> FinishReason | None:
    """Take the tokens that must follow; why the answer ends within them, or after."""
    forced = guide.jump(planned=drawing > 0)
    for token in forced[:-1]:
        sequence.tokens.append(token)
        if (reason := end_reason(sequence, token, eos, token_limit)) is not None:
            return reason
    if not forced:
        return None
    sequence.tokens.append(forced[-1])
    if sequence.run is not None:  # a plan in flight draws the first of them
        sequence.run.skips += drawing
        sequence.run.drawing -= drawing
    return "stop" if guide.must_end else end_reason(sequence, forced[-1], eos, token_limit)


def jumps(request: Request) -> bool:
    """Whether tokens may be taken without a row that draws them. An answer that is forced whole
    would leave a prompt uncomputed that is to be scored.
    """
    if request.prompt_logprobs is not None:
        return False
    sampling = request.sampling
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    return sampling.logprobs is None and sampling.repetition_penalty == 1.0 and not any(penalties)


def report(
    sequence: Sequence,
    reason: FinishReason | None,
    error: str | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
    code: str | None = None,
) -> Delta:
    """News of a sequence: the tokens that have not been told. The first tells what was found
    where.
    """
    id, tokens = sequence.request.id, sequence.untold
    first, sequence.told = sequence.told is None, sequence.output_length
    if not first:
        return Delta(id, tokens, logprobs, reason, error, code=code)
    cached, images = sequence.cached or 0, sequence.outcomes()
    caching = sequence.account.report(sequence.request.caching)
    admitted = sequence.account.admitted
    told = (id, tokens, logprobs, reason, error, cached, images, code, caching)
    return Delta(*told, admitted=admitted)
