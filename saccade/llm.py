"""`LLM`: Saccade from Python, without HTTP. It uses the same engine process and caches as a server.

from PIL import Image
from saccade import LLM

with LLM("demo") as llm:
    cat = Image.open("cat.png")
    answer = llm.chat([{"role": "user", "content": [cat, "What is in the image?"]}])
    print(answer.text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import msgspec
from rich.console import Console
from rich.progress import Progress

from saccade.core.decoders import convert
from saccade.core.errors import ConfigError, ImageError, InvalidRequest, NotFound
from saccade.core.given_paths import reason, regular, shown
from saccade.core.options import (
    AnswerOptions,
    CacheOptions,
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ServeOptions,
)
from saccade.core.settings import SharedOptions
from saccade.core.tuning import GONE, take_options
from saccade.core.types import (
    NO_ADAPTER,
    AdapterRef,
    PromptReading,
    SamplingParams,
    TokenLogprobs,
)
from saccade.front.answer_rules import AnswerRules
from saccade.front.answer_update import Finish
from saccade.front.assemble import build_front, parity_check
from saccade.front.content import image_part, message_from_object, read_parts
from saccade.front.conversation import Chat, Message, Part
from saccade.front.loading import LoadingView
from saccade.front.members import read_choice, read_form, read_tools
from saccade.front.part_defaults import PartDefaults
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.read_requests import (
    MAX_TOKENS,
    ReadRequest,
    Vectors,
    WasRead,
    rank_scores,
    read_request,
    unit_vectors,
)
from saccade.front.readings import PromptReader
from saccade.front.request_manager import RequestManager
from saccade.front.score_prompts import CHATS, Scoring
from saccade.plugin import Plugin
from saccade.plugins import option_groups, plugins
from saccade.text.answer.events import AnswerEvent, CallEnded
from saccade.text.answer.reader import Call, gather
from saccade.text.grammar.constraint import OutputConstraint
from saccade.text.grammar.tools import ToolSet

T = TypeVar("T")
Conversation = Sequence[Mapping[str, Any]]
"""A list of messages as in OpenAI's API.

