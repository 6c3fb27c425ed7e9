"""A vision tower's fingerprint, by which its embeddings are kept and asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from saccade.core.config import TowerQuantization
from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.runtime.tiers import values_of

FORMAT = "saccade-embedding-1"
"""Changes whenever what the vision tower is given, or how its answer is kept, changes in a way that
the fingerprint does not show.
"""


def fingerprint_encoder(
    spec: FamilySpec,
    device: torch.device,
    encode: Callable[[torch.Tensor, Grid], torch.Tensor],
    quantization: TowerQuantization = "none",
) -> bytes:
    """Return 16 bytes that differ with the vision encoder's answers.

    They are a hash of the tower's output for a test image, so that weights, their bits, dtype and
    the kind of device count. encode: a canvas uint8 [H, W, 3] on `device`, with its grid, to
    [num_tokens, embedding_width]. Every rank must call.
    """
    height, width = spec.sample.canvas
    pixels = (
        (torch.arange(height * width * 3, dtype=torch.int64) * 2654435761 >> 7)
        .to(torch.uint8)
        .view(height, width, 3)
    )
    rows = encode(pixels.to(device), spec.sample.grid).cpu()  # [tokens, embedding_width]
    facts = repr((FORMAT, spec.family, device.type, str(rows.dtype), tuple(rows.shape)))
    if quantization != "none":
        facts += quantization
    return hashlib.blake2b(facts.encode() + bytes(values_of(rows)), digest_size=16).digest()
