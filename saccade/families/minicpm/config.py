"""MiniCPM-V 4.6's configuration, typed: what `config.json`, the image processor's file and the
tokenizer say. The language model is read as Qwen3.5's, with one axis of positions. Knows nothing of
torch.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

from saccade.core.errors import CheckpointError
from saccade.core.recipe import ImageRecipe, Resample
from saccade.families.checkpoint import Checkpoint, Section, read_json
from saccade.families.config_readers import (
    HALF,
    Colour,
    SiglipDefaults,
    read_colours,
    read_siglip,
    read_tokenizer,
)
from saccade.families.hybrid import read_hybrid
from saccade.nn.hybrid_config import HybridConfig
from saccade.nn.siglip_config import SiglipConfig
from saccade.nn.text_config import TextConfig

FAMILY = "minicpmv4_6"
SIGLIP = SiglipDefaults(hidden=768, heads=12, side=224, patch=16)
MERGES = {"16x": 4, "4x": 2}
"""By `downsample_mode`: patches along the edge of what becomes one token."""
RESAMPLES: dict[int, Resample] = {1: "pillow_lanczos", 3: "pillow_bicubic"}
"""Pillow's numbers, and Pillow's resizing."""
LARGEST_SCALE = 4096
MOST_SLICES = 100
"""No checkpoint has more than nine, of 448 x 448 pixels."""
MOST_NUMBERED = 1000
"""Images in a prompt, where each has its number before it."""
MARKS = {
    "image_token": "<|image_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
"""Where tokenizer_config.json does not name them (`extra_special_tokens`)."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceRules:
    """An image of more than `scale` x `scale` pixels is shown as a whole, in about so many, and in
    up to `most` slices of about so many each.
    """

    scale: int
    most: int
    mean: Colour
    std: Colour
    resample: Resample

    def fingerprint(self, unit: tuple[int, int], recipe: ImageRecipe) -> bytes:
        """16 bytes that differ whenever the pixels handed to the encoder may differ. unit: pixels
        of a patch's edge, patches of a token's.
        """
        named = repr((FAMILY, unit, self.mean, self.std, recipe)).encode()
        return hashlib.blake2b(named, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class MergingTower:
    """SigLIP, and the layer behind which 2 x 2 patches become one, where a token is of 4 x 4
    (`siglip.merge`). `siglip.side` is that of the square of learned positions, in pixels.
    """

    siglip: SiglipConfig
    insert: int

    @property
    def halves(self) -> bool:
        """True if 2 x 2 patches become one within the tower."""
        return self.siglip.merge == 4

    @property
    def layers_after(self) -> int:
        """Layers that a quarter of the rows pass."""
        return self.siglip.depth - self.insert - 1 if self.halves else 0

    @property
    def blocks(self) -> int:
        """The tower's cost, in layers that all patches pass: two and a bit are those between."""
        after = self.layers_after
        return self.siglip.depth - after + (1 - -after // 4 if self.halves else 0)


@dataclass(frozen=True, slots=True)
class SliceText:
    """Token ids around an image and its slices in the prompt. `content` stands in the template for
    an image, and then once for each row of its embedding.

    numbers[k]: before the k-th image of a prompt; none where images are not numbered. line: between
    rows of slices.
    """

    content: int
    numbers: tuple[Ids, ...]
    image: tuple[int, int]
    slice: tuple[int, int]
    line: Ids


@dataclass(frozen=True, slots=True)
class MiniCPMConfig:
    """All that the JSON files say."""

    vision: MergingTower
    text: TextConfig
    hybrid: HybridConfig
    slices: SliceRules
    image_text: SliceText


def parse_config(checkpoint: Checkpoint) -> MiniCPMConfig:
    """Raises CheckpointError naming file and field."""
    config = checkpoint.config
    kind = config.text("model_type", default=FAMILY)
    if kind != FAMILY:
        raise CheckpointError(f"{config.where}: model_type {kind!r} is not supported ({FAMILY} is)")
    text, hybrid = _text(config, config.section("text_config"))
    vision = _vision(config, text.hidden)
    slices = _slices(checkpoint, vision)
    return MiniCPMConfig(vision, text, hybrid, slices, _image_text(checkpoint, text.vocab_size))


def _text(config: Section, text: Section) -> tuple[TextConfig, HybridConfig]:
    """Positions are places in the prompt: the axes of Qwen3.5's are all alike."""
    kind = text.text("model_type", default="qwen3_5_text")
    if kind != "qwen3_5_text":
        raise CheckpointError(
            f"{text.where}: model_type {kind!r} is not supported (qwen3_5_text is)"
        )
    model, hybrid = read_hybrid(config, text, axes=1)
    # Files say it of the language model alone, too: the network looks whether there is a head.
    return replace(model, tied=model.tied or text.flag("tie_word_embeddings")), hybrid


def _vision(config: Section, out: int) -> MergingTower:
    section = config.section("vision_config")
    kind = section.text("model_type", default="minicpmv4_6_vision")
    if kind != "minicpmv4_6_vision":
        raise CheckpointError(f"{section.where}: model_type {kind!r} is not supported")
    siglip = read_siglip(section, 1, out, SIGLIP)
    fixed = ((section, "window_kernel_size"), (config, "merge_kernel_size"))
    for where, name in fixed:
        if (size := where.integers(name, default=(2, 2))) != (2, 2):
            raise CheckpointError(
                f"{where.where}: {name} {list(size)} is not supported ([2, 2] is)"
            )
    if (times := config.integer("merger_times", default=1)) != 1:
        raise CheckpointError(
            f"{config.where}: merger_times {times} is not supported (1 is): the image processor "
            "counts no such tokens"
        )
    if config.flag("drop_vision_last_layer"):
        raise CheckpointError(f"{config.where}: drop_vision_last_layer is not supported")
    insert = config.integer("insert_layer_id", default=6)
    if not 0 <= insert < siglip.depth:
        raise CheckpointError(
            f"{config.where}: insert_layer_id {insert} is none of the tower's {siglip.depth} layers"
        )
    return MergingTower(replace(siglip, merge=MERGES[_mode(config)]), insert)


def _mode(section: Section) -> str:
    mode = section.text("downsample_mode", default="16x")
    if mode not in MERGES:
        raise CheckpointError(
            f"{section.where}: downsample_mode {mode!r} is not supported ({' and '.join(MERGES)} "
            "are)"
        )
    return mode


def _slices(checkpoint: Checkpoint, vision: MergingTower) -> SliceRules:
    processor = checkpoint.processor
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not processor.flag(name, default=True):
            raise CheckpointError(f"{processor.where}: {name} false is not supported")
    if not math.isclose(processor.number("rescale_factor", default=1 / 255), 1 / 255):
        raise CheckpointError(f"{processor.where}: rescale_factor is not supported but for 1/255")
    patch = processor.integer("patch_size", default=14)
    if patch != vision.siglip.patch:
        raise CheckpointError(
            f"{processor.where}: patch_size is {patch}, but the vision tower was made for "
            f"{vision.siglip.patch}"
        )
    if (mode := _mode(processor)) != _mode(checkpoint.config):
        raise CheckpointError(
            f"{processor.where}: downsample_mode is {mode}, but {_mode(checkpoint.config)} in "
            "config.json"
        )
    scale = processor.count("scale_resolution", default=448)
    most = processor.count("max_slice_nums", default=9)
    for name, value, limit in (
        ("scale_resolution", scale, LARGEST_SCALE),
        ("max_slice_nums", most, MOST_SLICES),
    ):
        if value > limit:
            raise CheckpointError(f"{processor.where}: {name} must be at most {limit}, not {value}")
    if not processor.flag("slice_mode", default=True):
        most = 1
    number = processor.integer("resample", default=3)
    if number not in RESAMPLES:
        raise CheckpointError(
            f"{processor.where}: resample {number} is not supported (1 and 3 are)"
        )
    return SliceRules(scale, most, *read_colours(processor, HALF, HALF), RESAMPLES[number])


def _image_text(checkpoint: Checkpoint, vocab: int) -> SliceText:
    """As the tokenizer writes what transformers' processor puts around images."""
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = read_tokenizer(path)

    def ids(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    named = settings.data.get("extra_special_tokens")
    # Older files list these tokens without saying which is which.
    names = Section(settings.where, named if isinstance(named, dict) else {})
    marks = {}
    for field, usual in MARKS.items():
        token = names.text(field, default=usual)
        found = tokenizer.token_to_id(token)
        if found is None or ids(token) != (found,):
            raise CheckpointError(f"{path}: the tokenizer has no token {token} ({field})")
        if found >= vocab:
            raise CheckpointError(
                f"{path}: {token} ({field}) is {found}, beyond the vocabulary of {vocab} tokens"
            )
        marks[field] = found
    content = checkpoint.config.integer("image_token_id", default=marks["image_token"])
    if content != marks["image_token"]:
        raise CheckpointError(
            f"{checkpoint.config.where}: image_token_id is {content}, but the tokenizer's is "
            f"{marks['image_token']}"
        )
    numbers: tuple[Ids, ...] = ()
    if checkpoint.processor.flag("use_image_id", default=True):
        begin, end = marks["image_id_start_token"], marks["image_id_end_token"]
        numbers = tuple((begin, *ids(str(number)), end) for number in range(MOST_NUMBERED))
    return SliceText(
        content=content,
        numbers=numbers,
        image=(marks["image_start_token"], marks["image_end_token"]),
        slice=(marks["slice_start_token"], marks["slice_end_token"]),
        line=ids("\n"),
    )
