"""Computes pixels with a checkpoint's own processor. Runs in image workers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from saccade.core.decoders import json_decoder
from saccade.plugins.any_model.facts import ProcessorPixels
from saccade.plugins.any_model.pixel_tensors import write_tensors
from saccade.plugins.any_model.processor import load_processor, process, quiet

WARM_SIDES = (32, 400, 1200)
"""Edges of the blank images that are processed before workers are forked. This triggers all lazy
imports, because workers may not open files.
"""


def warm_up(argument: str) -> None:
    """Load the processor and everything that it imports lazily."""
    quiet()
    processor = load_processor(_read(argument).processor)
    for side in WARM_SIDES:
        assert process(processor, np.full((side, 2 * side, 3), 127, np.uint8))


def draw(out: npt.NDArray[np.uint8], argument: str, pixels: npt.NDArray[np.uint8]) -> None:
    """Process an upright image, and write the resulting tensors to the canvas `out`.

    Raises ValueError if the model's processor rejects the image.
    """
    told = _read(argument)
    processor = load_processor(told.processor)
    try:
        made = process(processor, pixels)
    except MemoryError:
        raise
    except Exception as error:  # processors may raise anything
        raise ValueError(f"the model's processor rejects it: {error}") from error
    write_tensors(out, told.tensors, made)


def _read(argument: str) -> ProcessorPixels:
    return json_decoder(ProcessorPixels).decode(argument)
