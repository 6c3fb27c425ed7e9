"""Requests for values computed from prompts without generating answers, and their results. They are
used for embeddings, scores and decisions.

`readings.py` executes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from saccade.core.types import AdapterRef, FieldNames, PromptReading
from saccade.front.conversation import Chat
from saccade.front.prompt_encoder import GenerationRequest

MAX_TOKENS = 1 << 20
"""Maximum number of tokens in all prompts of a request, including images."""
LAST_STATE = PromptReading()
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A prompt, and the values to compute from it."""

    request: GenerationRequest
    reading: PromptReading
    place: str  # path in the client's request

    def with_adapter(self, adapter: AdapterRef) -> ReadRequest:
        if adapter == self.request.adapter:
            return self
        return replace(self, request=replace(self.request, adapter=adapter))


@dataclass(frozen=True, slots=True)
class SharedReadRequest:
    """Several prompts with a common prefix.

    They differ only in the last text of the chat, in which each entry of `tails` in turn replaces
    the text `mark`.
    """

    request: GenerationRequest
    mark: str
    tails: tuple[tuple[str, PromptReading], ...]
    place: str
    tails_place: str


@dataclass(frozen=True, slots=True)
class WasRead:
    """The values computed from one prompt, and its token counts."""

    values: npt.NDArray[np.float32]  # float32 [C, width]
    tokens: int  # prompt tokens
    cached: int  # prompt tokens from the cache
    written: int  # prompt tokens newly pinned by a cache breakpoint
    images: int  # prompt tokens of images


def read_request(
    prompt: Chat | tuple[int, ...], place: str, reading: PromptReading = LAST_STATE, salt: str = ""
) -> ReadRequest:
    """Build the request for values computed from a chat or from token ids.

    For a chat, the tokenizer adds its special tokens as it does for a text, because embedding
    models were trained that way.
    """
    names = FieldNames({"prompt": place, "messages": place})
    chat = isinstance(prompt, Chat)
    asked = GenerationRequest(prompt, cache_salt=salt, add_special_tokens=chat, names=names)
    return ReadRequest(asked, reading, place)


def unit_vectors(read: Sequence[WasRead], dimensions: int | None) -> Vectors:
    """Return the embeddings [N, D], each scaled to length 1.

    dimensions: truncate each embedding to this many values before it is scaled.
    """
    if not read:
        return np.empty((0, dimensions or 0), np.float32)
    rows = [each.values[-1, :dimensions].astype(np.float64) for each in read]
    unit = [row / max(float(np.sqrt(row @ row)), 1e-12) for row in rows]
    return np.stack(unit).astype(np.float32)


def rank_scores(read: Sequence[WasRead]) -> list[float]:
    """Return the score of each prompt: the probability of its first label, if only its two labels
    are possible.
    """
    logits = (each.values[-1].astype(np.float64) for each in read)
    return [float(1.0 / (1.0 + np.exp(min(no - yes, 700.0)))) for yes, no in logits]
