"""What can be said of a MiniCPM-V 4.6 checkpoint without tensors: slices, token counts, prompt
expansion, what is kept of each token or sequence.

An image keeps its shape; a large one is shown as a whole, and in a grid of slices. Its number among
the images of a prompt stands before it as text, so that the image itself is the same at any place.
A token's position is its place in the prompt. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from saccade.core.errors import ConfigError, ImageError, InvalidRequest
from saccade.core.family import Cuts, KVSpec, LargestImage, PixelBounds, Templates
from saccade.core.recipe import ImageRecipe, ImageView
from saccade.core.types import Grid, Image, Span
from saccade.families.checkpoint import Checkpoint
from saccade.families.hybrid import hybrid_caches, hybrid_cuts
from saccade.families.minicpm.config import (
    FAMILY,
    MERGES,
    MergingTower,
    SliceRules,
    SliceText,
    parse_config,
)
from saccade.families.minicpm.slices import most_of_all, slice_grid, slice_size, view_size
from saccade.nn.hybrid_config import HybridConfig
from saccade.nn.text_config import TextConfig

LONGEST_ASPECT = 200
"""Beyond this, views would be of one line, of thousands of tokens."""
BLACK = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class MiniCPMSpec:
    """CPU facts of one checkpoint; implements `core.family.FamilySpec`.

    The grid of an image is the tokens down and across of the whole; where there are slices, also
    their rows and columns, and the tokens down and across of one. On the canvas the slices lie side
    by side under the whole image, and nothing beside the narrower of both.
    """

    vision: MergingTower
    text: TextConfig
    hybrid: HybridConfig
    slices: SliceRules
    image_text: SliceText
    eos_token_ids: tuple[int, ...]
    dtype: str

    family = FAMILY
    templates = Templates()
    position_axes = 1
    sees_images = True
    video = None

    def with_options(self, options: Mapping[str, str]) -> MiniCPMSpec:
        spec = self
        for name, value in options.items():
            if name != "downsample_mode" or value not in MERGES:
                raise ConfigError(
                    f"--family-option {name}={value}: {self.family} has downsample_mode, which is "
                    f"{' or '.join(MERGES)}"
                )
            siglip = replace(spec.vision.siglip, merge=MERGES[value])
            spec = replace(spec, vision=replace(spec.vision, siglip=siglip))
        return spec

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        return KVSpec(hybrid_caches(self.text, self.hybrid, ranks))

    @property
    def encoder_blocks(self) -> int:
        return self.vision.blocks

    @property
    def cuts(self) -> Cuts:
        text, vision = self.text, self.vision.siglip
        return Cuts(
            text=hybrid_cuts(text, self.hybrid.delta),
            heads=text.heads,
            kv_heads=text.kv_heads,
            encoder=(
                (vision.heads, "vision attention heads"),
                (vision.intermediate, "vision MLP values"),
                (4 * vision.hidden, "values of merged patches"),
            ),
            encoder_width=vision.hidden,
        )

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def context_length(self) -> int:
        return self.text.context_length

    @property
    def hidden_size(self) -> int:
        return self.text.hidden

    @property
    def embedding_width(self) -> int:
        return self.text.hidden

    # ---- images

    @property
    def unit(self) -> int:
        """Pixels along the edge of a token."""
        return self.vision.siglip.patch * self.vision.siglip.merge

    @property
    def pixel_bounds(self) -> PixelBounds:
        """In slices: each counts as `scale` x `scale` pixels, whatever its shape."""
        area = self.slices.scale**2
        return PixelBounds(area, area, self.slices.most * area)

    @property
    def largest_image(self) -> LargestImage:
        """Bounds, not reached."""
        tokens = most_of_all(self.slices.scale, self.unit, self.slices.most, LONGEST_ASPECT)
        # Beside the narrower of the whole image and its slices lies as much again, at most.
        return LargestImage(2 * tokens * self.unit**2, tokens)

    @property
    def sample(self) -> ImageRecipe:
        return self._recipe((self.slices.scale,) * 2, (0, 0))

    @property
    def patch_unit(self) -> int:
        return self.vision.siglip.merge**2

    def recipe(self, height: int, width: int, bounds: PixelBounds) -> ImageRecipe:
        if max(height, width) > LONGEST_ASPECT * min(height, width):
            raise ImageError(
                f"the image is {width} x {height} px: its longer edge is more than "
                f"{LONGEST_ASPECT} times the shorter; crop it"
            )
        area = self.slices.scale**2
        most = min(self.slices.most, max(1, bounds.max_pixels // area))
        least = min(most, -(-bounds.min_pixels // area))
        grid = slice_grid((height, width), self.slices.scale, least, most)
        return self._recipe((height, width), grid)

    def _recipe(self, size: tuple[int, int], slices: tuple[int, int]) -> ImageRecipe:
        scale, unit = self.slices.scale, self.unit
        rows, columns = slices
        whole = view_size(size, scale, unit, enlarge=not rows)
        views, grid, canvas = [ImageView(whole)], _tokens(whole, unit), whole
        if rows:
            height, width = slice_size(size, slices, scale, unit)
            views.append(ImageView((rows * height, columns * width), at=(whole[0], 0)))
            grid += (*slices, *_tokens((height, width), unit))
            canvas = (whole[0] + rows * height, max(whole[1], columns * width))
        covered = not rows or whole[1] == columns * width
        fill = None if covered else BLACK
        return ImageRecipe(canvas, grid, tuple(views), fill, self.slices.resample)

    def settings(self, recipe: ImageRecipe) -> bytes:
        siglip = self.vision.siglip
        return self.slices.fingerprint((siglip.patch, siglip.merge), recipe)

    def num_tokens(self, grid: Grid) -> int:
        return sum(view_tokens(grid))

    def num_patches(self, grid: Grid) -> int:
        return self.num_tokens(grid) * self.vision.siglip.merge**2

    # ---- prompts

    def expand_prompt(
        self, tokens: Sequence[int], images: Sequence[Image], _times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """An image is its number, the whole between two marks, each slice between two others; a
        new line stands between rows of slices.
        """
        text = self.image_text
        found = [at for at, token in enumerate(tokens) if token == text.content]
        if len(found) != len(images):
            raise InvalidRequest(
                f"the prompt has {len(found)} image placeholders for {len(images)} images",
                param="messages",
            )
        if text.numbers and len(images) > len(text.numbers):
            raise InvalidRequest(
                f"the prompt has {len(images)} images; this model numbers at most "
                f"{len(text.numbers)}",
                param="messages",
            )
        expanded: list[int] = []
        spans: list[Span] = []
        done = 0
        for number, (at, image) in enumerate(zip(found, images)):
            expanded += (*tokens[done:at], *self._number(number))
            offset, columns = 0, image.grid[3] if len(image.grid) > 2 else 0
            for view, length in enumerate(view_tokens(image.grid)):
                begin, end = text.slice if view else text.image
                if view > 1 and (view - 1) % columns == 0:
                    expanded += text.line
                expanded.append(begin)
                spans.append(Span(len(expanded), length, number, offset=offset))
                expanded += (*[text.content] * length, end)
                offset += length
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def _number(self, image: int) -> tuple[int, ...]:
        numbers = self.image_text.numbers
        return numbers[image] if numbers else ()

    def widened(self, at: int, spans: Sequence[Span], _images: Sequence[Image]) -> int:
        for image, each in groupby(spans, lambda span: span.image):
            views = list(each)
            start = views[0].start - 1 - len(self._number(image))
            if start >= at:
                break
            at += views[-1].end + 1 - start - 1
        return at

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        return np.arange(self.num_tokens(grid))[None]

    def positions(
        self, num_tokens: int, _spans: Sequence[Span], _blocks: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Places in the prompt."""
        return np.arange(num_tokens)[None], num_tokens


def _tokens(size: tuple[int, int], unit: int) -> tuple[int, ...]:
    return size[0] // unit, size[1] // unit


def view_tokens(grid: Grid) -> list[int]:
    """Tokens of the whole image, then of each slice."""
    whole = [grid[0] * grid[1]]
    return whole if len(grid) == 2 else whole + [grid[4] * grid[5]] * (grid[2] * grid[3])


def minicpm_spec(checkpoint: Checkpoint) -> MiniCPMSpec:
    """Read a checkpoint's facts. Raises CheckpointError naming file and field."""
    parsed = parse_config(checkpoint)
    text = checkpoint.config.section("text_config")
    return MiniCPMSpec(
        vision=parsed.vision,
        text=parsed.text,
        hybrid=parsed.hybrid,
        slices=parsed.slices,
        image_text=parsed.image_text,
        eos_token_ids=checkpoint.eos_token_ids(text),
        dtype=checkpoint.dtype(text),
    )
