"""The limits of an answer: its sampling complete, within what the context leaves."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from saccade.core.errors import InvalidRequest
from saccade.core.types import LARGEST, SamplingParams
from saccade.front.conversation import Chat
from saccade.front.fields import too_long
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import GenerationRequest


class LimitAnswer:
    """Bounds each answer's length. defaults: for every field that a request leaves open."""

    def __init__(self, defaults: SamplingParams, vocab_size: int) -> None:
        self._defaults = defaults
        self._vocab_size = vocab_size

    @property
    def usual_length(self) -> str:
        """Describe for people how long an answer may be by default."""
        most = self._defaults.max_tokens
        return "as long as the context allows" if most == LARGEST else f"{most} tokens at most"

    async def limit(self, preparation: Preparation) -> None:
        """Bound the answer again, by the prompt as the engine gets it."""
        length = len(preparation.prompt.tokens)
        preparation.sampling = self.sampling(
            preparation.request, length, preparation.context_length
        )

    def sampling(
        self, request: GenerationRequest, prompt_tokens: int, context_length: int
    ) -> SamplingParams:
        """Fill in the request's sampling, and bound the answer by the rest of the context."""
        if not prompt_tokens:
            raise InvalidRequest("the prompt is empty", request.names["prompt"])
        left = context_length - prompt_tokens
        if left < 1:
            chat = isinstance(request.prompt, Chat)
            raise too_long(request.field, f"{prompt_tokens} tokens", context_length, chat)
        usual = max(self._defaults.max_tokens, request.sampling.get("min_tokens", 0))
        given = {"max_tokens": usual, "seed": secrets.randbits(63), **request.sampling}
        given["max_tokens"] = min(given["max_tokens"], left)
        given["seed"] %= 2**63
        given["top_k"] = max(0, given.get("top_k", self._defaults.top_k))
        if given.get("top_p", self._defaults.top_p) == 0.0:
            # The smallest set that holds nothing at all still holds the likeliest token.
            given |= {"top_p": 1.0, "top_k": 1}
        sampling = replace(self._defaults, **given)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens={sampling.min_tokens} is more than the answer may have: "
                f"{sampling.max_tokens}",
                "min_tokens",
            )
        if sampling.logit_bias:
            self.check_tokens("logit_bias", [token for token, _ in sampling.logit_bias])
        if sampling.stop_token_ids:
            self.check_tokens("stop_token_ids", sampling.stop_token_ids)
        return sampling

    def check_tokens(self, name: str, ids: Sequence[int]) -> None:
        """Raise InvalidRequest, naming the field `name`, for a token outside the vocabulary."""
        size = self._vocab_size
        if outside := [token for token in ids if not 0 <= token < size]:
            raise InvalidRequest(
                f"{name}: token {outside[0]} is not within the vocabulary of {size}", name
            )
