"""Late interaction: prompts of models that return one vector per token
(`core.family.LateInteraction`), and the MaxSim score between the vectors of a query and those of a
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade.core.errors import InvalidRequest
from saccade.core.family import LateInteraction
from saccade.core.given_paths import read_text
from saccade.core.types import PromptReading
from saccade.front.conversation import Chat, Message, MessageText, Part
from saccade.front.read_requests import MAX_TOKENS, ReadRequest, Vectors, WasRead, read_request
from saccade.media.sources.source import ImageSource, SentFile
from saccade.text.prompt.template import ChatTemplate, Tokenizer

MAX_VALUES = 1 << 24
"""Maximum number of values in all vectors of a request, which are 64 MiB in float32."""
MAX_PRODUCTS = 1 << 22
"""Maximum number of inner products computed at a time, which are 16 MiB in float32. A query may be
an image, so it can have many vectors.
"""
EVERY_TOKEN = PromptReading(last=MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class LateScoring:
    """Builds the prompts of one late interaction model, and computes scores. width: values per
    vector.
    """

    width: int
    template: ChatTemplate

    @classmethod
    def load(cls, late: LateInteraction, tokenizer: Tokenizer) -> LateScoring:
        sources = {"default": read_text(late.template)}
        return cls(late.width, ChatTemplate(sources, tokenizer.named_tokens))

    @property
    def max_tokens(self) -> int:
        """The maximum number of prompt tokens in a request, which is also its maximum number of
        vectors.
        """
        return min(MAX_TOKENS, MAX_VALUES // self.width)

    def read_tokens(self, tokens: tuple[int, ...], place: str, salt: str = "") -> ReadRequest:
        """Build a request for the vectors of these tokens, without a template."""
        return read_request(tokens, place, EVERY_TOKEN, salt)

    def read(
        self,
        content: Sequence[Part],
        place: str,
        salt: str = "",
        *,
        instruction: str | None = None,
        page: bool = False,
    ) -> ReadRequest:
        """Build a request for the vectors of a text, which is a query, or of one image.

        The image may be one page of a document. page: only accept an image. Raises InvalidRequest
        for other content and for an instruction, because these models were not trained with them.
        """
        if instruction:
            raise InvalidRequest(
                "instruction: this model was trained without instructions", "instruction"
            )
        texts = [part.text for part in content if isinstance(part, MessageText)]
        images = [image for part in content if (image := _image(part)) is not None]
        others = len(content) - len(texts) - len(images)
        if others or len(images) > 1 or bool(images) == bool(texts):
            raise InvalidRequest(
                f"{place}: this model embeds a text, an image, or one page of a document: send "
                "each of them alone",
                place,
            )
        if page and not images:
            raise InvalidRequest(
                f"{place}: this model compares queries with images of pages: send an image", place
            )
        parts = tuple(images) or (MessageText("".join(texts), place),)
        if not (images or any(texts)):
            raise InvalidRequest(f"{place}: the text must not be empty", place)
        asked = read_request(Chat((Message("user", parts),)), place, EVERY_TOKEN, salt)
        return replace(asked, request=replace(asked.request, template=self.template))

    def scores(self, queries: Sequence[WasRead], pages: Sequence[WasRead]) -> list[float]:
        """Return the score of each page for its query. A single query is used for all pages.

        Pages are compared one by one, so a score does not depend on the other pages.
        """
        asked = queries if len(queries) == len(pages) else [queries[0]] * len(pages)
        return [max_sim(query.values, page.values) for query, page in zip(asked, pages)]


def _image(part: Part) -> ImageSource | SentFile | None:
    """Return a part as a single image without text, or None if it is anything else."""
    if isinstance(part, SentFile) and len(part.view.pages) == 1:
        return replace(part, view=replace(part.view, shown="bare"))
    return part if isinstance(part, ImageSource) else None


def max_sim(query: Vectors, page: Vectors) -> float:
    """Return the sum, over the vectors of `query` [Q, D], of the largest inner product with a
    vector of `page` [P, D].
    """
    rows = max(1, MAX_PRODUCTS // max(1, len(page)))
    blocks = (query[start : start + rows] for start in range(0, len(query), rows))
    return sum(float((block @ page.T).max(axis=1).sum()) for block in blocks)
