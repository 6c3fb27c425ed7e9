"""All operations that layers request from a device, in plain PyTorch. Backends override them, and
tests use them as the reference.

An `Ops` is chosen once, when a model is loaded (`kernels/ops.py`), and passed to its layers. An
operation is a function in another file, where its signature is documented. Only operations that
combine others are methods of the class.
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
"""Compiles the kernels that some work needs, possibly by doing the work."""


class Captured(Protocol):
    """Work that was captured, with its `results`. It can be replayed on the same memory."""

    @property
    def results(self) -> tuple[torch.Tensor, ...]: ...

    def replay(self) -> None: ...


class LazyModule:
    """A module that is imported when one of its attributes is first used."""

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
    """Return an operation that `find` imports at its first use.

    After that, it is a normal attribute of its class.
    """
    return cast("staticmethod[P, R]", _Later(find))


class Ops:
    """The operations of a device. This class has PyTorch's operations.

    An instance has no state, so networks can share it. Other backends derive from this class and
    override operations with functions of the same signature.
    """

    name = "PyTorch's"  # in messages
    # attention backends of the language model and of the vision encoder, by name
    attention: Mapping[str, LanguageAttention] = REFERENCE
    towers: Mapping[str, TowerAttention] = {"sdpa": sdpa_segments}
    stacks = False  # a layer's experts are stacked in one tensor
    looks_up = False  # `rotate_` looks up table rows itself
    # the vision encoder's first matmul can take bytes, with normalization folded into its weights
    folds_towers = False
    # Recurrent states are computed token by token, in the same order for prefill and decode, and
    # only from device memory, so that steps can be captured.
    sequential_states = False
    # "module:name" of a `runtime.start.Prepare`, for kernels that are compiled at first launch
    prepare: str | None = None
    # "module:name" of a `runtime.row_parts.SamplePart` that edits the logits of all rows at once
    slot_edits: str | None = None

    @property
    def takes_int4(self) -> bool:
        """True if matmuls accept 4-bit matrices without conversion."""
        return False

    def compiler(self, _device: torch.device, _ranks: int, /) -> Compile | None:
        """Return a function that compiles kernels in parallel, or None if kernels are not compiled
        that way.

        _ranks: the number of ranks on this machine, which compile at the same time.
        """
        return None

    def compile_in_background(self) -> Callable[[], None]:
        """Start to compile missing kernels in another process. Return a function that stops it."""
        return lambda: None

    def precompile(self, _like: torch.Tensor, /) -> None:
        """Compile the kernels for long attention on tensors with the dtype and device of `_like`.

        Otherwise the first long prompt or large image would wait for them.
        """

    def record(self, _work: Work, /) -> Captured | None:
        """Do the work, and return a capture of it for replays.

        Returns None if it cannot be captured. Parts of the work may then have been done.
        """
        return None

    # ---- matmuls (`matrix.MatmulOps`)

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
    few_fp8_linear = later(lambda: fp8.whole_linear)  # with unquantized rows
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

    # ---- between matmuls

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
        """Return `rms_norm(x) * silu(gate)` over the last dimension, in x's dtype.

        The gate is computed in float32.
        """
        return (self.rms_norm(x, weight, eps) * F.silu(gate.float())).to(x.dtype)

    def delta_gates(
        self, both: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the decay (as logarithms) and beta of the delta rule, both [T, H] float32.

        both: [T, 2 H], the projections for beta, then for the decay.
        bias, rate: [H] float32.
        """
        betas, steps = both.chunk(2, dim=1)
        decay = self.softplus(steps.float() + bias) * rate
        return decay, torch.sigmoid(betas).float()

    def add_rms_norm_rows(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
    ) -> tuple[torch.Tensor, Rows]:
        """Do the same as `add_rms_norm`, but quantize the norm of large batches to 8 bits.

        group: the inputs per scale of the next matrix (`Matrix.rows_group`), or 0 to never
            quantize.
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
        """Do the same as `gate`, but quantize the result as `add_rms_norm_rows` does."""
        if not group or len(gate_up) <= MAX_UNQUANTIZED_ROWS:
            return self.gate(gate_up, act)
        return self.gate_many(gate_up, act, group)

    def gate_many(self, gate_up: torch.Tensor, act: Activation, group: int) -> Fp8Rows:
        return self.quantise_rows(self.gate(gate_up, act), group)

    # ---- attention

    rotate_ = staticmethod(rotate_)
    rope_and_cache = staticmethod(layer.rope_and_cache)
    state_rows = later(lambda: delta.StateRows.of)  # input of the next three, built once per step
    softplus = later(lambda: delta.softplus)
    causal_conv = later(lambda: delta.causal_conv)
    gated_delta = later(lambda: delta.gated_delta)

    # ---- experts

    route = later(lambda: moe.route)
    stacked_mlp = later(lambda: experts.stacked_mlp)

    def locate(self, _up: Sequence[Matrix], _down: Sequence[Matrix], /) -> Addresses | None:
        """Return the addresses of the packed matrices for compiled kernels, or None without such
        kernels.
        """
        return None

    def expert_mlp(
        self, x: torch.Tensor, routes: Routes, experts: Experts, act: Activation, first: int = 0
    ) -> torch.Tensor:
        """Return the sum of `share * down(act(gate) * up)` over the experts of each row of x [T,
        H].

        `experts` start at index `first` of all experts. Experts outside them contribute 0.
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
