"""From a client's request to the engine's: `InputProcessor.prepare`.

Owns the steps that a request joins, and their order: what refuses for less comes first. Each step
is in `front/steps/`, and knows its feature alone. Knows nothing of HTTP, and only the context
length of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from saccade.core.client import ANYBODY, Client
from saccade.core.family import FamilySpec
from saccade.core.types import SamplingParams
from saccade.front.answer_rules import NO_ANSWER_RULES
from saccade.front.breakpoints import NO_CACHE_REQUEST
from saccade.front.compiler import Compiler
from saccade.front.fields import too_long
from saccade.front.prepared import Preparation, PreparedRequest, Prompt, Step, count_tokens
from saccade.front.prompt_encoder import EncodedPrompt, GenerationRequest, PromptEncoder
from saccade.front.sessions.sessions import Sessions
from saccade.front.steps.apply_rules import READABLE, ApplyRules
from saccade.front.steps.edit_history import EditHistory
from saccade.front.steps.follow_session import FollowSession
from saccade.front.steps.form_answer import FormAnswer
from saccade.front.steps.keep_prompt import KeepPrompt
from saccade.front.steps.limit_answer import LimitAnswer
from saccade.front.steps.open_files import OpenFiles
from saccade.front.steps.open_sources import OpenSources
from saccade.front.steps.refuse_oversized import RefuseOversized
from saccade.front.steps.tokenise import Tokenise
from saccade.front.steps.translate_actions import TranslateActions
from saccade.media.media import Media
from saccade.media.opened import Opened
from saccade.media.sources.fairness import BOUNDLESS, MemoryBudget
from saccade.text.actions.action import Point
from saccade.text.actions.find_format import find_action_format
from saccade.text.answer.answer_format import SILENT, AnswerFormat
from saccade.text.answer.reasoning import THINK
from saccade.text.prompt.template import ChatTemplate, Tokenizer

T = TypeVar("T")


class InputProcessor:
    """The front's way in for one model: turns a client's request into one for the engine."""

    def __init__(
        self,
        spec: FamilySpec,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        media: Media,
        defaults: SamplingParams,
        compiler: Compiler | None = None,
        answer_format: AnswerFormat = SILENT,
        sessions: Sessions | None = None,
        model: str = "",
    ) -> None:
        """Build the steps for one model. `compiler`: by default one for the tokenizer's own
        vocabulary. `answer_format`: the model's way to write calls and reasoning. `sessions`: None
        follows none. `model`: its name, by which its way to act is known.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self.media = media
        self.answer_format = answer_format
        self.prompts = PromptEncoder(spec, tokenizer, template, answer_format)
        compiler = compiler or Compiler(
            tokenizer.backend.to_str(), spec.vocab_size, spec.eos_token_ids
        )
        self.sessions = sessions
        # the steps
        tags = answer_format.reasoning or THINK
        self.limits = LimitAnswer(defaults, spec.vocab_size)
        self.files = OpenFiles(media)
        self.sources = OpenSources(media, self.prompts)
        self._text = Tokenise(spec, self.prompts, self.limits, tags)
        self._form = FormAnswer(answer_format, compiler, tokenizer, tags)
        self._marks = KeepPrompt(spec)
        self._rules = ApplyRules(tokenizer, self.limits)
        self._sizes = RefuseOversized(spec)
        self._edits = EditHistory(self.prompts, self.sources)
        self.acting = find_action_format(spec.family, model)
        written = self.acting.written
        self._actions = TranslateActions(self.acting, spec.family, self.prompts, self._resized)
        self._action_form = self._form
        if written is not None:
            acts = replace(answer_format, calls=written.calls)
            self._action_form = FormAnswer(acts, compiler, tokenizer, tags)
        self._session = None if sessions is None else FollowSession(sessions)

    def described_actions(self) -> tuple[tuple[str, str], ...]:
        """Return (name, value) pairs on the model's way to act on a screen, for people to read."""
        if not self.spec.sees_images or not (self.acting.written or self.answer_format.calls):
            return ()
        return (("computer use", f"{self.acting.name} ({self.acting.note})"),)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run long work in a thread and return its result, without holding up other requests."""
        return await self.prompts.in_thread(work)

    async def warm_up(self) -> None:
        """Do what the first chat would wait for: a large vocabulary takes 0.15 s to read."""
        await self.in_thread(lambda: self.tokenizer.longest_token)

    async def prepare(
        self,
        request: GenerationRequest,
        context_length: int,
        client: Client = ANYBODY,
        budget: MemoryBudget = BOUNDLESS,
    ) -> PreparedRequest:
        """Decide everything about `request` that can be decided before an image is decoded.

        `budget`: counts bytes that come from outside the request. Raises a RequestError that names
        the field.
        """
        preparation = Preparation(
            request, context_length, client, budget, time.monotonic(), readable=context_length
        )
        for step in self.steps_of(request):
            await step(preparation)
        return preparation.finish()

    def steps_of(self, request: GenerationRequest) -> Iterator[Step]:
        """Yield the steps that the request's fields name."""
        chat = request.chat
        formed = request.constraint is not None or chat.tools is not None
        marked = bool(chat.marks) or request.cache != NO_CACHE_REQUEST
        ruled = request.rules != NO_ANSWER_RULES
        acts = chat.action_tool is not None
        # What the fields alone refuse.
        if acts:
            yield self._actions.begin
            yield self._action_form.choose
        elif formed:
            yield self._form.choose
        if marked:
            yield self._marks.check
        if chat.media:
            yield self.sources.check
        # What the text refuses: nothing is fetched before it fits.
        if ruled:
            yield self._rules.set_readable
        if request.edit is not None:
            yield self._edits.set_readable
        yield self._text.encode
        if ruled:
            yield self._rules.check
        if chat.media and chat.files:
            yield self.files.open
            yield self._text.encode
        # What costs more.
        if formed and not acts:
            yield self._form.compile
        if chat.media:
            yield self.sources.open
        if request.undiminished:
            yield self._sizes.check
        if acts:
            yield self._actions.place
            yield self._action_form.choose
            yield self._action_form.compile
        if request.edit is not None:
            yield self._edits.apply
        # The prompt as the engine gets it, and what depends on it.
        yield self._text.widen
        if chat.media and chat.goes_on and self._session is not None:
            yield self._session.follow
        if marked:
            yield self._marks.set_breakpoints
        if chat.has_switches:
            yield self._text.note_ignored
        if ruled:
            yield self._rules.apply
        if chat.media or ruled or request.edit is not None:
            yield self.limits.limit
        if request.prediction:
            yield self._text.predict

    def _resized(self, size: Point) -> Point:
        """Return the (width, height) in which the model sees an image."""
        canvas = self.spec.recipe(size[1], size[0], self.spec.pixel_bounds).canvas
        return canvas[1], canvas[0]

    def prompt(
        self, request: GenerationRequest, encoded: EncodedPrompt, opened: Sequence[Opened]
    ) -> Prompt:
        """Build the prompt in the engine's terms, from encoded text and opened images."""
        prompt = self._text.widened(request, encoded, opened)
        return self._marks.with_breakpoints(request, encoded, prompt)

    async def read_prompt(
        self,
        request: GenerationRequest,
        context_length: int,
        client: Client = ANYBODY,
        budget: MemoryBudget = BOUNDLESS,
    ) -> Prompt:
        """Read the prompt alone. Its text fits the context, and its images may exceed it, within
        reason. Raises a RequestError that names the field.
        """
        preparation = Preparation(
            request, context_length, client, budget, time.monotonic(), readable=context_length
        )
        for step in self.reading_steps_of(request):
            await step(preparation)
        request, encoded, opened = preparation.request, preparation.encoded, preparation.opened
        least = count_tokens(encoded, opened)
        if least > (READABLE if opened else 1) * context_length:
            param = request.names["messages" if opened else "prompt"]
            raise too_long(param, f"at least {least} tokens", context_length, bool(opened))
        make = partial(self.prompt, request, encoded, opened)
        prompt = await self.in_thread(make) if least > context_length else make()
        return replace(prompt, edited=preparation.edited)

    def reading_steps_of(self, request: GenerationRequest) -> Iterator[Step]:
        """Yield the steps of a prompt that is read without an answer."""
        chat, acts = request.chat, request.chat.action_tool is not None
        yield self._marks.check
        if acts:
            yield self._actions.begin
        if chat.files:
            yield self.files.open_within_reason
        if request.edit is not None:
            yield self._edits.set_readable
        yield self._text.read
        if chat.media:
            yield self.sources.open
        if request.undiminished:
            yield self._sizes.check
        if acts:
            yield self._actions.place
        if request.edit is not None:
            yield self._edits.apply
