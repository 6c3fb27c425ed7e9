"""A step that a worker has started, and the copy of its results to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.plan import Changed, DiskEvent, HeadDrafts, Plan, StepResult
from saccade.core.types import ImageKey
from saccade.runtime.row_parts import RowOutcome
from saccade.runtime.sampling.sampler import NO_TOKEN

if TYPE_CHECKING:
    from saccade.runtime.tiers import EmbeddingStore, PageMemory
    from saccade.runtime.vision.vision_encoder import VisionEncoder

MaskSource = Callable[[], npt.NDArray[np.int32] | None]
"""Returns the masks [M, ceil(V / 32)] of a plan's masked rows, or `None` if the worker is stopping.
"""
POLL_SECONDS = 5e-4
"""The polling interval if either a disk or a GPU may finish first."""


LATE_SECONDS = 0.05
"""How long a step waits for KV pages from disk. The scheduler may then decide to recompute them."""


class Step:
    """A started plan. Its results are being copied to the host.

    The result also reports background work that has finished since the last step: moves of KV pages
    (`pages`), encodings (`vision`), and reads and writes of embeddings (`disk`). Each of these is
    None if no such work can be in progress.
    """

    def __init__(
        self,
        plan: Plan,
        pages: PageMemory | None = None,
        vision: VisionEncoder | None = None,
        disk: EmbeddingStore | None = None,
    ) -> None:
        self._plan = plan
        self._pages = pages
        self._vision = vision
        self._disk = disk
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._outcomes: list[tuple[RowOutcome, list[torch.Tensor]]] = []
        self._checked: tuple[torch.Tensor, Sequence[int]] | None = None
        self._copied: torch.cuda.Event | None = None
        self._begun = time.monotonic()
        # Further fields of the `StepResult`.
        self._head_drafts: tuple[HeadDrafts, ...] = ()
        self._changed: Changed | None = None
        self._exhausted = self._unfinished = False
        self._taken: tuple[tuple[ImageKey, float, float], ...] = ()

    def took(self, key: ImageKey) -> None:
        """Record that an embedding from another server was stored."""
        self._taken += ((key, 0.0, time.monotonic()),)

    def draw(self, tokens: torch.Tensor) -> None:
        """Start copying the sampled tokens, [D] in row order, to the host."""
        self._tokens = to_host(tokens)
        self._note_copies(tokens)

    def copy_outcome(self, outcome: RowOutcome) -> None:
        """Start copying the tensors of an outcome to the host."""
        self._outcomes.append((outcome, [to_host(each) for each in outcome.tensors]))
        self._note_copies(outcome.tensors[0])

    def add_drafts(self, head_drafts: tuple[HeadDrafts, ...]) -> None:
        """Record the draft tokens from the model's head."""
        self._head_drafts = head_drafts

    def check(self, finite: torch.Tensor, places: Sequence[int]) -> None:
        """Start copying to the host which rows of the batch have finite states.

        finite: one bool for each row, [R].
        places: the batch index of each of the plan's rows.
        """
        self._checked = to_host(finite), places
        self._note_copies(finite)

    def _note_copies(self, copied: torch.Tensor) -> None:
        if copied.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def exhausted(self) -> None:
        """Record that the device ran out of memory for the plan's rows."""
        self._exhausted = True
        self._tokens, self._outcomes = torch.empty(0, dtype=torch.int64), []

    def changed(self, outcome: Changed) -> None:
        """Record the outcome of the plan's `change`."""
        self._changed = outcome

    def adapted(self, unfinished: bool) -> None:
        self._unfinished = unfinished

    def ready(self) -> bool:
        """Return True if `result` would return at once or within a short time."""
        drawn = self._copied is None or self._copied.query()
        return drawn and not (self._plan.wait and self._awaits() and not self._late())

    def result(self) -> StepResult:
        """Wait until the step has finished, and return its result. Call it once per step, in order.

        Raises RuntimeError if the thread that reads from disk has failed.
        """
        if self._copied is not None:
            self._copied.synchronize()
        wait = self._plan.wait and not self._await_pages()
        alone = wait and not (self._disk and self._disk.busy)
        vision, encoded = self._vision, self._taken
        if vision is not None:
            encoded += vision.ended(wait=alone)
            while wait and not encoded and self._awaits() and vision.computing:
                time.sleep(POLL_SECONDS)
                encoded = vision.ended()
        disk: tuple[DiskEvent, ...] = ()
        if self._disk:
            disk = self._disk.collect(wait and not encoded and self._disk.busy)
        tokens = tuple(self._tokens.tolist())
        result = StepResult(
            self._plan.step,
            tokens,
            head_drafts=self._head_drafts,
            non_finite=self._non_finite(tokens),
            exhausted=self._exhausted,
            encoded=encoded,
            failed=vision.failures() if vision is not None else (),
            disk=disk,
            pages=self._pages.collect() if self._pages else (),
            unfinished=self._unfinished,
            changed=self._changed,
            skipped=not self._plan.steps,
        )
        for outcome, found in self._outcomes:
            result = outcome.add_to(result, found)
        return result

    def _non_finite(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the rows with NaN or infinite values (`StepResult.non_finite`).

        tokens: the sampled tokens.
        """
        non_finite: set[int] = set()
        if self._checked is not None:
            finite, places = self._checked
            values = finite.tolist()
            non_finite.update(row for row, place in enumerate(places) if not values[place])
        if NO_TOKEN in tokens:
            drawing = [index for index, row in enumerate(self._plan.rows) if row.sample]
            non_finite.update(row for row, token in zip(drawing, tokens) if token == NO_TOKEN)
        return tuple(sorted(non_finite))

    def _await_pages(self) -> bool:
        """Wait until any background work has finished, if KV pages are being read.

        Waits for at most `LATE_SECONDS`. Returns True if pages were being read.
        """
        if not (self._pages and self._pages.is_reading):
            return False
        while self._awaits() and not self._late():
            time.sleep(POLL_SECONDS)
        return True

    def _late(self) -> bool:
        reading = self._pages is not None and self._pages.is_reading
        return reading and time.monotonic() > self._begun + LATE_SECONDS

    def _awaits(self) -> bool:
        """Return True if background work is in progress and none has finished that must be
        reported.
        """
        vision, disk, pages = self._vision, self._disk, self._pages
        if (
            (vision and vision.any_ended)
            or (disk and disk.has_events)
            or (pages and pages.has_events)
        ):
            return False
        reading = (disk and disk.busy) or (pages and pages.is_reading)
        return bool((vision and vision.computing) or reading)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Start copying `values` to pinned host memory, and return the copy.

    It is complete once the current stream has reached it. On a CPU, this returns `values`.
    """
    if not values.is_cuda:
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
