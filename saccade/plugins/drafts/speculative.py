"""Plans the rows and masks of draft tokens in steps, and decides which of them are accepted.

`drafter.py` proposes draft tokens, and this module plans and checks them. A draft token is accepted
if the row before it was accepted and has sampled it. A run with draft tokens in flight waits for
their result.

Each row of a run, draft or not, has one state after it. The last state stays in the run's slot, and
the others are stored in extra slots. Once the tokens are sampled, the run resumes from the state
after the last accepted token: its next plan copies that state to the run's slot before any row.
Plans are executed in order, so an extra slot is free once the plan that reads it has been made, or
once its state is not needed.
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
    """Plans and verifies the draft tokens of all sequences."""

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
        """Start the run without draft tokens."""
        self._runs[run] = Speculation()

    def limit_steps(self, sequence: Sequence, run: Run, rows: int, most: int) -> int:
        """Return 1 if draft tokens are in flight or may follow the next row, or else `most`."""
        speculation = self._runs[run]
        drafts = run.waits or speculation.sends_newest or self.drafter.head
        return 1 if drafts or self._may_draft(sequence, run, rows) else most

    def _may_draft(self, sequence: Sequence, run: Run, rows: int) -> bool:
        return bool(self.drafter.propose(sequence, self._runs[run], self.drafter.most, rows))

    def decode(
        self, sequence: Sequence, run: Run, builder: PlanBuilder, parts: Iterable[StepPart]
    ) -> Row:
        """Plan the row of the latest token and a row for each draft token after it, and return the
        first.
        """
        speculation, width = self._runs[run], builder.width
        single = builder.steps == 1
        draft_tokens = self._propose(sequence, run, speculation, width, parts) if single else []
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
        """Return draft tokens, limited by the free pages, the length of the answer, the rows and
        states of workers, and the other parts.

        Only free pages are used for draft tokens, so nothing is evicted.
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
        """Make the row resume from the state after the last accepted token."""
        if not run.waits:
            self._resume(run, self._runs[run], builder)

    def _resume(self, run: Run, speculation: Speculation, builder: PlanBuilder) -> None:
        builder.restore += [StateCopy(line, run.slot) for line in speculation.lines]
        self._release(speculation)

    def _release(self, speculation: Speculation) -> None:
        self._free += speculation.lines
        speculation.lines = []

    def mask(self, sequence: Sequence, run: Run, row: Row) -> bytes | None:
        """Return the mask of a row followed by draft tokens, or of a draft token's row.

        Call this for the rows in order. Returns None for a run without draft tokens. Raises
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
        known = sequence.tokens[row.start + row.length :]  # forced tokens: the sampled one and more
        if not known:
            masks += grammar_state.ahead(draft_tokens, jumps(sequence.request))
        elif draft_tokens[:1] == known:  # if there are more, they are in the next plan
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
        """Yield the outcomes, except for draft tokens that are wrong or outdated.

        Afterwards, runs continue after their last accepted token, with the draft tokens of the MTP
        head. A plan of several steps is cancelled once draft tokens may follow.
        """
        self.drafter.costs.ended(flight.plan, flight.planned)
        if not any(row.draft or row.head_drafts for row in flight.plan.rows):
            yield from outcomes
            if flight.left > 2:  # otherwise its last step has started
                flight.outdated |= any(
                    sequence.run is run and self._may_draft(sequence, run, len(flight.rows))
                    for _, sequence, run in flight.rows
                )
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
        """Return how many draft tokens were accepted for each run that had any.

        From now on, plans in flight sample no tokens for these runs.
        """
        right: dict[Run, int] = {}
        newest: dict[Run, int | None] = {}  # the token sampled by the last accepted row
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
        """Add to a sequence's counts of accepted (`right`) and rejected (`wrong`) draft tokens."""
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
            lines = speculation.lines  # if all were accepted, the state is in the run's own slot
            self._free += lines[:right] + lines[right + 1 :]
            speculation.lines = lines[right : right + 1]
            speculation.sends_newest = len(sequence.tokens) == run.computed + 1

    # ---- after the run

    def left(self, sequence: Sequence, run: Run, reason: FinishReason | None) -> None:
        """Store the answer, since later answers may repeat it."""
        if reason in ("stop", "length"):
            self.drafter.keep_answer(sequence)
        self._release(self._runs[run])

    def flush(self) -> None:
        """Drop all stored answers."""
        self.drafter.flush()

    def measure(self, metrics: Metrics) -> None:
        self.drafter.measure(metrics)

    def audit(self, runs: Iterable[Run]) -> Iterable[int]:
        """Assert that each extra slot is either free or used by one of `runs`."""
        taken = [line for run in runs for line in self._runs[run].lines]
        assert sorted((*self._free, *taken)) == list(self._lines or ()), "a line is lost"
        return ()
