"""The tokens that images become in a prompt, in place of one placeholder each.

Knows nothing of templates or of text (`text/prompt.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from saccade.core.errors import InvalidRequest
from saccade.core.types import Image, Span

Ids = tuple[int, ...]


class ImagePiece(NamedTuple):
    """`length` rows of an image's embedding in the prompt, between the tokens around them."""

    before: Ids
    length: int
    after: Ids = ()


@dataclass(frozen=True, slots=True)
class Placeholder:
    """An image is `before`, a token for each row of its embedding, `after`.

    marks: tokens that stand for an image in templates; none: the model sees no images. row: stands
    for each row; None: the mark does.
    """

    marks: Ids
    row: int | None = None
    before: Ids = ()
    after: Ids = ()

    def pieces(self, _number: int, image: Image) -> Sequence[ImagePiece]:
        """Return what the image of that number in the prompt becomes, at least one piece."""
        return (ImagePiece(self.before, image.num_tokens, self.after),)

    def expand(
        self, tokens: Sequence[int], images: Sequence[Image], times: Sequence[int | None] = ()
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """As `FamilySpec.expand_prompt`."""
        found = [at for at, token in enumerate(tokens) if token in self.marks]
        check_count(len(found), len(images))
        expanded: list[int] = []
        spans: list[Span] = []
        done = 0
        for number, (at, image) in enumerate(zip(found, images)):
            expanded += tokens[done:at]
            row, offset = tokens[at] if self.row is None else self.row, 0
            time = times[number] if times else None
            for before, length, after in self.pieces(number, image):
                expanded += before
                spans.append(Span(len(expanded), length, number, offset, time))
                expanded += (*[row] * length, *after)
                offset += length
            done = at + 1
        expanded += tokens[done:]
        return tuple(expanded), tuple(spans)

    def widened(self, at: int, spans: Sequence[Span], images: Sequence[Image]) -> int:
        """As `FamilySpec.widened`."""
        for number, group in groupby(spans, lambda span: span.image):
            of_image, pieces = list(group), self.pieces(number, images[number])
            start = of_image[0].start - len(pieces[0].before)
            if start >= at:
                break
            at += of_image[-1].end + len(pieces[-1].after) - start - 1
        return at


BLIND = Placeholder(())
"""That of a model without a vision tower: every token is text."""


def check_count(placeholders: int, images: int) -> None:
    """Raise InvalidRequest unless each image has a placeholder, and the other way round."""
    if placeholders != images:
        raise InvalidRequest(
            f"the prompt has {placeholders} image placeholders for {images} images",
            param="messages",
        )
