"""Applies masks to logits, so that tokens that a grammar forbids are never sampled."""

from __future__ import annotations

import numpy as np
import torch

WORD_BITS = 32


def mask_logits(
    logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Set every logit whose bit is 0 to -inf, in place, and return `logits`.

    logits: [R, V] floating point.
    masks: [M, ceil(V / 32)] int32. Token t is bit t % 32 of word t // 32, and bits beyond V are
        ignored.
    rows: [M] int64, the distinct rows of `logits` that the masks are for, or None for all rows in
        order.
    """
    _check_words(logits, masks)
    vocab = logits.shape[-1]
    if not len(masks):
        return logits
    octets = masks.contiguous().view(torch.uint8)  # [M, 4 W], the least significant byte first
    bits = np.unpackbits(~octets.numpy(), axis=1, count=vocab, bitorder="little")
    banned = torch.from_numpy(bits.view(np.bool_))  # [M, V]
    for mask, row in enumerate(range(len(masks)) if rows is None else rows.tolist()):
        logits[row].masked_fill_(banned[mask], -torch.inf)
    return logits


def mask_logits_there(
    logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Do the same as `mask_logits` on any device, without waiting for the device."""
    _check_words(logits, masks)
    if not len(masks):
        return logits
    octets = masks.contiguous().view(torch.uint8)
    table = _banned_by_octet(masks.device)
    banned = table.index_select(0, octets.flatten().int()).view(len(masks), -1)
    banned = banned[:, : logits.shape[-1]]  # [M, V]
    if rows is None:
        return logits.masked_fill_(banned, -torch.inf)
    return logits.index_copy_(
        0, rows, logits.index_select(0, rows).masked_fill_(banned, -torch.inf)
    )


def _check_words(logits: torch.Tensor, masks: torch.Tensor) -> None:
    if masks.shape[-1] != -(-logits.shape[-1] // WORD_BITS):
        raise ValueError(f"masks of {masks.shape[-1]} words for {logits.shape[-1]} logits")


def mask_logits_reference(
    logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Do the same as `mask_logits` with a shift per bit. For tests."""
    rows = torch.arange(len(masks), device=logits.device) if rows is None else rows
    bits = (masks.unsqueeze(-1) >> torch.arange(WORD_BITS, device=masks.device)) & 1  # [M, W, 32]
    allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
    logits[rows] = torch.where(allowed, logits[rows], -torch.inf)
    return logits


def _banned_by_octet(device: torch.device) -> torch.Tensor:
    octets = torch.arange(256, device=device).unsqueeze(1)
    return (octets >> torch.arange(8, device=device)) & 1 == 0
