"""Attention backends of the language model on GPUs, by name, and the one that uses Triton. Keys and
values are read from the pages, in a fixed number of launches for any number of sequences, without a
host synchronization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from saccade.kernels import device
from saccade.kernels.language_attention import EVERYTHING, LanguageAttention
from saccade.kernels.reference.paged import (
    AttentionBackend,
    PagedCache,
    PagedRows,
    PagedShape,
)
from saccade.plugins.gpu.libraries.installed import FA3_INSTALL, find_fa3
from saccade.plugins.gpu.triton.paged import launch_paged
from saccade.plugins.gpu.triton.paged_decode import head_groups, share_keys


class TritonAttention:
    """Runs Saccade's Triton kernels. Implements `kernels.paged.AttentionBackend`."""

    def __init__(self, shape: PagedShape) -> None:
        self._scale = shape.scale
        self._rows: PagedRows | None = None
        # rows with their KV splits, computed once per step for each window size
        self._shared: dict[int | None, PagedRows] = {}

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


def _fa3(shape: PagedShape) -> AttentionBackend:
    from saccade.plugins.gpu.libraries.fa3 import Fa3Attention

    return Fa3Attention(shape)


def _flashinfer(shape: PagedShape) -> AttentionBackend:
    from saccade.plugins.gpu.libraries.flashinfer import FlashInferAttention

    return FlashInferAttention(shape)


def _halves(place: torch.device, dtype: torch.dtype) -> bool:
    return place.type == "cuda" and dtype.itemsize == 2


ATTENTION: Mapping[str, LanguageAttention] = {
    "triton": LanguageAttention(TritonAttention, captured=True, knows=EVERYTHING),
    # These need `--tune` until they have been measured: auto selects the one above.
    "fa3": LanguageAttention(
        _fa3,
        runs=lambda place, dtype: _halves(place, dtype) and device.generation(place) == 90,
        captured=True,
        package="FlashAttention-3",
        find=find_fa3,
        install=FA3_INSTALL,
        kept=False,
    ),
    "flashinfer": LanguageAttention(
        _flashinfer,
        runs=_halves,
        captured=False,
        package="flashinfer",
        find=partial(find_spec, "flashinfer"),
        install="python scripts/install.py flashinfer-python; nvcc compiles it when first used",
    ),
}
