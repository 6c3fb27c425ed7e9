"""All operations that layers ask from a device, in plain PyTorch, as on CPUs: replaced in other
backends, and their reference in tests.

`Ops` is chosen once, when a model is loaded (`kernels/ops.py`), and handed to new layers.
Stateless: an operation is a function from its own file, which is the only place with its
signature. The methods are composed of other operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.nn import functional as F

from saccade.kernels.language_attention import REFERENCE, LanguageAttention
from saccade.kernels.matrix import MAX_UNQUANTIZED_ROWS, Fp8Matrix, Fp8Rows, Matrix, Rows
from saccade.kernels.reference import layer, linear, sample
from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.norm import layer_norm, rms_norm
from saccade.kernels.reference.patchify import centre_patches
from saccade.kernels.reference.rotary import rotate_
from saccade.kernels.reference.segments import TowerAttention, sdpa_segments

if TYPE_CHECKING:
    from saccade.kernels.reference import delta, experts, fp8, int4, int8, low_rank, mask, moe
    from saccade.kernels.reference.moe import Addresses, Experts, Routes

P = ParamSpec("P")
R = TypeVar("R")
Work = Callable[[], tuple[torch.Tensor, ...]]
Compile = Callable[[Callable[[], object]], object]
"""Compiles the kernels of some work, and may do it."""


class Captured(Protocol):
    """Work that can be repeated over the memory that it was done with, `results` included."""

    @property
    def results(self) -> tuple[torch.Tensor, ...]: ...

    def replay(self) -> None: ...


class LazyModule:
    """A module that is imported when an attribute of it is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


if not TYPE_CHECKING:
    delta, experts, fp8, int4, int8, low_rank, mask, moe = (
        LazyModule(f"saccade.kernels.reference.{name}")
        for name in ("delta", "experts", "fp8", "int4", "int8", "low_rank", "mask", "moe")
    )


class _Later:
    def __init__(self, find: Callable[[], Callable[..., object]]) -> None:
        self._find = find
        self._put: Callable[[object], None] = lambda _: None

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._put = partial(setattr, owner, attribute)

    def __get__(self, _ops: object, _owner: type) -> Any:
        found = self._find()
        self._put(staticmethod(found))
        return found


def later(find: Callable[[], Callable[P, R]]) -> staticmethod[P, R]:
    """Return an operation that `find` imports when a layer first asks for it.

    From then on it is an attribute of its class like any other.
    """
    return cast("staticmethod[P, R]", _Later(find))


