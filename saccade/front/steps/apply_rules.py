"""The step that truncates the prompt, and converts the request's `AnswerRules` to tokens."""

from __future__ import annotations

from dataclasses import replace

from saccade.core.errors import InvalidRequest
from saccade.front.answer_rules import NO_ANSWER_RULES, AnswerRules, reasoning_tags
from saccade.front.conversation import Chat
from saccade.front.prepared import Preparation, Prompt
from saccade.front.step_order import READABLE, StepContext
from saccade.front.steps.tokenise import LimitAnswer


class ApplyRules:
    """Applies the rules for answers that requests and the checkpoint set."""

    def __init__(self, context: StepContext) -> None:
        self._tokenizer = context.tokenizer
        self._limits = context.step(LimitAnswer)
        self._defaults = context.defaults.rules

    async def set_readable(self, preparation: Preparation) -> None:
        """Set how many prompt tokens may be encoded, and to how many they are truncated."""
        most, context = rules_of(preparation).truncate_prompt_tokens, preparation.context_length
        if most is not None:
            answer = max(1, preparation.request.sampling.get("max_tokens", 1))
            preparation.kept = max(1, context - answer) if most == -1 else most
            preparation.readable = READABLE * context

    async def check(self, preparation: Preparation) -> None:
        """Raise InvalidRequest if a listed token is not in the model's vocabulary."""
        for name, ids in rules_of(preparation).named_tokens():
            self._limits.check_tokens(name, ids)

    async def apply(self, preparation: Preparation) -> None:
        """Truncate the prompt, and convert the rules to tokens."""
        rules, length = rules_of(preparation), len(preparation.prompt.tokens)
        if surplus := length - preparation.kept_of(length):
            preparation.prompt = cut(preparation.prompt, surplus)
        found = rules.tokens(self._tokenizer, self._reasons(preparation))
        preparation.rules = replace(
            found,
            no_repeat=found.no_repeat or self._defaults.no_repeat,
            banned=self._defaults.banned,
        )
        preparation.reading = replace(
            preparation.reading,
            special=not rules.skip_special_tokens,
            with_stop=rules.include_stop_str_in_output,
        )
        if rules.thinking_token_budget is not None and reasoning_tags(self._tokenizer) is None:
            preparation.ignored += ("thinking_token_budget",)

    def _reasons(self, preparation: Preparation) -> bool:
        """Return True if the answer starts within reasoning.

        A chat's messages may contain the tags as plain text, so `prompt.reasoning` decides for
        chats. In other prompts, the client has written the tags on purpose.
        """
        prompt, tags = preparation.prompt, reasoning_tags(self._tokenizer)
        if isinstance(preparation.request.prompt, Chat) or tags is None:
            return prompt.reasoning == "open"
        last = next((token for token in reversed(prompt.tokens) if token in tags), None)
        return last == tags[0]


def rules_of(preparation: Preparation) -> AnswerRules:
    """Return the rules that the request sets, which may be none."""
    return preparation.request.rules or NO_ANSWER_RULES


def cut(prompt: Prompt, count: int) -> Prompt:
    """Return the prompt without its first `count` tokens. Raises InvalidRequest if that would
    remove an image.
    """
    if lost := next((span for span in prompt.spans if span.start < count), None):
        left = len(prompt.tokens) - lost.start
        raise InvalidRequest(
            f"truncate_prompt_tokens: {prompt.places[lost.image]} would be cut off: keep at least "
            f"{left} tokens, or omit it",
            "truncate_prompt_tokens",
        )
    return replace(
        prompt,
        tokens=prompt.tokens[count:],
        spans=tuple(replace(span, start=span.start - count) for span in prompt.spans),
        breakpoints=tuple((at - count, ttl) for at, ttl in prompt.breakpoints if at > count),
        message_offsets=tuple(
            (at - count, place) for at, place in prompt.message_offsets if at > count
        ),
    )
