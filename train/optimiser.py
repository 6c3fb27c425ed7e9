"""The optimiser of the demo model's training: Muon for matrices and Adam for the rest, with float32
master copies of the weights.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; scaled to Adam's step size as
in Liu et al. 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return the approximately nearest matrices [K, M, N] with singular values 1, by Newton-Schulz
    iteration in their data type.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Optimiser:
    """Updates the weights of a model through float32 master copies.

    `gather` accumulates gradients in float32.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        self.weights = dict(named)
        self.masters = {
            name: weight.detach().float().clone() for name, weight in self.weights.items()
        }
        self.gradients = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        # (rows, columns) -> names; the patch embedding is treated as a matrix of flattened patches
        self.matrices: dict[tuple[int, int], list[str]] = {}
        for name, weight in self.weights.items():
            if weight.dim() > 2 or (
                weight.dim() == 2 and "embed" not in name and not name.startswith("head")
            ):
                self.matrices.setdefault((weight.shape[0], weight[0].numel()), []).append(name)
        in_muon = {name for names in self.matrices.values() for name in names}
        self.others = [name for name in self.weights if name not in in_muon]
        self.second = {name: torch.zeros_like(self.masters[name]) for name in self.others}
        self.touched: set[str] = (
            set()
        )  # weights with a gradient since the last step; others are not updated
        self.momentum, self.decay, self.step_count = momentum, decay, 0

    def gather(self, scale: float) -> None:
        """Accumulate the weights' gradients, multiplied by `scale`, and clear them."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self.gradients[name].add_(weight.grad, alpha=scale)
                self.touched.add(name)
                weight.grad = None

    @torch.no_grad()
    def step(self, rate: float, clip: float = 1.0) -> float:
        """Update with learning rate `rate`. Returns the norm of the gradient before clipping."""
        self.step_count += 1
        norm = math.sqrt(
            sum(
                float(gradient.square().sum())
                for gradient in (self.gradients[name] for name in self.touched)
            )
        )
        shrink = min(1.0, clip / (norm + 1e-6))
        for shape, names in self.matrices.items():
            if moved := [name for name in names if name in self.touched]:
                self._step_muon(shape, moved, rate)
        for name in self.others:
            if name in self.touched:
                self._step_adam(name, rate, shrink)
        for name in self.touched:
            self.weights[name].copy_(self.masters[name])
            self.gradients[name].zero_()
        self.touched.clear()
        return norm

    def _step_muon(self, shape: tuple[int, int], names: list[str], rate: float) -> None:
        updates = []
        for name in names:
            moment = self.first[name].lerp_(self.gradients[name], 1 - self.momentum)
            updates.append(self.gradients[name].lerp(moment, self.momentum).flatten(1))  # Nesterov
        size = 0.4 * math.sqrt(max(shape)) * rate
        stacked = torch.stack(updates).to(self.weights[names[0]].dtype)
        for name, update in zip(names, orthogonalise(stacked), strict=True):
            self.masters[name].mul_(1 - rate * self.decay).add_(
                update.view_as(self.masters[name]), alpha=-size
            )

    def _step_adam(self, name: str, rate: float, shrink: float) -> None:
        gradient = self.gradients[name].mul_(shrink)
        first = self.first[name].lerp_(gradient, 0.1)
        second = self.second[name].lerp_(gradient.square(), 0.02)
        mean = first / (1 - 0.9**self.step_count)
        root = (second / (1 - 0.98**self.step_count)).sqrt_().add_(1e-8)
        self.masters[name].addcdiv_(mean, root, value=-rate)

    def state(self) -> dict[str, Any]:
        return {
            "masters": self.masters,
            "first": self.first,
            "second": self.second,
            "step": self.step_count,
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Load a saved state, including the weights. Weights that it does not contain are
        unchanged.
        """
        self.step_count = state["step"]
        for ours, theirs in (
            (self.masters, state["masters"]),
            (self.first, state["first"]),
            (self.second, state["second"]),
        ):
            for name, tensor in theirs.items():
                if name in ours:
                    ours[name].copy_(tensor)
        for name, weight in self.weights.items():
            weight.copy_(self.masters[name])
