"""The bodies of POST /v1/embeddings, /v2/embed, /rerank and /score: fields and errors.

`read.py` converts bodies to prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct, field

from saccade.api.body_schema import BodySchema
from saccade.api.chat.fields import ImageFields, RequestScope
from saccade.front.content import ContentPart
from saccade.front.image_parts import ImageURL
from saccade.front.unread_fields import IgnoredFields, Neutral, UnsupportedFields

MAX_INPUTS = 2048
"""Maximum inputs or documents of a request, as in OpenAI's API."""
MAX_INSTRUCTION = 8192
"""Maximum characters of an instruction."""

EncodingFormat = Literal["float", "base64"]


class ScoreScope(RequestScope, kw_only=True):
    """The model, the cache, and the instruction."""

    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION)] | None = None
    """The input's purpose, or the question for documents. Default: the model's own."""


class EmbeddingInput(Struct, kw_only=True):
    """The texts or chats to embed."""

    input: Raw = field(default_factory=Raw)
    """A string, tokens, or a list of strings or token lists."""
    messages: Raw = field(default_factory=Raw)
    """One chat or several. A system message is the instruction."""


class EmbeddingForm(Struct, kw_only=True):
    """The format of embeddings."""

    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Return only this many leading values, rescaled to length 1."""
    encoding_format: EncodingFormat | None = None
    """float returns numbers. base64 returns little-endian float32."""


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """Body for POST /v1/embeddings."""

    asked: EmbeddingInput
    form: EmbeddingForm
    scope: ScoreScope
    images: ImageFields


class CohereImage(IgnoredFields, tag_field="type", tag="image_url", kw_only=True):
    """An image in the body of POST /v2/embed."""

    image_url: str | ImageURL


class CohereText(UnsupportedFields, tag_field="type", tag="text", kw_only=True):
    """A text in the body of POST /v2/embed."""

    text: str


class CohereInput(UnsupportedFields, kw_only=True):
    """Texts and images that share one embedding."""

    content: list[CohereText | CohereImage]
    """Parts with text and images."""


class CohereInputs(Struct, kw_only=True):
    """The content to embed: texts, images (as data: URLs), or inputs with both."""

    texts: Raw = field(default_factory=Raw)
    images: Raw = field(default_factory=Raw)
    """The images to embed, as data: URLs."""
    inputs: Raw = field(default_factory=Raw)
    """Inputs of text and images that share one embedding."""


class CohereForm(Struct, kw_only=True):
    """The type and format of embeddings."""

    input_type: (
        Literal["search_document", "search_query", "classification", "clustering", "image"] | None
    ) = None
    """search_query has its own instruction. Other values are ignored."""
    embedding_types: list[EncodingFormat] | None = None
    """The formats of the embeddings, one or both."""
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    """Return only this many leading values, rescaled to length 1."""


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Body for POST /v2/embed."""

    asked: CohereInputs
    form: CohereForm
    scope: ScoreScope
    images: ImageFields


class ScoredContent(UnsupportedFields, kw_only=True):
    """A query or a document: a string, or parts."""

    text: str | None = None
    content: str | list[str | ContentPart] | None = None
    """A string, or parts with text and images."""


class RankInput(Struct, kw_only=True):
    """The query and the documents to rank, each a string, or an object with text or content."""

    query: Raw
    """What documents should match: a string, or an object with text or content."""
    documents: Raw


class RankForm(Struct, kw_only=True):
    """How many documents to return, and whether to include their content."""

    top_n: Annotated[int, Meta(ge=1)] | None = None
    """Return only this many documents, the best ones."""
    return_documents: bool | None = None
    """Return each document with its score."""


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Body for POST /rerank."""

    asked: RankInput
    form: RankForm
    scope: ScoreScope
    images: ImageFields


class PairInput(Struct, kw_only=True):
    """The texts to score: one query (text_1) and its documents (text_2), or a query for each."""

    text_1: Raw = field(default_factory=Raw)
    """The query, or a query per document."""
    text_2: Raw = field(default_factory=Raw)
    """The documents."""
    queries: Raw = field(default_factory=Raw)
    """Another name of text_1."""
    documents: Raw = field(default_factory=Raw)
    data_1: Raw = field(default_factory=Raw)
    """Another name of text_1."""
    data_2: Raw = field(default_factory=Raw)
    """Another name of text_2."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Body for POST /score."""

    asked: PairInput
    scope: ScoreScope
    images: ImageFields


_NEUTRAL: Neutral = {
    "add_generation_prompt": (True, False),
    "add_special_tokens": (True,),
    "continue_final_message": (True, False),
}
"""The model's own template is always used (`core.family.ScoreTemplates`)."""

EMBEDDINGS: BodySchema[EmbeddingsRequest] = BodySchema(EmbeddingsRequest, _NEUTRAL)
EMBED: BodySchema[EmbedRequest] = BodySchema(EmbedRequest, _NEUTRAL)
RERANK: BodySchema[RerankRequest] = BodySchema(RerankRequest, _NEUTRAL)
SCORE: BodySchema[ScoreRequest] = BodySchema(ScoreRequest, _NEUTRAL)
