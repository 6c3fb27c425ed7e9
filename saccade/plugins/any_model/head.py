"""What models do to logits behind their heads' products: a factor, a soft cap.

The same code serves all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AfterHead:
    """What follows the head."""

    factor: float = 1.0  # multiplies logits
    divisor: float = 1.0  # divides them
    cap: float | None = None  # a soft cap. Neutral by default.

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply it in the head's number format, as models do."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def ways(text: Any) -> tuple[AfterHead, ...]:
    """Return the settings of a language model's configuration, and a neutral `AfterHead`.

    Models for images and text leave out what the language model alone does.
    """
    said = text.to_dict()
    factor, divisor = said.get("logit_scale"), said.get("logits_scaling")
    told = AfterHead(
        1.0 if factor is None else float(factor),
        1.0 if divisor is None else float(divisor),
        said.get("final_logit_softcapping"),
    )
    return (told,) if told == AfterHead() else (told, AfterHead())
