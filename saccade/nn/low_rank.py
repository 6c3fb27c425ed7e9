"""LoRA adapters in linear layers. For the rows x of an adapter, scale * (x @ A.T) @ B.T is added to
x @ weight.T, for any format of the weight.

`Adapters` is created with a network, and each new linear layer gets its `LowRank` from it.
`plugins/changes/adapters.py` adds and removes adapters. Before a forward pass, `assign` sets the
adapter of each row. Without adapters, layers do no extra work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import Fp8Rows, Rows
from saccade.kernels.reference.ops import Ops
from saccade.nn.part import Part

if TYPE_CHECKING:  # imported with the first adapter
    from saccade.kernels.reference.low_rank import AdapterRows, Additions, Pair, Present

LANGUAGE = "language_model."
"""Prefix of the canonical names of the language model's layers, and of no vision encoder's."""


def of_language(name: str) -> bool:
    """Return True if a canonical tensor name belongs to the language model, including its head.

    All other tensors are the vision encoder's.
    """
    return name.startswith((LANGUAGE, "lm_head."))


class Active:
    """Tracks which rows use which adapter in the current forward pass. A row has at most one
    adapter.

    `now` is None if no row has an adapter.
    """

    __slots__ = ("_places", "now")

    def __init__(self, places: Mapping[int, int]) -> None:
        """Start without rows.

        places: the index in `Present` of each adapter, by the adapter's number.
        """
        self._places = places
        self.now: Present | None = None

    @contextmanager
    def assign(self, rows: Sequence[AdapterRows]) -> Iterator[None]:
        """Use adapters for these rows until the context exits."""
        if rows:
            from saccade.kernels.reference.low_rank import Present

            self.now = Present(tuple((self._places[number], each) for number, each in rows))
        try:
            yield
        finally:
            self.now = None

    def all(self, adapter: int) -> AbstractContextManager[None]:
        """Use one adapter for all rows until the context exits, or none if `adapter` is 0."""
        return self.assign([(adapter, slice(None))] if adapter else [])


@dataclass(frozen=True, slots=True)
class Factors:
    """The two matrices of one module: scale * b @ a is added to its weight."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scale: float


class LowRank:
    """Adds adapters' results to one matmul, whose matrix concatenates slices of checkpoint tensors.

    padding: the number of unused outputs after each slice.
    inputs: the number of unused inputs at the end.
    """

    __slots__ = ("_additions", "_outputs", "_parts", "active", "inputs")

    def __init__(
        self, active: Active, parts: Sequence[Part], padding: int = 0, inputs: int = 0
    ) -> None:
        self.inputs = inputs
        self.active = active
        self._parts = tuple(parts)
        ends = accumulate((part.wanted[0] + padding for part in parts), initial=0)
        self._outputs = [slice(at, end - padding) for at, end in pairwise(ends)]
        self._additions: Additions | None = None  # before the first adapter

    def add_to_product(self, ops: Ops, x: Rows, y: torch.Tensor, present: Present) -> torch.Tensor:
        """Add the adapters' results for rows `x` to the product `y`, in place, and return `y`."""
        if self._additions is None:
            return y
        if isinstance(x, Fp8Rows):
            x = x.dense().to(x.dtype)
        ops.add_low_rank(x, y, self._additions, present)
        return y

    def cut(self, found: dict[str, Factors], like: torch.Tensor) -> Pair:
        """Return the slice of an adapter's matrices that this rank needs.

        found: the matrices by module.
        like: a tensor with the dtype and device of the result.
        """
        downs: list[torch.Tensor] = []
        ranks: dict[str, slice] = {}
        ups = []
        for part, outputs in zip(self._parts, self._outputs):
            name = part.name.removesuffix(".weight")
            if (factors := found.get(name)) is None:
                continue
            rows, columns = (*part.index, slice(None), slice(None))[:2]
            if name not in ranks:
                start = sum(map(len, downs))
                ranks[name] = slice(start, start + len(factors.a))
                downs.append(F.pad(factors.a[:, columns].float(), (0, self.inputs)))
            up = factors.b[rows].float() * factors.scale
            ups.append((outputs, ranks[name], up.to(like)))
        from saccade.kernels.reference.low_rank import Pair

        return Pair(torch.cat(downs).to(like), tuple(ups))

    def put(self, place: int, pair: Pair) -> None:
        if self._additions is None:
            from saccade.kernels.reference.low_rank import Additions

            self._additions = Additions(self._outputs)
        self._additions.put(place, pair)

    def drop(self, place: int) -> None:
        if self._additions is not None:
            self._additions.drop(place)


class Adapters:
    """Creates the `LowRank` of each matrix of a network, and adds and removes adapters.

    language, tower: which rows use which adapter in the current forward pass of each part.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self.language = Active(self._places)
        self.tower = Active(self._places)
        self.modules: dict[str, tuple[int, int]] = {}  # [out, in] by canonical name
        self._products: dict[str, list[LowRank]] = {}

    def product(self, parts: Sequence[Part], padding: int = 0, inputs: int = 0) -> LowRank:
        """Create the `LowRank` of a matrix that concatenates `parts`. The arguments are those of
        `LowRank`.
        """
        language = parts[0].name.startswith(LANGUAGE)
        made = LowRank(self.language if language else self.tower, parts, padding, inputs)
        for part in parts:
            name = part.name.removesuffix(".weight")
            self.modules[name] = (part.shape[0], part.shape[1])
            products = self._products.setdefault(name, [])
            if made not in products:
                products.append(made)
        return made

    def put(self, number: int, found: dict[str, Factors], like: torch.Tensor) -> int:
        """Add an adapter, and return its size in bytes. If this raises an error, it was not
        added.
        """
        products = {id(each): each for name in found for each in self._products[name]}
        pairs = [(each, each.cut(found, like)) for each in products.values()]
        place = next(at for at in count() if at not in self._places.values())
        self._places[number] = place
        for product, pair in pairs:
            product.put(place, pair)
        return sum(pair.nbytes for _, pair in pairs)

    @contextmanager
    def blank(self, number: int, like: torch.Tensor) -> Iterator[None]:
        """Add an adapter of zeros to every matrix, and remove it when the context exits."""
        found = {
            name: Factors(torch.zeros(1, inputs), torch.zeros(outputs, 1), 1.0)
            for name, (outputs, inputs) in self.modules.items()
        }
        self.put(number, found, like)
        try:
            yield
        finally:
            self.drop(number)

    def drop(self, number: int) -> None:
        if (place := self._places.pop(number, None)) is None:
            return
        for products in self._products.values():
            for each in products:
                each.drop(place)
