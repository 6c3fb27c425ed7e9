"""Operations that models apply to logits after the output head: a factor, a divisor, and a soft
cap.

The code is the same for all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AfterHead:
    """The operations after the output head. By default, there are none."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None  # a soft cap

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the operations in the dtype of the logits, as models do."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def ways(text: Any) -> tuple[AfterHead, ...]:
    """Return the candidates: the operations that a language model's configuration specifies, and no
    operations.

    Vision-language models may skip the operations that their language model's configuration
    specifies.
    """
    said = text.to_dict()
    factor, divisor = said.get("logit_scale"), said.get("logits_scaling")
    told = AfterHead(
        1.0 if factor is None else float(factor),
        1.0 if divisor is None else float(divisor),
        said.get("final_logit_softcapping"),
    )
    return (told,) if told == AfterHead() else (told, AfterHead())
