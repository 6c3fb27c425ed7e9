"""Norms, activations and patches against float64 and against transformers' processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.kernels.reference.activation import gelu_tanh
from saccade.kernels.reference.norm import rms_norm
from saccade.kernels.reference.patchify import patchify
from tests.fixtures.tiny import picture
from tests.helpers.tensors import noise

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (4, 64)], ids=["one weight", "a weight per head"])
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], rows: int) -> None:
    x, weight = (noise(rows, 4, 64) * 3).to(dtype), noise(*shape).to(dtype)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_tanh(dtype: torch.dtype) -> None:
    x = (noise(1000) * 4).to(dtype)
    wanted = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(
        gelu_tanh(x).double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    ("patch", "mean", "std"),
    [
        (16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        (14, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ],
)
@pytest.mark.parametrize("size", [(2, 2), (3, 5)])
def test_patches_equal_the_processors_bit_for_bit(
    patch: int, mean: tuple[float, ...], std: tuple[float, ...], size: tuple[int, int]
) -> None:
    image = picture(size[0] * patch * 2, size[1] * patch * 2)
    means, stds = torch.tensor(mean) * 255.0, torch.tensor(std) * 255.0
    normal = ((torch.from_numpy(image).float() - means) / stds).permute(2, 0, 1).numpy()
    wanted, _, _ = Qwen2VLImageProcessorPil().patchify(normal, patch, 2, 2)
    ours = patchify(torch.from_numpy(image), patch, 2, 2, means, stds, torch.float32)
    assert np.array_equal(ours.numpy(), wanted)
    assert torch.equal(
        patchify(torch.from_numpy(image), patch, 2, 2, means, stds, torch.bfloat16), ours.bfloat16()
    )
