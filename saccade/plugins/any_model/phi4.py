"""Phi-4-multimodal's processor for images and text, for use without torchvision.

It is transformers' own processor without its audio part.
"""

from __future__ import annotations

from typing import Any

import transformers

from saccade.plugins.any_model.without_torchvision import (
    image_processor_class,
    processor_class,
)


def phi4_images() -> Any:
    """Return the class of Phi-4-multimodal's image processor."""
    return image_processor_class("phi4_multimodal", "Phi4MultimodalImageProcessor")


def phi4_processor() -> Any:
    """Return the class of Phi-4-multimodal's processor for images and text."""
    own: Any = transformers.Phi4MultimodalProcessor

    class Phi4MultimodalProcessor(own):  # type: ignore[misc]
        """A processor with two parts: an image processor and a tokenizer."""

        def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
            self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
            self.audio_token, self.audio_token_id = tokenizer.audio_token, tokenizer.audio_token_id
            super(own, self).__init__(image_processor, tokenizer, **more)

    return processor_class(Phi4MultimodalProcessor, phi4_images())
