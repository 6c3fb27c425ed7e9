"""Builds the prompts for comparing a model with Saccade at load: text only, and text with images.

Each prompt is built both by the model's own processor and by Saccade. `trial.py` compares the
results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from saccade.core.family import put_spaces
from saccade.core.recipe import PreprocessParams
from saccade.core.types import Image, ImageKey, Size, Span
from saccade.plugins.any_model.facts import SizeFacts
from saccade.plugins.any_model.parity import checkered
from saccade.plugins.any_model.pixels import draw
from saccade.plugins.any_model.processor import ask_text, load_processor
from saccade.plugins.any_model.refusals import Unservable
from saccade.plugins.any_model.spec import AnySpec

WORDS = 24
"""Number of tokens in the prompt without an image."""
MAX_IMAGES = 4
"""Maximum number of images in the prompt that contains all kinds of tokens around images."""
TEXTS = ("x", "y", "z", "x", "y")


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """One prompt, as input for both Saccade and the model's own forward pass."""

    tokens: tuple[int, ...]
    positions: npt.NDArray[np.int64]  # [axes, T]
    next_position: int  # the position of the token after it
    inputs: Mapping[str, torch.Tensor]  # the arguments of the model's own forward pass
    spans: tuple[Span, ...] = ()
    # the images' preprocessing parameters and canvases
    canvases: tuple[tuple[PreprocessParams, npt.NDArray[np.uint8]], ...] = ()

    def followed_by(self, token: int) -> ProbePrompt:
        """Return the prompt with a text token appended."""
        last = np.full((len(self.positions), 1), self.next_position)
        positions = np.concatenate((self.positions, last), axis=1)
        return replace(self, tokens=(*self.tokens, token), positions=positions)


def text_prompt(spec: AnySpec) -> ProbePrompt:
    """Build a prompt from tokens across the vocabulary, without the tokens for images."""
    images = spec.facts.images
    others = {*images.seen, *(t for each in images.sizes for t in each.tokens)} if images else set()
    usual = [token for token in range(spec.vocab_size) if token not in others]
    tokens = tuple(usual[:: max(1, len(usual) // WORDS)][:WORDS])
    positions, behind = spec.positions(tokens, (), ())
    ids = torch.tensor([tokens])
    return ProbePrompt(
        tokens, positions, behind, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    )


def marks(spec: AnySpec) -> frozenset[int]:
    """Return the IDs of tokens around an image's rows that never occur in text."""
    around = {token for each in (*spec.images.sizes, *spec.images.largest) for token in each.tokens}
    added = load_processor(spec.processor).tokenizer.added_tokens_decoder
    return frozenset(around & added.keys() - {spec.images.content})


def few_sizes(spec: AnySpec) -> tuple[Size, ...]:
    """Return a tuple with one size at which an image has few tokens."""
    return (_by_tokens(spec)[0].size,)


def telling_sizes(spec: AnySpec) -> tuple[Size, ...]:
    """Return at least three small sizes at which images have all kinds of tokens around them."""
    known = _by_tokens(spec)
    found, seen = [known[0]], set(known[0].tokens)
    for each in (known[1], *known[2:]):
        if len(found) == 1 or (len(found) < MAX_IMAGES and not seen.issuperset(each.tokens)):
            found.append(each)
            seen.update(each.tokens)
    return tuple(each.size for each in (*found, known[0]))


def _by_tokens(spec: AnySpec) -> list[SizeFacts]:
    """Return the known sizes, ordered by the number of tokens.

    Sizes with a single image row are last, because the code of some models treats one row as no
    image.
    """
    images = spec.images
    return sorted(
        (*images.sizes, *images.largest),
        key=lambda each: (each.tokens.count(images.content) == 1, len(each.tokens), each.size),
    )


def image_prompt(
    spec: AnySpec, sizes: Sequence[Size], dtype: torch.dtype, *, apart: bool = False
) -> ProbePrompt:
    """Build a prompt with one image between letters, or with several images.

    If there are several, the first two start the prompt and are adjacent, and the last one ends it.
    With `apart`, there are letters between all of them.

    Raises Unservable if the processor's tokens differ from Saccade's, and any exception of the
    processor.
    """
    processor = load_processor(spec.processor)
    pixels = [checkered(size) for size in sizes]
    image = processor.image_token
    text = TEXTS[0] + image + TEXTS[1]
    if len(sizes) > 1:
        between = TEXTS if apart else ("", *TEXTS)
        text = image + "".join(text + image for text, _ in zip(between, sizes[1:]))
    made = ask_text(processor, text, [PIL.Image.fromarray(each) for each in pixels])
    recipes = [spec.recipe(*size, spec.pixel_bounds) for size in sizes]
    images = [
        Image(ImageKey(bytes([at] * 32), bytes(16)), each.grid, each.grid[0], 1, each.canvas)
        for at, each in enumerate(recipes)
    ]
    if mark := spec.templates.spaced:
        text = put_spaces(text, mark)
    plain = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens, spans = spec.expand_prompt(plain, images)
    if list(tokens) != made["input_ids"][0].tolist():
        raise Unservable("its processor writes unknown tokens around images")
    blocks = [spec.image_positions(each.grid) for each in images]
    positions, behind = spec.positions(tokens, spans, blocks)
    inputs = {
        name: each.to(dtype) if each.is_floating_point() and not name.endswith("mask") else each
        for name, each in made.items()
        if isinstance(each, torch.Tensor) and name != "token_type_ids"
    }
    canvases = []
    for recipe, each in zip(recipes, pixels, strict=True):
        canvas = np.zeros((*recipe.canvas, 3), np.uint8)
        assert recipe.own is not None
        draw(canvas, recipe.own.argument, each)
        canvases.append((recipe, canvas))
    return ProbePrompt(tokens, positions, behind, inputs, spans, tuple(canvases))
