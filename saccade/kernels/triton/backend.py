"""The language model's attention by Triton's kernels: keys and values are read where they lie, in
equally many launches for any number of sequences. The host never waits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.kernels.reference.paged import PagedCache, PagedRows, PagedShape
from saccade.kernels.triton.paged import launch_paged
from saccade.kernels.triton.paged_decode import head_groups, share_keys


class TritonAttention:
    """Implements `kernels.paged.AttentionBackend`."""

    def __init__(self, shape: PagedShape) -> None:
        self._scale = shape.scale
        self._rows: PagedRows | None = None
        self._shared: dict[int | None, PagedRows] = {}  # with the list of pieces, by windows

    def plan(self, rows: PagedRows) -> None:
        self._rows, self._shared = rows, {}

    def __call__(self, q: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        assert self._rows is not None, "a step is planned first"
        rows = self._shared.get(cache.shape.window)
        if rows is None:
            rows = self._rows
            if rows.singles:
                work = share_keys(rows, head_groups(q, cache), window=cache.shape.window)
                rows = replace(rows, work=work)
            self._shared[cache.shape.window] = rows
        return launch_paged(q, cache, rows, self._scale)
