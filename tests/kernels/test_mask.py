from __future__ import annotations

import pytest
import torch

from saccade.kernels.reference.mask import mask_logits, mask_logits_reference


def masks_of(rows: int, vocab: int) -> torch.Tensor:
    words = -(-vocab // 32)
    return torch.randint(-(2**31), 2**31, (rows, words), dtype=torch.int64).to(torch.int32)


def test_a_token_is_a_bit_of_its_word() -> None:
    masks = torch.tensor([[1 << 3, 1 << 8, 0], [-(2**31), 0, -1]], dtype=torch.int32)
    logits = mask_logits(torch.zeros(2, 70), masks)
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == [3, 40]
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [31, *range(64, 70)]


@pytest.mark.parametrize("vocab", [32, 100, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masking_is_the_reference(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab).to(dtype)
    masks = masks_of(3, vocab)
    rows = torch.tensor([4, 0, 2])
    expected = mask_logits_reference(logits.clone(), masks, rows)
    masked = mask_logits(logits, masks, rows)
    assert masked is logits
    assert torch.equal(masked, expected)
    assert torch.isfinite(masked[[1, 3]]).all(), "rows without a mask stay as they are"
    whole = torch.randn(3, vocab).to(dtype)
    expected = mask_logits_reference(whole.clone(), masks)
    assert torch.equal(mask_logits(whole, masks), expected)


def test_no_mask_changes_nothing_and_a_wrong_width_is_told() -> None:
    logits = torch.randn(2, 40)
    kept = logits.clone()
    none = torch.zeros(0, 2, dtype=torch.int32)
    assert torch.equal(mask_logits(logits, none, torch.zeros(0, dtype=torch.int64)), kept)
    with pytest.raises(ValueError, match="3 words for 40"):
        mask_logits(logits, torch.zeros(2, 3, dtype=torch.int32))
