"""Draft tokens within steps: their rows, their masks, and which were accepted.

Owns each run's draft tokens, and the lines of the workers' state memory for the states between
them. `drafter.py` makes them. A draft token is accepted if the row before it counts and has drawn
it. A run with draft tokens in flight waits for their result.

A row and the draft tokens behind it make one state each. The last state is left in the slot, and
each of the others is kept in a line. Once the tokens are drawn, the run resumes from the state
after the last accepted token. Its next plan copies that line to the slot, before any row. Plans are
carried out in order, so a line is free once the plan that reads it is made, or once it is unneeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from weakref import WeakKeyDictionary

from saccade.core.metrics import Metrics
from saccade.core.plan import NO_LINE, Row, StateCopy, StepResult
from saccade.core.types import DraftCounts, FinishReason
from saccade.plugins.drafts.drafter import Drafter, Speculation
from saccade.sched.answers import jumps
from saccade.sched.builder import InFlightPlan, PlanBuilder, PlannedOutcome
from saccade.sched.parts.step_part import PartContext, StepPart
from saccade.sched.sequence import Run, Sequence


class SpeculativeDecoding(StepPart):
    """Draft tokens for all sequences."""

    def __init__(self, context: PartContext) -> None:
        limits = context.limits
        self.drafter = Drafter(limits.drafts.tokens, head=limits.drafts.head)
        self._runs: WeakKeyDictionary[Run, Speculation] = WeakKeyDictionary()
        self._pool = context.pool
        self._max_running = limits.max_running
        self._token_limit = context.token_limit
        self._lines = limits.drafts.states
        self._free = list(self._lines or ())

    # ---- plan

    def admitted(self, sequence: Sequence, run: Run, builder: PlanBuilder) -> None:  # noqa: ARG002
        """Begin without draft tokens."""
        self._runs[run] = Speculation()

    def limit_steps(self, run: Run, most: int) -> int:  # noqa: ARG002
        """Return 1: guesses look at each token before the next."""
        return 1

    def decode(
        self, sequence: Sequence, run: Run, builder: PlanBuilder, parts: Iterable[StepPart]
    ) -> Row:
        """Plan the newest token's row, and a row for each draft token behind it."""
        speculation, width = self._runs[run], builder.width
        draft_tokens = self._propose(sequence, run, speculation, width, parts)
        self._resume(run, speculation, builder)
        if self._lines is not None:
            speculation.lines = [self._free.pop() for _ in draft_tokens]
        asked = self.drafter.count_for_head(sequence, speculation, width)
        newest = (sequence.tokens[run.planned],) if speculation.sends_newest else ()
        keep = chain(speculation.lines, repeat(NO_LINE))
        row = builder.decode(sequence, run, newest, keep=next(keep), head_drafts=asked)
        for draft_token, line in zip(draft_tokens, keep):
            builder.decode(sequence, run, (draft_token,), draft=True, keep=line)
        speculation.sends_newest, speculation.draft_tokens = False, draft_tokens
        run.waits = bool(draft_tokens or asked)
        return row

    def _propose(
        self,
        sequence: Sequence,
        run: Run,
        speculation: Speculation,
        width: int,
        parts: Iterable[StepPart],
    ) -> list[int]:
        """Return as many draft tokens as fit the pages, the answer, the workers' rows and states,
        and the other parts.

        Only free pages are taken for draft tokens.
        """
        after, size = run.planned + 1, self._pool.page_size
        most = sequence.prompt_length + sequence.request.sampling.max_tokens
        budget = min(most, self._token_limit) - sequence.length - 1
        budget = min(budget, self._max_running - width)
        if self._lines is not None:
            budget = min(budget, len(self._free) + len(speculation.lines))
        for part in parts:
            budget = part.limit_drafts(run, budget)
        pages = len(run.pages) + self._pool.free
        draft_tokens = self.drafter.propose(
            sequence, speculation, min(budget, pages * size - after), width
        )
        missing = self._pool.pages_for(after + len(draft_tokens)) - len(run.pages)
        if missing > 0:
            run.pages += self._pool.allocate(missing, run.pages[-1])
        return draft_tokens

    def planned(self, run: Run, row: Row, builder: PlanBuilder) -> None:  # noqa: ARG002
        """Have a chunk resume from the state after the last accepted token."""
        if not run.waits:
            self._resume(run, self._runs[run], builder)

    def _resume(self, run: Run, speculation: Speculation, builder: PlanBuilder) -> None:
        builder.restore += [StateCopy(line, run.slot) for line in speculation.lines]
        self._release(speculation)

    def _release(self, speculation: Speculation) -> None:
        self._free += speculation.lines
        speculation.lines = []

    def mask(self, sequence: Sequence, run: Run, row: Row) -> bytes | None:
        """Return the mask of a row with draft tokens behind it, or of one of these.

        They are asked for in order. Returns None for a run without draft tokens. Raises
        InvalidRequest if the grammar has become too complex.
        """
        speculation = self._runs[run]
        if not speculation.draft_tokens:
            return None
        if not row.draft:
            speculation.masks = self._masks(sequence, speculation, row)
        return speculation.masks.pop(0)

    def _masks(self, sequence: Sequence, speculation: Speculation, row: Row) -> list[bytes]:
        grammar_state, draft_tokens = sequence.grammar_state, speculation.draft_tokens
        assert grammar_state is not None
        masks = [grammar_state.mask()]
        known = sequence.tokens[row.start + row.length :]  # forced: what the row draws, and more
        if not known:
            masks += grammar_state.ahead(draft_tokens, jumps(sequence.request))
        elif draft_tokens[:1] == known:  # if there are more, the next plan has them
            masks += [
                grammar_state.mask(),
                *grammar_state.ahead(draft_tokens[1:], jumps(sequence.request)),
            ]
        speculation.foreseen = len(masks) - 1
        return masks + [grammar_state.anything] * (len(draft_tokens) + 1 - len(masks))

    # ---- apply

    def outcomes(
        self, flight: InFlightPlan, result: StepResult, outcomes: Iterable[PlannedOutcome]
    ) -> Iterator[PlannedOutcome]:
        """Yield the outcomes, except those of draft tokens that are wrong or come too late.

        Afterwards runs continue behind their last accepted token, with the draft tokens found by
        the MTP head.
        """
        self.drafter.costs.ended(flight.plan, flight.planned)
        if not any(row.draft or row.head_drafts for row in flight.plan.rows):
            yield from outcomes
            return
        found = tuple(outcomes)
        right = self._right(found)
        left = dict(right)
        for each in found:
            sequence, run = each.sequence, each.run
            if each.row.draft:
                if not left[run] or sequence.run is not run:
                    continue
                left[run] -= 1
                self._tell(sequence, run, right=1)
            elif run in left:
                self._tell(sequence, run, wrong=len(self._runs[run].draft_tokens) - left[run])
            yield each
        heard = iter(result.head_drafts)
        for each in found:
            if each.row.head_drafts:
                speculation = self._runs[each.run]
                speculation.head, each.run.waits = next(heard), bool(speculation.draft_tokens)
        for run, sequence in {each.run: each.sequence for each in found}.items():
            if run in right:
                self._settle(sequence, run, right[run])

    def _right(self, outcomes: Iterable[PlannedOutcome]) -> dict[Run, int]:
        """Return how many draft tokens each drafting run has had accepted.

        From now on, plans in flight sample no tokens for these runs.
        """
        right: dict[Run, int] = {}
        newest: dict[Run, int | None] = {}  # drawn by a row that counts
        for row, _, run, token, *_ in outcomes:
            if row.draft:
                found, foreseen = right.setdefault(run, 0), self._runs[run].foreseen
                if newest[run] != row.tokens[0] or (foreseen is not None and found >= foreseen):
                    newest[run] = None
                    continue
                right[run] += 1
            newest[run] = token
        for run in right:
            run.drawing = 0
        return right

    def _tell(self, sequence: Sequence, run: Run, right: int = 0, wrong: int = 0) -> None:
        """Report a sequence's draft tokens, accepted and wrong."""
        source, account = self._runs[run].source, sequence.account
        by_source = {each.source: each for each in account.draft_counts}
        before = by_source.get(source, DraftCounts(source, 0, 0))
        by_source[source] = DraftCounts(source, before.right + right, before.wrong + wrong)
        account.draft_counts = tuple(by_source.values())

    def _settle(self, sequence: Sequence, run: Run, right: int) -> None:
        speculation = self._runs[run]
        self.drafter.settle(speculation, right)
        if sequence.run is run:
            assert run.drawing == 0 and len(sequence.tokens) > run.computed
            run.planned = run.drawn = run.computed
            run.waits = False
            lines = speculation.lines  # where all were right, the slot has the state
            self._free += lines[:right] + lines[right + 1 :]
            speculation.lines = lines[right : right + 1]
            speculation.sends_newest = len(sequence.tokens) == run.computed + 1

    # ---- the rest of a run's life

    def left(self, sequence: Sequence, run: Run, reason: FinishReason | None) -> None:
        """Keep the answer, which may be given again."""
        if reason in ("stop", "length"):
            self.drafter.keep_answer(sequence)
        self._release(self._runs[run])

    def flush(self) -> None:
        """Forget earlier answers."""
        self.drafter.flush()

    def measure(self, metrics: Metrics) -> None:
        self.drafter.measure(metrics)

    def audit(self, runs: Iterable[Run]) -> Iterable[int]:
        """Assert that every line between draft tokens is free, or one of `runs`'."""
        taken = [line for run in runs for line in self._runs[run].lines]
        assert sorted((*self._free, *taken)) == list(self._lines or ()), "a line is lost"
        return ()
