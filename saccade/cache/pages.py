"""Allocates KV pages, and counts the references to each.

Free pages are stored as maximal runs of consecutive pages. So a sequence usually gets consecutive
pages, and attention can read its keys as one slice.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

DUMMY_PAGE = 0
"""The page that padding rows write to. It is never allocated."""


class PagePool:
    """Allocates `num_pages` pages of `page_size` tokens each. Page 0 is never allocated: padding
    uses it.

    Allocating or releasing n pages costs O(n + log runs).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1 and page_size > 0
        self.page_size = page_size
        self.capacity = num_pages - 1
        self.free = 0
        self.refs = [0] * num_pages
        self._runs: dict[int, int] = {}  # first page -> length, of every maximal free run
        self._ends: dict[int, int] = {}  # page after the run -> first page
        # heap of (-length, first page). The entries of runs that have changed are stale.
        self._longest: list[tuple[int, int]] = []
        self._add_run(1, self.capacity)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Allocate `n` free pages, each with a reference count of 1.

        Requires `n <= free`.

        after: the page that they should follow if possible, or None.
        """
        assert 0 <= n <= self.free
        taken: list[int] = []
        start = None if after is None else after + 1
        while len(taken) < n:
            missing = n - len(taken)
            if start not in self._runs:
                start = self._open_run(missing)
            taken += self._cut(start, missing)
            start = taken[-1] + 1
        for page in taken:
            self.refs[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Increment the reference count of each page. None of the pages may be free."""
        for page in pages:
            assert self.refs[page] > 0
            self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Decrement the reference count of each page. Pages whose count drops to 0 become free."""
        start = end = 0
        for page in pages:
            assert page != DUMMY_PAGE and self.refs[page] > 0
            self.refs[page] -= 1
            if self.refs[page]:
                continue
            if page != end:
                self._add_run(start, end - start)
                start = page
            end = page + 1
        self._add_run(start, end - start)

    @property
    def free_runs(self) -> tuple[tuple[int, int], ...]:
        """The free pages, as runs of (first page, number of pages)."""
        return tuple(self._runs.items())

    def audit(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that each page is free or referenced, and that each reference count matches
        `holders`.

        holders: for each holder, the pages that it references.
        """
        held = Counter(chain.from_iterable(holders))
        free: set[int] = set()
        for start, length in self._runs.items():
            free.update(range(start, start + length))
        assert len(free) == self.free == sum(self._runs.values())
        assert not free & held.keys() and len(free) + len(held) == self.capacity, (
            "a page is lost, or both free and held"
        )
        expected = [0] * len(self.refs)
        for page, holders_of_it in held.items():
            expected[page] = holders_of_it
        assert self.refs[1:] == expected[1:], "a reference count is wrong"

    def _open_run(self, n: int) -> int:
        """Return the first page for a new run of `n` pages.

        It is inside the longest free run. Half of the spare pages stay free before it, so that the
        sequence whose pages end there can grow too.
        """
        while self._runs.get(self._longest[0][1]) != -self._longest[0][0]:
            heapq.heappop(self._longest)
        length, start = -self._longest[0][0], self._longest[0][1]
        margin = max(0, length - n) // 2 if start > 1 else 0
        if margin:
            self._remove_run(start)
            self._add_run(start, margin, merge=False)
            self._add_run(start + margin, length - margin, merge=False)
        return start + margin

    def _cut(self, start: int, n: int) -> range:
        length = self._remove_run(start)
        n = min(n, length)
        self._add_run(start + n, length - n, merge=False)
        return range(start, start + n)

    def _remove_run(self, start: int) -> int:
        length = self._runs.pop(start)
        del self._ends[start + length]
        self.free -= length
        return length

    def _add_run(self, start: int, length: int, merge: bool = True) -> None:
        if length == 0:
            return
        if merge and start in self._ends:
            left = self._ends[start]
            length += self._remove_run(left)
            start = left
        if merge and start + length in self._runs:
            length += self._remove_run(start + length)
        self._runs[start] = length
        self._ends[start + length] = start
        self.free += length
        heapq.heappush(self._longest, (-length, start))
        if len(self._longest) > 2 * len(self._runs) + 64:
            self._longest = [(-n, first) for first, n in self._runs.items()]
            heapq.heapify(self._longest)
