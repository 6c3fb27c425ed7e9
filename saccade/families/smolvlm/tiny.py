"""Tiny SmolVLM and Idefics3 checkpoints, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from saccade_bench.fixtures.references import Reference, resize_planes
from saccade_bench.fixtures.tiny import BLANK_LINES, CORPUS, TEXT, TOWER, Ids, Layout, Options, Tiny

SPECIAL = (
    *("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
CHAT_TEMPLATE = """\
<|im_start|>{% for message in messages %}{{ message.role | capitalize }}\
{% if message.content[0].type == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for line in message.content %}{% if line.type == 'text' %}{{ line.text }}\
{% elif line.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


class SplitProcessor(Idefics3ImageProcessorPil):
    """transformers' processor, resizing as its torchvision backend does: by torch's Lanczos."""

    def resize(self, image: np.ndarray, size: Any, *_: Any, **__: Any) -> np.ndarray:
        """Planes uint8 [3, H, W]."""
        target = (size.height, size.width)
        if size.longest_edge:
            target = get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
        return resize_planes(image, target, "lanczos")


class SplitReference(Reference):
    """transformers on a SmolVLM or Idefics3 checkpoint, float32.

    `pixels` are canvases: tiles side by side, the whole image under the first of the
    last row, and black beside that.
    """

    placeholder = "<image>"

    @property
    def side(self) -> int:
        """Pixels of a tile."""
        side: int = self.processor.max_image_size["longest_edge"]
        return side

    def resize(self, picture: np.ndarray) -> np.ndarray:
        made = self.processor(
            [[PIL.Image.fromarray(picture)]],
            do_rescale=False,
            do_normalize=False,
            return_row_col_info=True,
            return_tensors="np",
        )
        tiles = made.pixel_values[0].transpose(0, 2, 3, 1)  # [tiles, side, side, 3]
        assert np.array_equal(tiles, tiles.astype(np.uint8))
        ((rows,),), ((columns,),) = [made["rows"]], [made["cols"]]
        side, split = self.side, tiles[:-1].astype(np.uint8)
        last = np.zeros((side, side * max(1, columns[0]), 3), np.uint8)
        last[:, :side] = tiles[-1]
        if not rows[0]:
            return last
        apart = split.reshape(rows[0], columns[0], side, side, 3).transpose(0, 2, 1, 3, 4)
        return np.concatenate((apart.reshape(rows[0] * side, -1, 3), last))

    def cut(self, canvas: np.ndarray) -> tuple[int, int]:
        """Return rows and columns of tiles."""
        rows = canvas.shape[0] // self.side - 1
        return rows, (canvas.shape[1] // self.side if rows else 0)

    def widened(self, image: np.ndarray) -> str:
        config = self.model.config
        count = (self.side // config.vision_config.patch_size // config.scale_factor) ** 2
        text: str = get_image_prompt_string(
            *self.cut(image), count, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        return text

    def values(self, pixels: Sequence[np.ndarray]) -> torch.Tensor:
        """Of all tiles."""
        tiles = []
        for canvas in pixels:
            (rows, columns), side = self.cut(canvas), self.side
            apart = canvas.reshape(-1, side, max(1, columns), side, 3).transpose(0, 2, 1, 3, 4)
            tiles.append(apart.reshape(-1, side, side, 3)[: rows * columns + 1])
        return self.normal(np.concatenate(tiles))[None]

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        found = []
        for canvas in pixels:
            features = self.model.model.get_image_features(self.values([canvas])).pooler_output
            found.append(torch.cat(list(features)).flatten(0, -2))
        return found


def beyond(side: int, edge: int) -> Options:
    """Options of a checkpoint whose tiles have pixels beyond the last whole patch."""
    sizes = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": side}}
    return {"vision": {"image_size": side}, "processor": sizes}


class SmolTiny(Tiny):
    """SmolVLM. An image has at most 3 x 3 tiles of 4 tokens.

    side: pixels of a tile; edge: of an image's longer edge. merge: patches along a token's edge.
    """

    architecture = "SmolVLMForConditionalGeneration"
    tiled = True
    reference_class = SplitReference
    processor_class = SplitProcessor
    side, edge, patch, merge = 64, 192, 8, 4
    special = SPECIAL
    corpus = (CORPUS, BLANK_LINES)
    template = CHAT_TEMPLATE
    grids = frozenset(((3, 3), (1, 3), (3, 1), (2, 3), (3, 2)))
    begin, end = "<|im_start|>", "<end_of_utterance>"
    variants = {  # noqa: RUF012
        "as it is": {},
        "old": {"layout": "old"},
        "tied": {"tie": True},
        "heads of their own size": {"text": {"head_dim": 24}},
        "pixels in no patch": beyond(68, 204),
    }

    def text(self, _: Ids) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 1e5}
        return TEXT | {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": rope}

    def vision(self) -> dict[str, Any]:
        return TOWER | {"image_size": self.side, "patch_size": self.patch}

    def fields(self, ids: Ids) -> dict[str, Any]:
        return {"scale_factor": self.merge, "image_token_id": ids("<image>")}

    def processor(self, _: Layout) -> dict[str, Any]:
        return {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": self.edge},
            "max_image_size": {"longest_edge": self.side},
            "do_image_splitting": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 1,
        }

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        data["text_config"]["rope_theta"] = data["text_config"].pop("rope_parameters")["rope_theta"]
        return data


class IdeficsTiny(SmolTiny):
    """Idefics3."""

    architecture = "Idefics3ForConditionalGeneration"
    side, edge, patch, merge = 56, 140, 14, 2
    variants = SmolTiny.variants | {"pixels in no patch": beyond(60, 150)}


TINY = {"idefics3": IdeficsTiny(), "smolvlm": SmolTiny()}
