"""Phi-4-multimodal's processor for images and text where torchvision is missing.

It is transformers' own, without its half for sounds. Its few torchvision calls are answered by
torch, which computes them there, too. It sees decoded images only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import transformers

IMAGES = "transformers.models.phi4_multimodal.image_processing_phi4_multimodal"
BACKENDS = "transformers.image_processing_backends"
PACKAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
FUNCTIONS = f"{PACKAGES[-1]}.functional"
MODES = {2: "bilinear", 3: "bicubic"}
"""By Pillow's numbers."""


def resize(
    image: torch.Tensor, size: Sequence[int], mode: str = "bilinear", *, antialias: bool = True
) -> torch.Tensor:
    """Resize [3, H, W], uint8 or float32, to [3, *size]."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    made = torch.nn.functional.interpolate(
        image[None], tuple(size), mode=mode, antialias=antialias, align_corners=False
    )
    return made[0]


def pad(image: torch.Tensor, edges: Sequence[int], fill: Sequence[int]) -> torch.Tensor:
    """Pad the image.

    edges: left, top, right, bottom. fill: by channel, all alike.
    """
    left, top, right, bottom = edges
    assert len(set(fill)) == 1, "channels are filled otherwise"
    return torch.nn.functional.pad(image, (left, right, top, bottom), value=fill[0])


def image_processor_class() -> Any:
    module: Any = sys.modules.get(IMAGES) or _import()

    class Phi4MultimodalImageProcessor(module.Phi4MultimodalImageProcessor):  # type: ignore[misc]
        """Has its own name, which processors' files use."""

        def resize(
            self, image: torch.Tensor, size: Any, resample: int, antialias: bool = True
        ) -> torch.Tensor:
            shape = size.height, size.width
            return resize(image, shape, MODES[int(resample)], antialias=antialias)

        def normalize(
            self, image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, **_: bool
        ) -> torch.Tensor:
            return (image - mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))

    return Phi4MultimodalImageProcessor


def _import() -> ModuleType:
    """Import it with a module in place of torchvision's functions.

    That module is gone after the import.
    """
    import_module(BACKENDS)  # it would take that module for torchvision
    standing = {name: ModuleType(name) for name in (*PACKAGES, FUNCTIONS)}
    functions = standing[FUNCTIONS]
    vars(functions).update(resize=resize, pad=pad)
    vars(standing[PACKAGES[-1]]).update(functional=functions)
    sys.modules.update(standing)
    try:
        return import_module(IMAGES)
    finally:
        for name in standing:
            del sys.modules[name]


def phi4_processor_class() -> Any:
    images = image_processor_class()
    own: Any = transformers.Phi4MultimodalProcessor

    class Phi4MultimodalProcessor(own):  # type: ignore[misc]
        """Has two parts: an image processor and a tokenizer."""

        def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
            self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
            self.audio_token, self.audio_token_id = tokenizer.audio_token, tokenizer.audio_token_id
            super(own, self).__init__(image_processor, tokenizer, **more)

        @classmethod
        def _get_arguments_from_pretrained(cls, folder: str, *_: Any, **told: Any) -> list[Any]:
            """Load the parts.

            told: for the image processor.
            """
            tokenizers: Any = transformers.AutoTokenizer
            return [images.from_pretrained(folder, **told), tokenizers.from_pretrained(folder)]

    return Phi4MultimodalProcessor
