"""Computes a vision encoder's fingerprint. Later runs and other servers reuse embeddings only if
their fingerprints match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from saccade.core.config import TowerQuantization
from saccade.core.family import FamilySpec
from saccade.core.types import Grid
from saccade.runtime.tiers import values_of

FORMAT = "saccade-embedding-1"
"""A version that must be changed if the vision encoder's input, or the storage of its output,
changes in a way that does not change its output for the test image.
"""


def fingerprint_encoder(
    spec: FamilySpec,
    device: torch.device,
    encode: Callable[[torch.Tensor, Grid], torch.Tensor],
    quantization: TowerQuantization = "none",
) -> bytes:
    """Return a fingerprint of 16 bytes, which differs if the vision encoder's outputs differ.

    It is a hash of the output for a test image, and so depends on weights, quantization, dtype and
    the type of device. All ranks must call it.

    encode: encodes a canvas uint8 [H, W, 3] on `device`, with its grid, to [num_tokens,
        embedding_width].
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
