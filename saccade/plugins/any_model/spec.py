"""The `FamilySpec` of checkpoints that transformers' own modules compute.

Sizes, tokens and prompts are from the checkpoint's configuration and processor (`facts.py`). Does
not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from saccade.core.decoders import json_decoder
from saccade.core.errors import CheckpointError, ConfigError, ImageError
from saccade.core.family import Cuts, KVSpec, LargestImage, PixelBounds, Templates, heads_cache
from saccade.core.recipe import OwnPixels, PreprocessParams
from saccade.core.types import Grid, Image, Span
from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.kit.base_spec import check_count, fingerprint
from saccade.families.kit.config_readers import text_section
from saccade.plugins.any_model.facts import (
    ImageFacts,
    Inspector,
    ModelFacts,
    OwnProcessor,
    ProcessorPixels,
    SizeFacts,
    SizeTable,
    box_positions,
    content_spans,
    counted,
    processing,
    read_facts,
    with_images,
)
from saccade.plugins.any_model.pixel_tensors import PixelTensor, canvas_size
from saccade.plugins.any_model.proven import PROVEN

FOLDER = "transformers_any"
"""The family's name in preprocessing parameters."""
SOURCE_BYTES = 24
"""Estimated memory of a processor, in bytes per pixel of an image."""
TENSOR_COPIES = 8
"""Estimated memory of a processor for its output tensors, as a multiple of their size."""
MAX_PIXELS = 2**31 - 1
"""Maximum pixels of an image: none, because the processor has its own bounds, which cannot be
narrowed here.
"""
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "depth")
"""The names that configurations use for the number of layers of a language model or vision
encoder.
"""
WHOLE = "language model (transformers' modules)"
"""Names the part that cannot be sharded over ranks, in messages."""


