"""An answer's steps and its end, and what the front hears about it. Owns nothing."""

from __future__ import annotations

from saccade.core.token_rules import NO_RULES
from saccade.core.types import Delta, FinishReason, Request, TokenLogprobs
from saccade.sched.grammar_state import GrammarState
from saccade.sched.sequence import Sequence


def end_reason(
    sequence: Sequence, token: int, eos: frozenset[int], token_limit: int
) -> FinishReason | None:
    """Return why the answer ends with its newest `token`, or None.

    `min_tokens` counts the tokens before the ending one.
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
    grammar_state: GrammarState,
    reason: FinishReason | None,
    eos: frozenset[int],
    token_limit: int,
) -> FinishReason | None:
    """Advance the grammar by the newest token, which ends the answer for `reason` unless None.

    If the request asks for tokens alone, forced tokens join the sequence, yet to be reported.
    Returns the reason if the answer ends with them.

    Raises InvalidRequest if the grammar has become too complex.
    """
    run = sequence.run
    drawing = run.drawing if run else 0
    if grammar_state.must_end:
        return "stop"
    if reason is not None:
        return reason
    if not jumps(sequence.request):
        grammar_state.step()
    else:
        reason = _jump(sequence, grammar_state, drawing, eos, token_limit)
        drawing = run.drawing if run else 0
    if reason is None:
        grammar_state.go_on(planned=drawing > 0)
    return reason


def _jump(
    sequence: Sequence,
    grammar_state: GrammarState,
    drawing: int,
    eos: frozenset[int],
    token_limit: int,
) -> FinishReason | None:
    """Take the forced tokens. Returns the reason if the answer ends within or after them."""
    forced = grammar_state.jump(planned=drawing > 0)
    for token in forced[:-1]:
        sequence.tokens.append(token)
        if (reason := end_reason(sequence, token, eos, token_limit)) is not None:
            return reason
    if not forced:
        return None
    sequence.tokens.append(forced[-1])
    if sequence.run is not None:  # a plan in flight draws the first of them
        sequence.run.drawing -= drawing
    return "stop" if grammar_state.must_end else end_reason(sequence, forced[-1], eos, token_limit)


def jumps(request: Request) -> bool:
    """Return True if tokens may be taken without a sampling row.

    A wholly forced answer would leave a prompt uncomputed that is to be scored.
    """
    if request.prompt_logprobs is not None or request.rules != NO_RULES:
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
    """Report a sequence's new tokens to the front.

    The first delta says where images and prompt tokens were found.
    """
    id, tokens, account = sequence.request.id, sequence.unreported, sequence.account
    draft_counts = account.draft_counts
    first, sequence.reported = sequence.reported is None, sequence.output_length
    if not first:
        return Delta(id, tokens, logprobs, reason, error, code=code, draft_counts=draft_counts)
    cached, images, caching = account.cached or 0, sequence.outcomes(), account.caching
    common = (id, tokens, logprobs, reason, error, cached, images, code, caching)
    return Delta(
        *common, admitted=account.admitted, restored=account.restored, draft_counts=draft_counts
    )
