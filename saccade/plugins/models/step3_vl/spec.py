"""Step3-VL's `FamilySpec`: sizes, and prompts with markers per view.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.core.types import Image
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import DecoderSpec, Ids, ImagePiece, Placeholder
from saccade.families.kit.config_readers import read_token, read_tokenizer
from saccade.nn.shapes import TextConfig
from saccade.plugins.models.step3_vl.config import PerceptionConfig, read_text, read_vision
from saccade.plugins.models.step3_vl.images import CropRules, read_images


@dataclass(frozen=True, slots=True, kw_only=True)
class CropPlaceholder(Placeholder):
    """Expands to the tokens of an image: each crop between two markers, and the whole image between
    two other markers.
    """

    rules: CropRules
    crop: tuple[Ids, Ids]  # before and after a crop
    line: Ids  # after each row of crops but the last

    def pieces(self, _number: int | None, image: Image) -> Sequence[ImagePiece]:
        _, columns = image.grid
        *crops, whole = self.rules.view_tokens(image.grid)
        begin, end = self.crop
        pieces = [
            ImagePiece(begin, length, end + self.line * (at % columns == 0 and at < len(crops)))
            for at, length in enumerate(crops, start=1)
        ]
        return (*pieces, ImagePiece(self.before, whole, self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step3VLSpec(DecoderSpec):
    """Step3-VL's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: PerceptionConfig
    text: TextConfig
    images: CropRules


def step3_vl_spec(checkpoint: Checkpoint) -> Step3VLSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = config.section("text_config")
    text = read_text(config, section)
    vision = read_vision(config, text.hidden)
    images = read_images(checkpoint.processor, vision)
    return Step3VLSpec(
        family="step3_vl",
        vision=vision,
        text=text,
        images=images,
        tiles=images,
        placeholder=_placeholder(checkpoint, images, text.vocab_size),
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )


def _placeholder(checkpoint: Checkpoint, images: CropRules, vocab: int) -> CropPlaceholder:
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = read_tokenizer(path)

    def mark(name: str) -> Ids:
        if (found := tokenizer.token_to_id(name)) is None:
            raise CheckpointError(f"{path}: the tokenizer has no {name}")
        return (found,)

    return CropPlaceholder(
        marks=(read_token(checkpoint.config, vocab, "image_token_id", default=151679),),
        before=mark("<im_start>"),
        after=mark("<im_end>"),
        rules=images,
        crop=(mark("<patch_start>"), mark("<patch_end>")),
        line=mark("<patch_newline>"),
    )
