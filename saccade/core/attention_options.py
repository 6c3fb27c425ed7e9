"""What the user may set of the language model's attention. Written as `options.py` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.config import LanguageAttention


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How queries find keys and values on their pages."""

    attention_backend: Literal["auto", LanguageAttention] = "auto"
    """Attention of the language model; --mm-attention-backend is the vision tower's. triton: our
    own kernels (cuda). x86: compiled for processors, in bfloat16 (cpu, needs the extra cpu). sdpa:
    PyTorch's, a call for each sequence (cpu). reference: slow and plain, to compare with (cpu).
    fa3: FlashAttention-3 for prompts (Hopper, 16 bits). flashinfer: FlashInfer for rows that decode
    (cuda, 16 bits, no graphs of steps). auto: the first of these that runs.
    """
