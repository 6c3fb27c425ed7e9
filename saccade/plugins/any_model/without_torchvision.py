"""transformers' processors whose image processors require torchvision, adapted to run without it.

Their few calls to torchvision are replaced with the calls to torch that torchvision would make.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import transformers

BACKENDS = "transformers.image_processing_backends"
PACKAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
FUNCTIONS = f"{PACKAGES[-1]}.functional"
MODES = {2: "bilinear", 3: "bicubic"}
"""Interpolation modes by their number in Pillow."""


def resize(
    images: torch.Tensor, size: Sequence[int], mode: str = "bilinear", *, antialias: bool = True
) -> torch.Tensor:
    """Resize images [..., 3, H, W], uint8 or float32, to [..., 3, *size]."""
    if tuple(images.shape[-2:]) == tuple(size):
        return images
    flat = images.reshape(-1, *images.shape[-3:])
    made = torch.nn.functional.interpolate(
        flat, tuple(size), mode=mode, antialias=antialias, align_corners=False
    )
    return made.reshape(*images.shape[:-2], *size)


def pad(image: torch.Tensor, edges: Sequence[int], fill: Sequence[int]) -> torch.Tensor:
    """Pad an image.

    edges: the pixels to add at the left, top, right and bottom.
    fill: the value of each channel, all equal.
    """
    left, top, right, bottom = edges
    assert len(set(fill)) == 1, "channels are filled otherwise"
    return torch.nn.functional.pad(image, (left, right, top, bottom), value=fill[0])


def image_processor_class(model: str, name: str) -> Any:
    """Import and return an image processor class.

    model: the name of its module in transformers.
    """
    path = f"transformers.models.{model}.image_processing_{model}"
    own: Any = getattr(sys.modules.get(path) or _import(path), name)

    class ImageProcessor(own):  # type: ignore[misc]
        def resize(
            self, image: torch.Tensor, size: Any, resample: int, antialias: bool = True
        ) -> torch.Tensor:
            shape = size.height, size.width
            return resize(image, shape, MODES[int(resample)], antialias=antialias)

        def normalize(
            self, image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, **_: bool
        ) -> torch.Tensor:
            return (image - mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))

    ImageProcessor.__name__ = name  # the name in processors' config files
    return ImageProcessor


def _import(path: str) -> ModuleType:
    """Import a module while torchvision's functions are replaced with stubs, which are removed
    afterwards.
    """
    import_module(BACKENDS)  # first, or it would mistake the stub for torchvision
    standing = {name: ModuleType(name) for name in (*PACKAGES, FUNCTIONS)}
    functions = standing[FUNCTIONS]
    vars(functions).update(resize=resize, pad=pad)
    vars(standing[PACKAGES[-1]]).update(functional=functions)
    sys.modules.update(standing)
    try:
        return import_module(path)
    finally:
        for name in standing:
            del sys.modules[name]


def processor_class(own: Any, images: Any) -> Any:
    """Return a processor class that loads the image processor class `images` and a tokenizer."""

    class Processor(own):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, folder: str, *_: Any, **told: Any) -> list[Any]:
            """Load the image processor and the tokenizer.

            told: values that override fields of the image processor.
            """
            tokenizers: Any = transformers.AutoTokenizer
            return [images.from_pretrained(folder, **told), tokenizers.from_pretrained(folder)]

    Processor.__name__ = own.__name__
    return Processor


def cohere2_images() -> Any:
    """Return the class of Cohere2-Vision's image processor."""
    return image_processor_class("cohere2_vision", "Cohere2VisionImageProcessor")


def cohere2_processor() -> Any:
    """Return the class of Cohere2-Vision's processor for images and text."""
    return processor_class(transformers.Cohere2VisionProcessor, cohere2_images())