A content part may also be a plain string, a PIL image, a uint8 array [H, W, 3], or a path.
"""
Content = Any
"""A string, an image (a PIL image, a uint8 array [H, W, 3], a path, or a content part), or a list
of these.
"""
Form = Mapping[str, Any]
"""A response format, as in the JSON of an HTTP request."""
MESSAGE = (
    'expected a message such as {"role": "user", "content": "text" or a list of texts and images}'
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a conversation, with its token counts.

    `text` excludes reasoning and tool calls, which have separate fields.
    """

    text: str
    finish_reason: Finish | Literal["tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[Call, ...] = ()
    # if requested, one per prompt token; None for the first
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class ChatOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.chat`, which documents them."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any] | None
    response_format: Form | None
    structured_outputs: Form | None
    prompt_logprobs: int | None
    rules: AnswerRules | None
    lora: str | None
    progress: bool


@dataclass(frozen=True, slots=True)
class _Settings:
    sampling: SamplingParams
    tools: ToolSet
    variables: Mapping[str, Any]  # additional variables for the chat template
    constraint: OutputConstraint | None
    prompt_logprobs: int | None
    rules: AnswerRules | None
    adapter: AdapterRef


class LLM:
    """A model that answers chats from Python.

    options: the fields of ModelOptions, EngineOptions, CacheOptions, MediaOptions, AnswerOptions
    and the option classes of plugins, such as `tp_size=2`.

    Raises StartupError if the model cannot be loaded. Call `close()` when you are done, or use it
    as a context manager.
    """

    def __init__(self, model: str | Path = "demo", **options: Any) -> None:
        chosen = ServeOptions(
            take_options(ModelOptions, options),
            take_options(EngineOptions, options),
            take_options(CacheOptions, options),
            take_options(MediaOptions, options),
            take_options(AnswerOptions, options),
            extras=tuple(
                take_options(kind, options)
                for plugin, kind in option_groups().items()
                if _serves_python(plugin, kind)
            ),
        )
        self._answers = chosen.answers
        if options:
            name = min(options)
            hint = f": {GONE[name]}" if name in GONE else ""
            raise ConfigError(f"LLM has no option {name!r}{hint}")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="saccade-front", daemon=True
        )
        self._thread.start()
        try:
            self._front: RequestManager = self._wait(_start(str(model), chosen))
        except BaseException:
            self._end_loop()
            raise
        self._reader = PromptReader(self._front)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Answer]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        response_format: Form | None = None,
        structured_outputs: Form | None = None,
        prompt_logprobs: int | None = None,
        rules: AnswerRules | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> Answer | list[Answer]:
        """Answer one conversation, or a list of conversations concurrently.

        For a list, a progress bar is shown, and the answers are in the order of the conversations.
        The options apply to every conversation:

        tools, tool_choice, parallel_tool_calls, chat_template_kwargs: as in OpenAI's API.
        response_format: as in OpenAI's API, e.g. {"type": "json_schema", "json_schema": {"name":
            "x", "schema": {...}}}. The answers follow it, unless they reach their maximum length.
        structured_outputs: an alternative in vLLM's format: json, regex, choice or grammar (Lark).
        prompt_logprobs: how many of the likeliest tokens to return for each prompt token, up to 20.
        rules: forbidden words and tokens, and other rules for the answers.
        lora: the name of an adapter that was loaded with `LLM(..., lora=("NAME=FOLDER",))`.

        Raises a RequestError that names the field if a conversation cannot be served. In a list,
        the other conversations are then cancelled.
        """
        given = {"response_format": response_format, "structured_outputs": structured_outputs}
        set_to = _Settings(
            _typed(SamplingParams, sampling or self._default_sampling, "sampling"),
            ToolSet(read_tools(tools), read_choice(tool_choice), parallel_tool_calls),
            chat_template_kwargs or {},
            read_form(given),
            _typed(int | None, prompt_logprobs, "prompt_logprobs"),
            None if rules is None else _typed(AnswerRules, rules, "rules"),
            self._adapter(lora),
        )
        _check_list(messages)
        if messages and isinstance(messages[0], Mapping):
            return self._wait(self._answer(messages, set_to))  # type: ignore[arg-type]
        return self._wait(self._answer_all(messages, set_to, progress))  # type: ignore[arg-type]

    @property
    def _default_sampling(self) -> SamplingParams:
        most = self._answers.default_max_tokens
        return SamplingParams() if most is None else SamplingParams(max_tokens=most)

    async def _answer_all(
        self, conversations: Sequence[Conversation], set_to: _Settings, progress: bool
    ) -> list[Answer]:
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("answers", total=len(conversations))

            async def one(conversation: Conversation) -> Answer:
                answer = await self._answer(conversation, set_to)
                bar.advance(task)
                return answer

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(conversation)) for conversation in conversations]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

    async def _answer(self, conversation: Conversation, set_to: _Settings) -> Answer:
        _check_list(conversation)
        if not conversation:
            raise InvalidRequest(
                "messages: a conversation must have at least one message", "messages"
            )
        chat = Chat(
            tuple(
                _message(message, f"messages[{index}]")
                for index, message in enumerate(conversation)
            ),
            tools=set_to.tools,
            variables=set_to.variables,
        )
        # Prepare the request.
        params = set_to.sampling
        set_fields = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
        prepared = await self._front.prepare(
            GenerationRequest(
                chat,
                set_fields,
                constraint=set_to.constraint,
                prompt_logprobs=set_to.prompt_logprobs,
                rules=set_to.rules,
                adapter=set_to.adapter,
            )
        )
        # Collect the updates of the answer.
        finish, tokens, cached = None, 0, 0
        parts: list[AnswerEvent] = []
        logprobs: list[TokenLogprobs] = []
        scored: list[TokenLogprobs | None] = [] if set_to.prompt_logprobs is None else [None]
        async with aclosing(self._front.generate(prepared, streamed=False)) as events:
            async for event in events:
                parts += event.parts
                tokens += event.num_tokens
                cached = cached or event.cached.total
                logprobs += event.logprobs
                if event.scores is not None:
                    scored += map(_of_prompt, event.scores.rows())
                finish = event.finish
        assert finish is not None, "an answer's last event has its finish reason"
        read = gather(parts)
        called = finish == "stop" and any(isinstance(part, CallEnded) for part in parts)
        return Answer(
            read.text,
            "tool_calls" if called else finish,
            len(prepared.request.tokens),
            tokens,
            cached,
            tuple(logprobs),
            read.reasoning,
            read.calls,
            tuple(scored),
        )

    def _adapter(self, name: str | None) -> AdapterRef:
        if name is None:
            return NO_ADAPTER
        if (found := self._front.adapters.find(name)) is None:
            loaded = ", ".join(self._front.adapters.names) or "none"
            raise NotFound(f"lora: there is no adapter {name[:200]!r}; loaded: {loaded}", "lora")
        return found.ref

    def embed(
        self,
        inputs: Sequence[Content],
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
    ) -> Vectors:
        """Return embeddings [N, D], each with length 1, of strings, images, or lists of both.

        instruction: tells the model what the embeddings are for. The default is the instruction
            that the checkpoint was trained with.
        dimensions: truncate each embedding to this many values, and scale it to length 1 again.

        The model must be a Qwen3-VL-Embedding checkpoint, or any other with `pooling="last"`, whose
        embeddings are not calibrated. Raises a RequestError that names the field.
        """
        scoring = self._front.scoring or CHATS
        scoring.check_embeds()
        scoring.check_single("LLM.embed_tokens")
        most = self._front.intake.spec.hidden_size
        if dimensions is not None and not 1 <= dimensions <= most:
            raise InvalidRequest(
                f"dimensions: expected from 1 to {most}, got {dimensions}", "dimensions"
            )
        reads = [
            read_request(scoring.embed_chat(_parts(each, place, scoring), instruction), place)
            for i, each in enumerate(inputs)
            for place in (f"inputs[{i}]",)
        ]
        return unit_vectors(self._read(reads), dimensions)

    def embed_tokens(self, inputs: Sequence[Content], *, lora: str | None = None) -> list[Vectors]:
        """Return vectors [T, D] of length 1, one per token, for each query (a string) or page (an
        image).

        lora: the name of the adapter to use.

        The model must be trained for late interaction, such as ColQwen2. Raises a RequestError that
        names the field.
        """
        scoring = self._front.scoring or CHATS
        late, adapter = scoring.check_late(), self._adapter(lora)
        reads = [
            late.read(_parts(each, place, scoring), place).with_adapter(adapter)
            for i, each in enumerate(inputs)
            for place in (f"inputs[{i}]",)
        ]
        return [each.values for each in self._read(reads)]

    def score(
        self, query: Content, documents: Sequence[Content], *, instruction: str | None = None
    ) -> list[float]:
        """Return a score for each document: how relevant it is to the query.

        With a Qwen3-VL-Reranker checkpoint, documents are strings, images, or lists of both, and
        scores are from 0 to 1. With a late interaction model, documents are images. A score is then
        a sum over the tokens of the query, to which each contributes between -1 and 1. Raises a
        RequestError that names the field.
        """
        scoring = self._front.scoring or CHATS
        scoring.check_ranks()
        asked = _parts(query, "query", scoring)
        contents = [
            (_parts(each, place, scoring), place)
            for i, each in enumerate(documents)
            for place in (f"documents[{i}]",)
        ]
        if (late := scoring.late) is not None:
            more: Any = {"instruction": instruction}
            reads = [late.read(each, place, **more, page=True) for each, place in contents]
            query_read, *found = self._read([late.read(asked, "query", **more), *reads])
            return late.scores([query_read], found)
        reading = PromptReading(scoring.labels)
        reads = [
            read_request(scoring.rank_chat(asked, each, instruction), place, reading)
            for each, place in contents
        ]
        return rank_scores(self._read(reads))

    def _read(self, reads: Sequence[ReadRequest]) -> list[WasRead]:
        late = (self._front.scoring or CHATS).late
        most = MAX_TOKENS if late is None else late.max_tokens
        return self._wait(self._reader.read_prompts(reads, max_tokens=most)) if reads else []

    def metrics(self) -> dict[str, float]:
        """Return the counters and gauges of /metrics by name, except those with labels."""
        return {
            metric.name: values[()]
            for metric, values in self._wait(self._front.scrape()).snapshot().items()
            if () in values
        }

    def close(self) -> None:
        """Stop the engine and free its resources. A no-op if it is already closed."""
        if self._thread.is_alive():
            self._wait(self._front.stop())
            self._end_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start(model: str, options: ServeOptions) -> RequestManager:
    front = build_front(model, options, plugins=plugins())
    try:
        with LoadingView(Console(stderr=True), lines=False) as view:
            await front.start(view.show, parity_check(front, model, options))
    except BaseException:
        await front.stop()
        raise
    return front


def check_image(path: Path) -> None:
    """Raise ImageError that names the file, unless it starts with the header of a supported image
    within the default size limits.
    """
    # Not at the top, because servers import this module too, and only image workers parse headers
    # there.
    from saccade.media.formats.header import probe

    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read()
    except OSError as error:
        raise ImageError(f"{shown(path)}: {reason(error)}") from None
    try:
        probe(data, MediaOptions().max_image_pixels)
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None


def _of_prompt(score: tuple[list[int], list[float], int]) -> TokenLogprobs:
    ids, logprobs, _ = score
    return TokenLogprobs(ids[0], logprobs[0], tuple(zip(ids[1:], logprobs[1:])))


def _serves_python(plugin: Plugin, kind: type[Any]) -> bool:
    if issubclass(kind, SharedOptions):
        return not kind.needs_server
    return not plugin.is_http


def _parts(content: Content, place: str, scoring: Scoring) -> tuple[Part, ...]:
    """Convert a string, an image, or a list of both to message parts. place: the argument, for
    error messages.
    """
    if isinstance(content, str):
        return read_parts(content, place, PartDefaults.of(scoring.limits, None))
    listed = content if isinstance(content, list | tuple) else [content]
    parts = [part if isinstance(part, str) else image_part(part) for part in listed]
    return read_parts(parts, place, PartDefaults.of(scoring.limits, None))


def _typed(kind: Any, value: Any, name: str) -> Any:
    """Return `value` after checking the types of its fields, because Python does not.

    This must be done before a message is sent, because the engine process exits if it cannot decode
    a message. Raises InvalidRequest that names the field.
    """
    if not isinstance(value, kind):
        what = kind.__name__ if isinstance(kind, type) else kind
        raise InvalidRequest(f"{name}: expected {what}, got {type(value).__name__}", name)
    try:
        return convert(msgspec.to_builtins(value), kind)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `$")
        field = place.strip(".`") or name
        raise InvalidRequest(f"{field}: {why.replace('Expected', 'expected')}", field) from None


def _check_list(conversation: object) -> None:
    """Raise InvalidRequest for a string or a single message, because iterating over it would not
    fail.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        kind = type(conversation).__name__
        raise InvalidRequest(
            f"messages: expected a list of messages, or a list of conversations, got a {kind}; "
            f"{MESSAGE}",
            "messages",
        )


def _message(message: Mapping[str, Any], param: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{param}: {MESSAGE}", param)
    return message_from_object(message, param)
