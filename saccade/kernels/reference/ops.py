"""All that layers ask of a device, in plain PyTorch, as CPUs run it: what other backends replace,
and are tested against.

`Ops` is chosen once, when a model is loaded (`kernels/ops.py`), and handed to layers as they are
built. Owns nothing: each method is a function of the file that says what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional as F

from saccade.kernels.reference import activation as activations
from saccade.kernels.reference import delta as delta_rule
from saccade.kernels.reference import experts as stacked
from saccade.kernels.reference import fp8, int4, layer, linear, mask, moe, norm, rotary
from saccade.kernels.reference.activation import Activation
from saccade.kernels.reference.delta import StateRows
from saccade.kernels.reference.experts import Stack
from saccade.kernels.reference.fp8 import FEW_ROWS, Fp8Matrix, Fp8Rows, Rows
from saccade.kernels.reference.int4 import Int4Matrix
from saccade.kernels.reference.int8 import Int8Matrix, int8_linear
from saccade.kernels.reference.layer import QKNorm
from saccade.kernels.reference.linear import Matrix
from saccade.kernels.reference.moe import Addresses, Experts, Routes
from saccade.kernels.reference.paged import PagedCache
from saccade.kernels.reference.rotary import Rotation
from saccade.kernels.x86.vnni import runs_vnni
from saccade.kernels.x86.vnni_layout import Int4Panels, pack_panels, panels_linear


class Ops:
    """PyTorch's. Stateless: any number of networks may share one.

    kind: the folder of these kernels. compiles: what is compiled when it is first launched, and is
    to be before the first request. stacks: whether a layer's experts are one tensor. samples:
    whether one kernel draws tokens. looks_up: whether a rotation's rows are looked up as heads are
    turned.
    """

    kind: Literal["reference", "x86", "triton"] = "reference"
    compiles: Literal["nothing", "decode", "everything"] = "nothing"
    stacks = False
    samples = False
    looks_up = False

    # ---- products

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return activations.activate(x, activation)

    def ready(self, weight: Matrix) -> Matrix:
        """`weight` as `linear` takes it; one in 8 bits already is."""
        if isinstance(weight, Int4Matrix):
            return self.ready_int4(weight)
        return self.pack(weight) if isinstance(weight, torch.Tensor) else weight

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [out, in] in the form in which products are fastest; nothing else reads it."""
        return linear.pack(weight)

    def ready_int4(self, weight: Int4Matrix) -> Int4Matrix | Int4Panels:
        return pack_panels(weight) if runs_vnni() else weight

    def linear(
        self,
        x: Rows,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        activation: Activation = "none",
    ) -> torch.Tensor:
        """activation(x @ weight.T + bias) [..., out] with a weight from `ready`. Rows in 8 bits are
        for weights that want these.
        """
        if isinstance(weight, Fp8Matrix):
            return self.activate(self.fp8_linear(x, weight, bias), activation)
        assert isinstance(x, torch.Tensor)
        if isinstance(weight, Int8Matrix):
            return self.activate(int8_linear(x, weight, bias), activation)
        if isinstance(weight, Int4Matrix):
            return self.activate(self.int4_linear(x, weight, bias), activation)
        if isinstance(weight, Int4Panels):
            return self.activate(panels_linear(x, weight, bias), activation)
        return self.dense_linear(x, weight, bias, activation)

    def dense_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        return linear.dense_linear(x, weight, bias, activation)

    def int4_linear(
        self, x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return int4.int4_linear(x, matrix, bias)

    def fp8_linear(
        self, x: Rows, matrix: Fp8Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] @ matrix.T + bias, [T, out] in the dtype of `x`."""
        if isinstance(x, torch.Tensor) and len(x) > FEW_ROWS and (group := fp8.rows_group(matrix)):
            x = self.quantise_rows(x, group)
        if isinstance(x, Fp8Rows):
            return fp8.scaled_linear(x, matrix, bias)
        return self.fp8_few(x, matrix, bias)

    def fp8_few(
        self, x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The same of rows that stay as they are."""
        return fp8.whole_linear(x, matrix, bias)

    def quantise_rows(self, x: torch.Tensor, group: int) -> Fp8Rows:
        return fp8.quantise_rows(x, group)

    # ---- between products

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """rms_norm(x) * silu(gate) over the last dimension, in the dtype of `x`; the gate in
        float32.
        """
        return (self.rms_norm(x, weight, eps) * F.silu(gate.float())).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.add_rms_norm(x, delta, weight, eps)

    def add_rms_norm_rows(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
    ) -> tuple[torch.Tensor, Rows]:
        """`add_rms_norm` for a product that takes many rows in 8 bits, of which `group` inputs
        share a scale (`linear.wanted_group`; 0: it takes none): the norm of so many is.
        """
        if not group or len(x) <= FEW_ROWS:
            return self.add_rms_norm(x, delta, weight, eps)
        return self.add_rms_norm_many(x, delta, weight, eps, group)

    def add_rms_norm_many(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, group: int
    ) -> tuple[torch.Tensor, Fp8Rows]:
        total, normed = self.add_rms_norm(x, delta, weight, eps)
        return total, self.quantise_rows(normed, group)

    def add_layer_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.add_layer_norm(x, delta, weight, bias, eps)

    def gate(self, gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
        return layer.gate(gate_up, act)

    def gate_rows(self, gate_up: torch.Tensor, act: Activation, group: int) -> Rows:
        """`gate` for a product as `add_rms_norm_rows`' is."""
        if not group or len(gate_up) <= FEW_ROWS:
            return self.gate(gate_up, act)
        return self.gate_many(gate_up, act, group)

    def gate_many(self, gate_up: torch.Tensor, act: Activation, group: int) -> Fp8Rows:
        return self.quantise_rows(self.gate(gate_up, act), group)

    # ---- attention, and what stands for it

    def rotate_(self, rotation: Rotation, x: torch.Tensor) -> None:
        rotary.rotate_(rotation, x)

    def turn_and_cache(
        self,
        qkv: torch.Tensor,
        kv_heads: int,
        rotation: Rotation,
        qk_norm: QKNorm | None,
        cache: PagedCache,
        out_slots: torch.Tensor,
    ) -> torch.Tensor:
        return layer.turn_and_cache(qkv, kv_heads, rotation, qk_norm, cache, out_slots)

    def state_rows(
        self,
        q_starts: torch.Tensor,
        kv_lengths: torch.Tensor,
        lines: torch.Tensor,
        singles: int,
    ) -> StateRows:
        """What the two that follow need to know of a step."""
        return StateRows.of(q_starts, kv_lengths, lines, singles)

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, rows: StateRows
    ) -> torch.Tensor:
        return delta_rule.causal_conv(x, weight, states, rows)

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        return delta_rule.gated_delta(q, k, v, decay, beta, states, rows)

    # ---- experts

    def locate(self, _up: Sequence[Matrix], _down: Sequence[Matrix], /) -> Addresses | None:
        """Where packed matrices lie, if products with them are compiled; None if they are not."""
        return None

    def expert_mlp(
        self, x: torch.Tensor, routes: Routes, experts: Experts, act: Activation, first: int = 0
    ) -> torch.Tensor:
        """For rows x [T, H] the sum over their experts of share * down(act(gate) * up), [T, H].

        `experts` are a run of all, which begins with number `first`; what a row has of others
        counts nothing.
        """
        visits = moe.sort_visits(routes, first, len(experts.up))
        return moe.expert_mlp(
            x, routes.shares, visits, experts, self.linear, lambda both: self.gate(both, act)
        )

    def stacked_mlp(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        shares: torch.Tensor,
        up: Stack,
        down: Stack,
        before: int = 0,
    ) -> torch.Tensor:
        return stacked.stacked_mlp(x, experts, shares, up, down, before)

    # ---- logits

    def mask_logits(
        self, logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        return mask.mask_logits(logits, masks, rows)
