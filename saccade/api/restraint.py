"""Fields of vLLM and OCR models that restrict an answer, for chats, completions and responses.

They are converted to `AnswerRules`, which check the bounds and document the meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from saccade.core.errors import InvalidRequest
from saccade.core.token_rules import NoRepeat
from saccade.front.fields import Integer, Natural

if TYPE_CHECKING:
    from saccade.front.answer_rules import AnswerRules

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
_URGENCY = {"flex": 1, "priority": -1, "fast": -1, "ultrafast": -2}
"""The number that each service tier adds to `priority`."""
_WINDOW = 100
"""Default of `window_size`, in tokens, as in DeepSeek-OCR's processor for vLLM."""


class ExtraArguments(Struct, forbid_unknown_fields=True):
    """Arguments for logits processors, as sent by users of vLLM."""

    ngram_size: Natural | None = None
    """Length of n-grams that may appear only once in the answer's last window_size tokens."""
    window_size: Natural | None = None
    """How many last tokens of the answer ngram_size checks. Default: 100."""
    whitelist_token_ids: list[Natural] | None = None
    """Tokens that may complete a repeated n-gram."""
    no_repeat_ngram_size: Natural | None = None


class Restraint(Struct, kw_only=True):
    """Restrictions on an answer's tokens, words, reasoning and end, and the request's priority."""

    allowed_token_ids: list[Natural] | None = None
    """The answer uses only these tokens."""
    bad_words: list[str] | None = None
    """Words that are blocked at the beginning of the answer and after a space."""
    no_repeat_ngram_size: Natural | None = None
    vllm_xargs: ExtraArguments | None = None
    """The same repetition limits, under the names that DeepSeek-OCR's users send."""
    thinking_token_budget: Natural | None = None
    """Maximum reasoning tokens. After them, the answer starts."""
    include_stop_str_in_output: bool | None = None
    """The text ends with the stop string or token that ended it."""
    skip_special_tokens: bool | None = None
    """If false, the text shows special tokens by name."""
    spaces_between_special_tokens: bool | None = None
    """Accepted. The server adds no spaces between tokens."""
    truncate_prompt_tokens: Integer | None = None
    """The server reads only this many of the prompt's last tokens. -1 keeps as many as fit. An
    image is never cut.
    """
    priority: Integer | None = None
    """Among your waiting requests, lower numbers run first."""
    service_tier: ServiceTier | None = None

    def rules(self, budget: int | None) -> AnswerRules | None:
        """Convert the fields to rules, or return None if they have no effect.

        budget: the default of `thinking_token_budget`.

        Raises InvalidRequest that names the field.
        """
        from saccade.front.answer_rules import NO_ANSWER_RULES, AnswerRules

        if self.allowed_token_ids == []:
            raise InvalidRequest(
                "allowed_token_ids: the list must contain at least one token id",
                "allowed_token_ids",
            )
        rules = AnswerRules(
            tuple(self.allowed_token_ids or ()),
            tuple(word for word in self.bad_words or () if word),
            self._no_repeat(),
            budget if self.thinking_token_budget is None else self.thinking_token_budget,
            bool(self.include_stop_str_in_output),
            self.skip_special_tokens is not False,
            self.truncate_prompt_tokens,
            (self.priority or 0) + _URGENCY.get(self.service_tier or "", 0),
        )
        return None if rules == NO_ANSWER_RULES else rules

    def _no_repeat(self) -> NoRepeat | None:
        extra = self.vllm_xargs or ExtraArguments()
        if extra.ngram_size is None and (
            extra.window_size is not None or extra.whitelist_token_ids is not None
        ):
            raise InvalidRequest(
                "vllm_xargs.ngram_size is required with window_size or whitelist_token_ids",
                "vllm_xargs.ngram_size",
            )
        whole = [each for each in (self.no_repeat_ngram_size, extra.no_repeat_ngram_size) if each]
        if len({*whole}) + bool(extra.ngram_size) > 1:
            raise InvalidRequest(
                "no_repeat_ngram_size, vllm_xargs.no_repeat_ngram_size and vllm_xargs.ngram_size "
                "are mutually exclusive: send one",
                "no_repeat_ngram_size",
            )
        if whole:
            return NoRepeat(whole[0])
        if not extra.ngram_size:
            return None
        window = _WINDOW if extra.window_size is None else extra.window_size
        if window < 1:
            message = "vllm_xargs.window_size: expected a whole number of at least 1, got 0"
            raise InvalidRequest(message, "vllm_xargs.window_size")
        return NoRepeat(extra.ngram_size, window, tuple(extra.whitelist_token_ids or ()), False)