class Ops:
    """PyTorch's operations. Stateless: any number of networks may share one.

    Other backends derive from the class and replace operations by functions with the same
    signatures.

    name: as messages call them.
    """

    name = "PyTorch's"
    # attention, towers: the language model's and the vision encoder's, by name. stacks: a layer's
    # experts are one tensor. looks_up: a rotation's rows are looked up as heads are turned.
    # folds_towers: a tower's first product takes bytes whose normalisation is folded into the
    # weights. sequential_states: states are computed token by token, in one order for prompts and
    # decode, and rows are read from the batch's memory alone, so that steps can be recorded.
    attention: Mapping[str, LanguageAttention] = REFERENCE
    towers: Mapping[str, TowerAttention] = {"sdpa": sdpa_segments}
    stacks = False
    looks_up = False
    folds_towers = False
    sequential_states = False
    # "module:name" of a `runtime.start.Prepare`, for kernels that are compiled when they are first
    # launched
    prepare: str | None = None
    # "module:name" of a `runtime.row_parts.SamplePart` that edits the logits of all rows at once
    slot_edits: str | None = None

    @property
    def takes_int4(self) -> bool:
        """Return True if products take 4-bit matrices unchanged."""
        return False

    def compiler(self, _device: torch.device, _ranks: int, /) -> Compile | None:
        """Return what compiles the kernels of some work, several at a time.

        Returns `None` if none are compiled so. ranks: those on this machine, which compile at the
        same time.
        """
        return None

    def compile_in_background(self) -> Callable[[], None]:
        """Begin to compile missing kernels in a process of its own, and return what ends it."""
        return lambda: None

    def precompile(self, _like: torch.Tensor, /) -> None:
        """Compile what long attention will need for tensors like this one.

        Otherwise the first long prompt, or large image, would wait for it.
        """

    def record(self, _work: Work, /) -> Captured | None:
        """Do the work, and return what repeats it.

        Returns `None` if it cannot be repeated. The work may have been done in part.
        """
        return None

    # ---- products (`matrix.Products`)

    activate = staticmethod(activate)
    prepack_dense = staticmethod(linear.prepack_dense)
    dense_linear = staticmethod(linear.dense_linear)
    quantise_int8 = later(lambda: int8.quantise_matrix)
    prepack_int8 = later(lambda: int8.prepack_int8)
    int8_linear = later(lambda: int8.int8_linear)
    quantise_int4 = later(lambda: int4.quantise_int4)
    prepack_int4 = later(lambda: int4.prepack_int4)
    int4_linear = later(lambda: int4.int4_linear)
    quantise_rows = later(lambda: fp8.quantise_rows)
    few_fp8_linear = later(lambda: fp8.whole_linear)  # rows stay as they are
    scaled_fp8_linear = later(lambda: fp8.scaled_linear)

    def fp8_linear(
        self, x: Rows, matrix: Fp8Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `x @ matrix.T + bias`, [T, out] in x's dtype, for x [T, in]."""
        if (
            isinstance(x, torch.Tensor)
            and len(x) > MAX_UNQUANTIZED_ROWS
            and (group := matrix.rows_group())
        ):
            x = self.quantise_rows(x, group)
        if isinstance(x, Fp8Rows):
            return self.scaled_fp8_linear(x, matrix, bias)
        return self.few_fp8_linear(x, matrix, bias)

    # ---- between products

    centre_patches = staticmethod(centre_patches)
    add_low_rank = later(lambda: low_rank.add_low_rank)

    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    add_rms_norm = staticmethod(layer.add_rms_norm)
    add_layer_norm = staticmethod(layer.add_layer_norm)
    gate = staticmethod(layer.gate)
    gate_heads = staticmethod(layer.gate_heads)

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Compute `rms_norm(x) * silu(gate)` over the last dimension, in x's dtype.

        The gate is in float32.
        """
        return (self.rms_norm(x, weight, eps) * F.silu(gate.float())).to(x.dtype)

    def delta_gates(
        self, both: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the delta rule's decay (logarithms) and beta, [T, H] float32 each.

        both [T, 2 H]: the projections for beta, then those for the decay. bias, rate [H] float32.
        """
        betas, steps = both.chunk(2, dim=1)
        decay = self.softplus(steps.float() + bias) * rate
        return decay, torch.sigmoid(betas).float()

    def add_rms_norm_rows(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
    ) -> tuple[torch.Tensor, Rows]:
        """Do as `add_rms_norm`; if there are many rows, return their norm in 8 bits.

        For a product that takes many rows in 8 bits. group: inputs per scale (`Matrix.rows_group`);
        0: without 8 bits.
        """
        if not group or len(x) <= MAX_UNQUANTIZED_ROWS:
            return self.add_rms_norm(x, delta, weight, eps)
        return self.add_rms_norm_many(x, delta, weight, eps, group)

    def add_rms_norm_many(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
    ) -> tuple[torch.Tensor, Fp8Rows]:
        total, normed = self.add_rms_norm(x, delta, weight, eps)
        return total, self.quantise_rows(normed, group)

    def gate_rows(self, gate_up: torch.Tensor, act: Activation, group: int) -> Rows:
        """Do as `gate`, for a product like that after `add_rms_norm_rows`."""
        if not group or len(gate_up) <= MAX_UNQUANTIZED_ROWS:
            return self.gate(gate_up, act)
        return self.gate_many(gate_up, act, group)

    def gate_many(self, gate_up: torch.Tensor, act: Activation, group: int) -> Fp8Rows:
        return self.quantise_rows(self.gate(gate_up, act), group)

    # ---- attention

    rotate_ = staticmethod(rotate_)
    rope_and_cache = staticmethod(layer.rope_and_cache)
    state_rows = later(lambda: delta.StateRows.of)  # for the last two, once a step
    softplus = later(lambda: delta.softplus)
    causal_conv = later(lambda: delta.causal_conv)
    gated_delta = later(lambda: delta.gated_delta)

    # ---- experts

    route = later(lambda: moe.route)
    stacked_mlp = later(lambda: experts.stacked_mlp)

    def locate(self, _up: Sequence[Matrix], _down: Sequence[Matrix], /) -> Addresses | None:
        """Return packed matrices' addresses if products with them are compiled; else `None`."""
        return None

    def expert_mlp(
        self, x: torch.Tensor, routes: Routes, experts: Experts, act: Activation, first: int = 0
    ) -> torch.Tensor:
        """Sum `share * down(act(gate) * up)` over each row's experts, for rows x [T, H].

        Returns [T, H]. `experts` are a run among all, from number `first` on. A row's other experts
        add 0.
        """
        visits = moe.sort_visits(routes, first, len(experts.up))
        return moe.expert_mlp(
            x,
            routes.shares,
            visits,
            experts,
            lambda rows, matrix: matrix.multiply(self, rows),
            lambda both: self.gate(both, act),
        )

    # ---- logits

    sample = staticmethod(sample.sample)
    mask_logits = later(lambda: mask.mask_logits)
