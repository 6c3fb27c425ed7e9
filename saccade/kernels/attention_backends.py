"""The language model's attention by name: which backends there are, where each runs, how one is
made.

To add one: a class that answers `paged.AttentionBackend`, a name here and in `core/config.py`, a
row of the table. Its place among the others is what `auto` goes by: the first that runs. Backends
are imported where they run: elsewhere their packages need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.paged import AttentionBackend, PagedShape, ReferenceAttention
from saccade.kernels.reference.sdpa import SdpaAttention

AttentionName = Literal["triton", "x86", "sdpa", "reference"]


@dataclass(frozen=True, slots=True)
class Registered:
    """runs: whether it does beside these kernels, on a device, for queries of a dtype. captured:
    whether a step with it may be a graph: all that changes between steps is read on the device, in
    `plan` as well.
    """

    make: Callable[[PagedShape], AttentionBackend]
    runs: Callable[[Ops, torch.device, torch.dtype], bool]
    captured: bool


def _triton(shape: PagedShape) -> AttentionBackend:
    from saccade.kernels.triton.backend import TritonAttention

    return TritonAttention(shape)


def _x86(shape: PagedShape) -> AttentionBackend:
    from saccade.kernels.x86.backend import X86Attention

    return X86Attention(shape)


BACKENDS: dict[AttentionName, Registered] = {
    "triton": Registered(_triton, lambda ops, *_: ops.kind == "triton", captured=True),
    "x86": Registered(_x86, lambda ops, *_: ops.kind == "x86", captured=False),
    "sdpa": Registered(SdpaAttention, lambda ops, *_: ops.kind != "triton", captured=False),
    "reference": Registered(
        ReferenceAttention, lambda ops, *_: ops.kind != "triton", captured=True
    ),
}


def possible(
    ops: Ops, place: torch.device, dtype: torch.dtype, *, graphs: bool = False
) -> tuple[AttentionName, ...]:
    """Which run there, those that `auto` prefers first; with `graphs`, in these."""
    return tuple(
        name
        for name, each in BACKENDS.items()
        if each.runs(ops, place, dtype) and (each.captured or not graphs)
    )
