"""All operations that layers ask from a device, in plain PyTorch, as on CPUs: replaced in other
backends, and their reference in tests.

`Ops` is chosen once, when a model is loaded (`kernels/ops.py`), and handed to new layers.
Stateless: an operation is a function from the file with its meaning, whose signature stands in that
file alone. The methods are operations made from other operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch.nn import functional as F

from saccade.kernels.matrix import Fp8Matrix, Fp8Rows, Matrix, Rows
from saccade.kernels.reference import (
    delta,
    experts,
    few_rows,
    fp8,
    int4,
    int8,
    layer,
    linear,
    low_rank,
    mask,
    moe,
)
from saccade.kernels.reference.activation import Activation, activate
from saccade.kernels.reference.fp8 import FEW_ROWS
from saccade.kernels.reference.moe import Addresses, Experts, Routes
from saccade.kernels.reference.norm import layer_norm, rms_norm
from saccade.kernels.reference.patchify import centre_patches
from saccade.kernels.reference.rotary import rotate_
from saccade.kernels.x86 import vnni_layout

Work = Callable[[], tuple[torch.Tensor, ...]]


class Recorded(Protocol):
    """Work that can be repeated over the memory that it was done with, `results` included."""

    @property
    def results(self) -> tuple[torch.Tensor, ...]: ...

    def replay(self) -> None: ...


class Ops:
    """PyTorch's operations. Stateless: any number of networks may share one.

    Other backends derive from the class and replace operations by functions with the same
    signatures.

    kind: these kernels' folder. compiles: kernels compiled at first launch, due before the first
    request. stacks: a layer's experts are one tensor. samples: one kernel draws tokens. looks_up: a
    rotation's rows are looked up as heads are turned. sequential_states: states are
    computed token by token, in one order for prompts and decode, and rows are read from the batch's
    memory alone, so that steps can be recorded.
    """

    kind: Literal["reference", "x86", "triton"] = "reference"
    compiles: Literal["nothing", "decode", "everything"] = "nothing"
    stacks = False
    samples = False
    looks_up = False
    sequential_states = False

    def record(self, _work: Work, /) -> Recorded | None:
        """Do the work, and return what repeats it.

        Returns `None` if it cannot be repeated. The work may have been done in part.
        """
        return None

    # ---- products (`matrix.Products`)

    activate = staticmethod(activate)
    lay_out_dense = staticmethod(linear.lay_out_dense)
    lay_out_int4 = staticmethod(vnni_layout.lay_out_int4)
    dense_linear = staticmethod(linear.dense_linear)
    int8_linear = staticmethod(int8.int8_linear)
    int4_linear = staticmethod(int4.int4_linear)
    panels_linear = staticmethod(vnni_layout.panels_linear)
    few_fp8_linear = staticmethod(fp8.whole_linear)  # rows stay as they are
    quantise_rows = staticmethod(fp8.quantise_rows)

    def fp8_linear(
        self, x: Rows, matrix: Fp8Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `x @ matrix.T + bias`, [T, out] in x's dtype, for x [T, in]."""
        if isinstance(x, torch.Tensor) and len(x) > FEW_ROWS and (group := matrix.rows_group()):
            x = self.quantise_rows(x, group)
        if isinstance(x, Fp8Rows):
            return fp8.scaled_linear(x, matrix, bias)
        return self.few_fp8_linear(x, matrix, bias)

    # ---- between products

    centre_patches = staticmethod(centre_patches)
    add_low_rank = staticmethod(low_rank.add_low_rank)

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
        if not group or len(x) <= FEW_ROWS:
            return self.add_rms_norm(x, delta, weight, eps)
        return self.add_rms_norm_many(x, delta, weight, eps, group)

    def add_rms_norm_many(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
    ) -> tuple[torch.Tensor, Fp8Rows]:
        total, normed = self.add_rms_norm(x, delta, weight, eps)
        return total, self.quantise_rows(normed, group)

    def gate_rows(self, gate_up: torch.Tensor, act: Activation, group: int) -> Rows:
        """Do as `gate`, for a product like that after `add_rms_norm_rows`."""
        if not group or len(gate_up) <= FEW_ROWS:
            return self.gate(gate_up, act)
        return self.gate_many(gate_up, act, group)

    def gate_many(self, gate_up: torch.Tensor, act: Activation, group: int) -> Fp8Rows:
        return self.quantise_rows(self.gate(gate_up, act), group)

    # ---- attention, and what stands for it

    rotate_ = staticmethod(rotate_)
    turn_and_cache = staticmethod(layer.turn_and_cache)
    state_rows = staticmethod(delta.StateRows.of)  # what the two that follow know of a step
    softplus = staticmethod(delta.softplus)
    causal_conv = staticmethod(delta.causal_conv)
    gated_delta = staticmethod(delta.gated_delta)

    # ---- experts

    route = staticmethod(moe.route)
    stacked_mlp = staticmethod(experts.stacked_mlp)

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

    draw_few = staticmethod(few_rows.draw_few)
    mask_logits = staticmethod(mask.mask_logits)
