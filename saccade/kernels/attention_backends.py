"""The language model's attention by name: the backends, their devices, and how each is made.

To add one: a class that answers `paged.AttentionBackend`, a name here and in `core/config.py`, a
row of the table. `auto` takes the first row that runs. Backends are imported only to run: elsewhere
their packages may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch

from saccade.core.family import BEHAVIOURS, AttentionShape
from saccade.kernels import device
from saccade.kernels.libraries.installed import FA3_INSTALL, find_fa3
from saccade.kernels.reference.ops import Ops
from saccade.kernels.reference.paged import AttentionBackend, PagedShape, ReferenceAttention
from saccade.kernels.reference.sdpa import SdpaAttention

AttentionName = Literal["triton", "x86", "sdpa", "reference", "fa3", "flashinfer"]


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend's row in the table.

    runs: True if the backend works with these kernels, on a device, for queries in a dtype.
    captured: a step may be a graph, because everything that changes between steps is read on the
    device, in `plan` as well. steady: rows with one token each take the same calls in every step,
    as far as a layer's window reaches. package: the library's name, if it comes from another
    distribution. find: tells whether it is installed. install: the way to get it. kept: the cache
    may have another dtype than queries. knows: what layers may ask beyond causal attention, from
    `core.family.BEHAVIOURS`.
    """

    make: Callable[[PagedShape], AttentionBackend]
    runs: Callable[[Ops, torch.device, torch.dtype], bool]
    captured: bool
    steady: Callable[[PagedShape], bool] = lambda _: False
    package: str = ""
    find: Callable[[], object] | None = None
    install: str = ""
    kept: bool = True
    knows: frozenset[str] = frozenset()

    def lacks(self, shapes: Collection[AttentionShape]) -> str:
        """Return why layers with these shapes are beyond this backend; "" if it knows them all."""
        asked = {each for shape in shapes for each in shape.behaviours - self.knows}
        why = next((why for each, why in BEHAVIOURS.items() if each in asked), "")
        return why and f"{why}, which this attention does not know"

    @property
    def installed(self) -> bool:
        """Return True if the library is found. Skips the import, which may take seconds."""
        return self.find is None or self.find() is not None


def _triton(shape: PagedShape) -> AttentionBackend:
    from saccade.kernels.triton.backend import TritonAttention

    return TritonAttention(shape)


def _x86(shape: PagedShape) -> AttentionBackend:
    from saccade.kernels.x86.backend import X86Attention

    return X86Attention(shape)


def _fa3(shape: PagedShape) -> AttentionBackend:
    from saccade.kernels.libraries.fa3 import Fa3Attention

    return Fa3Attention(shape)


def _flashinfer(shape: PagedShape) -> AttentionBackend:
    from saccade.kernels.libraries.flashinfer import FlashInferAttention

    return FlashInferAttention(shape)


def _halves(_: Ops, place: torch.device, dtype: torch.dtype) -> bool:
    return place.type == "cuda" and dtype.itemsize == 2


ALL = frozenset(["latents", "ranges"])
BACKENDS: dict[AttentionName, Registered] = {
    "triton": Registered(_triton, lambda ops, *_: ops.kind == "triton", captured=True, knows=ALL),
    "x86": Registered(
        _x86,
        lambda ops, *_: ops.kind == "x86",
        captured=False,
        steady=lambda shape: shape.halves,
        knows=ALL,
    ),
    "sdpa": Registered(
        SdpaAttention, lambda ops, *_: ops.kind != "triton", captured=False, knows=ALL
    ),
    "reference": Registered(
        ReferenceAttention, lambda ops, *_: ops.kind != "triton", captured=True, knows=ALL
    ),
    # Not before they were measured: where these run, one above does.
    "fa3": Registered(
        _fa3,
        lambda ops, *on: _halves(ops, *on) and device.generation(on[0]) == 90,
        captured=True,
        package="FlashAttention-3",
        find=find_fa3,
        install=FA3_INSTALL,
        kept=False,
    ),
    "flashinfer": Registered(
        _flashinfer,
        _halves,
        captured=False,
        package="flashinfer",
        find=partial(find_spec, "flashinfer"),
        install="python scripts/install.py flashinfer-python; nvcc compiles it when first used",
    ),
}


def possible(
    ops: Ops,
    place: torch.device,
    dtype: torch.dtype,
    *,
    graphs: bool = False,
    shapes: Collection[AttentionShape] = (),
) -> tuple[AttentionName, ...]:
    """Return the backends that run on the device, in `auto`'s order of preference.

    graphs: only those that run in graphs. shapes: only those that compute layers with all these
    shapes.
    """
    return tuple(
        name
        for name, each in BACKENDS.items()
        if each.installed
        and each.runs(ops, place, dtype)
        and (each.captured or not graphs)
        and not each.lacks(shapes)
    )
