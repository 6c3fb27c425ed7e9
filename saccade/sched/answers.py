"""Functions that decide when and why generation ends, build the deltas sent to the front end, and
reject requests that can never run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.core.token_rules import NO_RULES
from saccade.core.types import NO_PENALTIES, Delta, FinishReason, Request, TokenLogprobs
from saccade.sched.limits import SchedulerLimits
from saccade.sched.sequence import Sequence

if TYPE_CHECKING:
    from saccade.sched.grammar_state import GrammarState


def end_reason(
    sequence: Sequence, token: int, eos: frozenset[int], token_limit: int
) -> FinishReason | None:
    """Return why generation ends with the newest `token`, or None if it continues.

    A stop token ends generation only if at least `min_tokens` tokens were generated before it.
    """
    sampling = sequence.request.sampling
    ends = token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)
    if ends and not sampling.tokens_due(sequence.output_length - 1):
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
    """Advance the grammar after the newest token. Return why generation ends now, or None.

    If the request allows it (`jumps`), the tokens that the grammar forces are appended to the
    sequence. Raises InvalidRequest if the grammar has become too complex.

    reason: why generation ends with the newest token according to `end_reason`, or None.
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
    """Append the forced tokens. Return why generation ends at one of them, or None."""
    forced = grammar_state.jump(planned=drawing > 0)
    for token in forced[:-1]:
        sequence.tokens.append(token)
        if (reason := end_reason(sequence, token, eos, token_limit)) is not None:
            return reason
    if not forced:
        return None
    sequence.tokens.append(forced[-1])
    if sequence.run is not None:  # a plan in flight may sample the first of them, known by now
        sequence.run.drawing -= drawing
    return "stop" if grammar_state.must_end else end_reason(sequence, forced[-1], eos, token_limit)


def jumps(request: Request) -> bool:
    """Return True if forced tokens may be appended without sampling them.

    This is False for a request with prompt logprobs. If its whole output were forced, its prompt
    would never be computed.
    """
    if request.prompt_logprobs is not None or request.rules != NO_RULES:
        return False
    sampling = request.sampling
    return sampling.logprobs is None and sampling.penalties == NO_PENALTIES


def report(
    sequence: Sequence,
    reason: FinishReason | None,
    error: str | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
    code: str | None = None,
) -> Delta:
    """Return a delta with the sequence's new tokens, and mark them as reported.

    The first delta also reports which parts of the prompt, and which images, were cached.
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


def refusal(
    request: Request, limits: SchedulerLimits, token_limit: int, images_fit: bool
) -> str | None:
    """Return an error message if a request can never run, else None.

    token_limit: maximum tokens in one sequence.
    images_fit: True if each image fits in the pixel arena.
    """
    length = len(request.tokens)
    if length == 0:
        return "the prompt has no tokens"
    answer = int(request.reading is None)
    if length + answer > token_limit:
        what = "the context length" if token_limit == limits.context_length else "the KV cache"
        kept = ", of which one is for the answer" if answer else ""
        return (
            f"the prompt has {length} tokens; {what} allows {token_limit}{kept}: shorten the prompt"
        )
    if not images_fit:
        return (
            f"an image is larger than the pixel arena of {limits.arena_bytes} bytes: send a "
            "smaller one, or start the server with a larger --tune arena_mb=MIB"
        )
    return None