@dataclass(frozen=True, slots=True)
class AnySpec:
    """The `FamilySpec` of any model: sizes, prompt expansion and positions, importable without
    torch.

    The grid of an image is: (rows of its embedding, height, width, rows of its canvas), then its
    extent along each axis if positions have several axes, then the concatenated shapes of its
    tensors by kind, with 0s for a missing tensor.
    """

    folder: Path
    processor: OwnProcessor
    processing: str  # from `facts.processing`
    facts: ModelFacts
    sizes: SizeTable
    eos_token_ids: tuple[int, ...]
    dtype: str
    long: bool = False  # rotate texts of any length by the factors for long ones

    family = "transformers_any"
    supports_cuda_graphs = False  # transformers' modules read values on the host
    video = None
    tiles = None
    patch_unit = 1
    encoder_blocks = 1

    def with_options(self, options: Mapping[str, str]) -> AnySpec:
        """Return a copy of this spec with the option rope=long or rope=short, and with fields for
        the image processor.

        Only models that rotate long texts differently support `rope`. Other options override fields
        of the image processor. Their values are JSON or plain text.

        Raises ConfigError if an option is unknown.
        """
        choices, rope = dict(options), "short"
        if self.facts.text.near is not None:
            rope = choices.pop("rope", rope)
        if rope not in ("long", "short"):
            has = f"{self.facts.architecture} supports rope=long and rope=short"
            raise ConfigError(f"--family-option rope={rope}: {has}")
        spec = replace(self, long=rope == "long")
        return spec._with_choices(choices) if choices else spec

    def _with_choices(self, options: Mapping[str, str]) -> AnySpec:
        said = ", ".join(f"{name}={value}" for name, value in options.items())
        if not self.sees_images:
            raise ConfigError(
                f"--family-option {said}: {self.facts.architecture} supports only text, so it has "
                "no image options"
            )
        choices = {name: _json_or_text(value) for name, value in options.items()}
        processor = replace(self.processor, choices=json.dumps(choices, sort_keys=True))
        try:
            facts, sizes = _ask(processor)
        except CheckpointError as error:
            raise ConfigError(f"--family-option {said}: {error}") from None
        return replace(self, processor=processor, facts=facts, sizes=sizes)

    @property
    def unproven(self) -> str:
        name = self.facts.architecture
        return "" if name in PROVEN else name

    @property
    def templates(self) -> Templates:
        images = self.facts.images
        return Templates(spaced=images.mark if images and images.joints.spaced else "")

    @property
    def sees_images(self) -> bool:
        return self.facts.images is not None

    @property
    def images(self) -> ImageFacts:
        assert self.facts.images is not None, "a model that sees no images is asked for none"
        return self.facts.images

    def kv_spec(self, _ranks: int = 1) -> KVSpec:
        text = self.facts.text
        sizes = text.kv_heads, text.head_dim, 1
        windows = text.windows or (None,) * text.layers
        return KVSpec(tuple(heads_cache(*sizes, window=window) for window in windows))

    @property
    def cuts(self) -> Cuts:
        text, images = self.facts.text, self.facts.images
        return Cuts(
            text=((1, WHOLE),),
            heads=text.heads,
            kv_heads=text.kv_heads,
            encoder=((1, "vision encoder (transformers' modules)"),),
            encoder_width=images.hidden if images else 0,
        )

    @property
    def vocab_size(self) -> int:
        return self.facts.text.vocab_size

    @property
    def context_length(self) -> int:
        text = self.facts.text
        return text.context_length if text.near is None or self.long else text.near

    @property
    def hidden_size(self) -> int:
        return self.facts.text.hidden

    @property
    def embedding_width(self) -> int:
        images = self.facts.images
        levels = 1 if images is None or images.deepstack is None else images.deepstack.levels
        return self.facts.text.hidden * levels

    @property
    def position_axes(self) -> int:
        return self.facts.text.axes

    @property
    def pixel_bounds(self) -> PixelBounds:
        return PixelBounds(1, 1, MAX_PIXELS if self.sees_images else 0)

    @property
    def largest_image(self) -> LargestImage:
        if self.facts.images is None:
            return LargestImage(0, 0)
        recipes = [self._recipe(facts) for facts in self.images.largest]
        pixels = max(recipe.canvas[0] * recipe.canvas[1] for recipe in recipes)
        return LargestImage(pixels * 3 // 2, max(self._rows(each) for each in recipes) * 3 // 2)

    @property
    def sample(self) -> PreprocessParams:
        return self.recipe(64, 64, self.pixel_bounds)

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> PreprocessParams:
        if bounds != self.pixel_bounds:
            raise ImageError(
                "min_pixels and max_pixels are not supported by this model, whose own processor "
                "resizes images: omit them"
            )
        recipe, most = self._recipe(self.sizes.facts((height, width))), self.largest_image
        if self._rows(recipe) > most.tokens or recipe.canvas[0] * recipe.canvas[1] > most.pixels:
            raise ImageError(
                f"an image of {width} x {height} px becomes {self._rows(recipe)} tokens and "
                f"{recipe.canvas[0] * recipe.canvas[1]} pixels; the limits are {most.tokens} and "
                f"{most.pixels}: resize it",
                code="image_too_large",
            )
        return recipe

    def _recipe(self, facts: SizeFacts) -> PreprocessParams:
        canvas, rows = canvas_size(facts.tensors), facts.tokens.count(self.images.content)
        found = {each.name: each.shape for each in facts.tensors}
        shapes = [n for name, _, dims in self.images.kinds for n in found.get(name, (0,) * dims)]
        grid = (rows, *facts.size, canvas[0], *facts.box, *shapes)
        told = msgspec.json.encode(ProcessorPixels(self.processor, facts.tensors)).decode()
        copies = TENSOR_COPIES * sum(each.nbytes for each in facts.tensors)
        own = OwnPixels(FOLDER, told, canvas, SOURCE_BYTES, copies)
        return PreprocessParams(canvas, grid, (), own=own)

    def _rows(self, recipe: PreprocessParams) -> int:
        return recipe.grid[0]

    def settings(self, recipe: PreprocessParams) -> bytes:
        how = self.facts.model_type, self.processing, self.processor.choices
        assert recipe.own is not None
        told = json_decoder(ProcessorPixels).decode(recipe.own.argument)
        return fingerprint(*how, recipe.grid, told.tensors)

    def tensors(self, grid: Grid) -> tuple[PixelTensor, ...]:
        """Return the descriptions of the tensors in an image's canvas."""
        found, shapes = [], iter(grid[4 + self._box_axes :])
        for name, dtype, dims in self.images.kinds:
            shape = tuple(islice(shapes, dims))
            if dims == 0 or any(shape):
                found.append(PixelTensor(name, dtype, shape))
        return tuple(found)

    def num_tokens(self, grid: Grid) -> int:
        return grid[0]

    def num_patches(self, grid: Grid) -> int:
        """Return the number of rows of the canvas, which approximates the cost of encoding the
        image.
        """
        return grid[3]

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], _times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        known = self.facts.images
        found = [at for at, token in enumerate(tokens) if known and token == known.placeholder]
        check_count(len(found), len(images))
        if known is None:
            return tuple(tokens), ()
        shown = [self._shown(image) for image in images]
        expanded, segments = with_images(tokens, known.placeholder, shown, known.joints.shared)
        spans: list[Span] = []
        for number, (start, _, written) in enumerate(segments):
            spans += content_spans(shown[number], known.content, start - written, number)
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span], images: Sequence[Image]) -> int:
        done = 0
        for number, run in groupby(spans, lambda span: span.image):
            of_image, shown = list(run), self._shown(images[number])
            runs = content_spans(shown, self.images.content)
            begin = max(done, of_image[0].start - runs[0].start)  # adjacent images may share tokens
            if begin >= at:
                break
            done = of_image[-1].end + len(shown) - runs[-1].end
            at += done - begin - 1
        return at

    def _shown(self, image: Image) -> tuple[int, ...]:
        return self.sizes.facts((image.grid[1], image.grid[2])).tokens

    @property
    def _box_axes(self) -> int:
        return self.position_axes if self.position_axes > 1 else 0

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        if not self._box_axes:
            return np.arange(self.num_tokens(grid))[None]
        return box_positions(grid[4 : 4 + self._box_axes])

    def positions(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the position of each token, and the next position.

        With one axis, positions are indices in the prompt.
        """
        if not self._box_axes:
            return np.arange(len(tokens))[None], len(tokens)
        return counted(len(tokens), spans, blocks, self.position_axes)


def check_depths(config: Section) -> None:
    """Raise CheckpointError if the language model or vision encoder has an implausible number of
    layers.

    Otherwise, transformers would create all of them before it finds that their tensors are missing.
    """
    parts = [name for name, value in config.data.items() if isinstance(value, dict)]
    for part in (config, *map(config.section, parts)):
        for name in LAYERS:
            if isinstance(value := part.data.get(name), int) and value > 0:
                part.layers(name)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _ask(processor: OwnProcessor) -> tuple[ModelFacts, SizeTable]:
    """Return the facts about a model, and the table of its image sizes.

    Raises CheckpointError with the reason if it cannot be served.
    """
    inspector = Inspector(processor)
    facts = read_facts(processor, inspector)
    known = {each.size: each for each in facts.images.sizes} if facts.images else {}
    return facts, SizeTable(inspector, known)


def transformers_spec(checkpoint: Checkpoint) -> AnySpec:
    """Create a checkpoint's spec with transformers.

    Raises CheckpointError with the reason if it cannot be served.
    """
    check_depths(checkpoint.config)
    processor = OwnProcessor(str(checkpoint.folder))
    facts, sizes = _ask(processor)
    text = text_section(checkpoint.config)
    return AnySpec(
        folder=checkpoint.folder,
        processor=processor,
        processing=processing(checkpoint.folder),
        facts=facts,
        sizes=sizes,
        eos_token_ids=checkpoint.eos_token_ids(text),
        dtype=checkpoint.dtype(text),
    )
