"""Converts a client's request to a request for the engine (`InputProcessor.prepare`).

`step_order.py` has the steps and their order. Each step is in `front/steps/` or in a plugin, and
handles one feature.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from saccade.core.client import ANYBODY, Client
from saccade.core.family import FamilySpec
from saccade.core.options import ServeOptions
from saccade.front.answer_defaults import AnswerDefaults
from saccade.front.breakpoints import NO_CACHE_REQUEST
from saccade.front.fields import too_long
from saccade.front.prepared import Preparation, PreparedRequest, Prompt, count_tokens
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest, PromptEncoder
from saccade.front.step_order import READABLE, StepContext, StepOrder
from saccade.front.steps.tokenise import LimitAnswer, Tokenise
from saccade.media.media import Media
from saccade.media.opened import Opened
from saccade.media.sources.fairness import BOUNDLESS, MemoryBudget
from saccade.plugin import Plugin
from saccade.text.answer.answer_format import SILENT, AnswerFormat
from saccade.text.answer.reasoning import THINK
from saccade.text.prompt.template import ChatTemplate, Tokenizer

T = TypeVar("T")


class InputProcessor:
    """Converts clients' requests to requests for the engine, for one model."""

    def __init__(
        self,
        spec: FamilySpec,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        media: Media,
        defaults: AnswerDefaults,
        answer_format: AnswerFormat = SILENT,
        options: ServeOptions = ServeOptions(),  # noqa: B008 - frozen
        model: str = "",
        plugins: Sequence[Plugin] = (),
    ) -> None:
        """Build the steps for one model.

        answer_format: how the model writes tool calls and reasoning.
        model: the model's name and directory.
        plugins: those whose steps requests may use.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self.media = media
        self.answer_format = answer_format
        self.prompts = PromptEncoder(spec, tokenizer, template, answer_format)
        self.steps = StepContext(
            spec,
            tokenizer,
            self.prompts,
            media,
            answer_format,
            defaults,
            answer_format.reasoning or THINK,
            options,
            model,
            can_hold=any(plugin.requests.grammars for plugin in plugins),
        )
        self.order = StepOrder(self.steps, plugins)

    @property
    def limits(self) -> LimitAnswer:
        return self.steps.step(LimitAnswer)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result, so that the event loop can serve other
        requests.
        """
        return await self.prompts.in_thread(work)

    async def warm_up(self) -> None:
        """Compute values that would delay the first chat. Scanning a large vocabulary takes
        0.15 s.
        """
        await self.in_thread(lambda: self.tokenizer.longest_token)

    async def prepare(
        self,
        request: GenerationRequest,
        context_length: int,
        client: Client = ANYBODY,
        budget: MemoryBudget = BOUNDLESS,
    ) -> PreparedRequest:
        """Prepare a request for the engine, up to but not including the decoding of its images.

        budget: counts the bytes that are fetched for it. Raises a RequestError that names the
        field.
        """
        preparation = Preparation(
            request,
            context_length,
            client,
            budget,
            time.monotonic(),
            rules=self.steps.defaults.rules,
        )
        for step in self.order.joined(preparation, "answer"):
            await step(preparation)
        return preparation.finish()

    async def read_prompt(
        self,
        request: GenerationRequest,
        context_length: int,
        client: Client = ANYBODY,
        budget: MemoryBudget = BOUNDLESS,
    ) -> Prompt:
        """Return the prompt of a request without preparing an answer, for example to count its
        tokens.

        A text must fit in the context. A prompt with images may be up to `READABLE` times as long.
        Raises a RequestError that names the field.
        """
        preparation = Preparation(request, context_length, client, budget, time.monotonic())
        for step in self.order.joined(preparation, "prompt"):
            await step(preparation)
        request, encoded, opened = preparation.request, preparation.encoded, preparation.opened
        least = count_tokens(encoded, opened)
        if least > (READABLE if opened else 1) * context_length:
            param = request.names["messages" if opened else "prompt"]
            raise too_long(param, f"at least {least} tokens", context_length, bool(opened))
        make = partial(self.prompt, request, encoded, opened)
        prompt = await self.in_thread(make) if least > context_length else make()
        return replace(prompt, extras=preparation.extras)

    def prompt(
        self, request: GenerationRequest, encoded: EncodedPrompt, opened: Sequence[Opened]
    ) -> Prompt:
        """Build the engine's prompt from tokenized text and opened images."""
        prompt = self.steps.step(Tokenise).widened(request, encoded, opened)
        if not request.chat.marks and request.cache == NO_CACHE_REQUEST:
            return prompt
        from saccade.front.steps.keep_prompt import KeepPrompt

        return self.steps.step(KeepPrompt).with_breakpoints(request, encoded, prompt)
