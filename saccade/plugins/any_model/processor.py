"""A checkpoint's own processor for images and text, as transformers creates it.

It runs in the process that computes sizes (`inspector.py`), and in image workers (`pixels.py`).
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
import transformers
from transformers import dynamic_module_utils
from transformers.models.auto import processing_auto

from saccade.families.checkpoint import read_json
from saccade.plugins.any_model.facts import PROCESSOR_FILES, OwnProcessor
from saccade.plugins.any_model.phi4 import phi4_processor
from saccade.plugins.any_model.without_torchvision import cohere2_processor

EXPERTS = "moe_mm_token_type_ids"
"""Name of the tensor of token types, which selects experts."""
TEXT_KEYS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", EXPERTS}
)
"""Names of the processor's outputs for text. All other outputs are for images."""
VIDEO = "video_processor"
PIXTRAL = "PixtralProcessor"
WITHOUT_TORCHVISION = {
    "Phi4MultimodalProcessor": phi4_processor,
    "Cohere2VisionProcessor": cohere2_processor,
}
"""Functions that create processors whose image processors require torchvision in transformers, by
class name.
"""
OWN_CODE = (
    "its files need their own code (auto_map), which is never run, and transformers has no class "
    "for them"
)
NO_CHOICES = frozenset(
    {"data_format", "device", "disable_grouping", "input_data_format", "return_tensors"}
)
"""Fields that control the format of tensors, not their values."""


@cache
def load_processor(own: OwnProcessor) -> Any:
    """Load the checkpoint's own processor. Raises ValueError if no processor class is known, and
    any exception of transformers.
    """
    folder, choices = own.folder, json.loads(own.choices)
    if find_spec("torchvision") is not None:
        made: Any = transformers.AutoProcessor
        return made.from_pretrained(folder, **choices)
    files = (Path(folder) / name for name in PROCESSOR_FILES)
    config = read_json(Path(folder) / "config.json").data
    said = [read_json(file, required=False).data.get("processor_class") for file in files]
    names: Any = processing_auto
    said.append(names.PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type"))))
    name = next(filter(None, said), None)
    if name is None or not hasattr(transformers, name):
        raise ValueError(f"its processor class is not in transformers ({name})")
    return processor_class(name).from_pretrained(folder, **choices)


def known_choices(processor: Any) -> set[str]:
    """Return the names of the image processor's fields that a server may set."""
    return {*processor.image_processor.valid_kwargs.__annotations__} - NO_CHOICES


def processor_class(name: str) -> Any:
    """Return transformers' processor class of this name, adapted to run without torchvision."""
    if name in WITHOUT_TORCHVISION:
        return WITHOUT_TORCHVISION[name]()
    if name != PIXTRAL:
        return stills_only(getattr(transformers, name))
    # It imports a function from torchvision's image processor. Pillow's has the same function.
    pillow = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pillow)
    return import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


def stills_only(kind: Any) -> Any:
    """Return a subclass of a processor class without a video processor, which would require
    torchvision.
    """
    attributes = kind.get_attributes()
    if VIDEO not in attributes:
        return kind
    at = attributes.index(VIDEO)

    def without(_: Any) -> list[str]:
        return [each for each in attributes if each != VIDEO]

    def arguments(made: Any, *args: Any, **more: Any) -> list[Any]:
        found: list[Any] = super(kind, made)._get_arguments_from_pretrained(*args, **more)
        return [*found[:at], None, *found[at:]]

    own = {
        "get_attributes": classmethod(without),
        "_get_arguments_from_pretrained": classmethod(arguments),
    }
    return type(kind.__name__, (kind,), own)


def quiet() -> None:
    """Limit transformers' logging to errors, and disable its prompts."""
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # seconds to wait at "run the custom code? [y/N]"


def said(error: Exception) -> str:
    """Return the message of an error from transformers.

    If it advises to run the checkpoint's own code, the advice is replaced with `OWN_CODE`.
    """
    words = str(error)
    return OWN_CODE if "trust_remote_code" in words else words


def ask_image(processor: Any, image: PIL.Image.Image) -> Any:
    """Run a processor on one image without text, and return its output."""
    return ask_text(processor, processor.image_token, [image])


def ask_text(processor: Any, text: str, images: list[PIL.Image.Image]) -> Any:
    """Run a processor on a prompt that contains a placeholder for each image, and return its
    output.
    """
    return processor(images=images, text=[text], return_tensors="pt", add_special_tokens=False)


def process(processor: Any, pixels: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors that a processor computes from one image, uint8 [H, W, 3]."""
    made = ask_image(processor, PIL.Image.fromarray(pixels))
    return {name: each.numpy() for name, each in made.items() if isinstance(each, torch.Tensor)}
