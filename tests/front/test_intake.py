"""`prepare`: pictures named and counted without decoding, spans where the template put them,
nothing left open.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

import saccade.demo
from saccade.core.arena import Arena
from saccade.core.client import ANYBODY, Client
from saccade.core.config import MIB
from saccade.core.errors import CheckpointError, ImageError, InvalidRequest
from saccade.core.metrics import Metrics
from saccade.core.token_rules import NoRepeat, TokenRules
from saccade.core.types import LARGEST, Request, SamplingParams
from saccade.families.registry import load_spec
from saccade.front.answer_defaults import AnswerDefaults, load_answer_defaults
from saccade.front.answer_rules import AnswerRules
from saccade.front.breakpoints import CacheRequest
from saccade.front.conversation import Chat, Message, MessageText, Part
from saccade.front.input_processor import InputProcessor
from saccade.front.members import read_tools
from saccade.front.prepared import Preparation, PreparedRequest
from saccade.front.prompt_encoder import GenerationRequest
from saccade.media.media import Media
from saccade.media.sources.fairness import BOUNDLESS
from saccade.media.sources.source import ImageSource, SentFile
from saccade.plugin import Plugin
from saccade.plugins import plugins
from saccade.plugins.grammar.compiler import Compiler
from saccade.text.answer.answer_format import FORMATS, SILENT, AnswerFormat
from saccade.text.grammar.constraint import OutputConstraint
from saccade.text.grammar.tools import ToolSet
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from saccade_bench.fixtures.pdf import Sheet, pdf
from tests.helpers.fork_servers import image_fork_servers
from tests.helpers.images import png
from tests.helpers.options import serve_options

FOLDER = Path(saccade.demo.__file__).parent / "model"
TOKENIZER = Tokenizer.load(FOLDER)
SPEC = load_spec(FOLDER)
PLACEHOLDER = TOKENIZER.encode("<|image_pad|>")[0]
CONTEXT = 1000
METRICS = Metrics()


@cache
def running_media() -> tuple[asyncio.Runner, Media]:
    """One for all tests, and its event loop: the image workers are started once."""
    runner, arena = asyncio.Runner(), Arena.create(16 * MIB)
    media = Media(
        SPEC,
        serve_options(media_workers=1),
        arena,
        METRICS,
        fork_servers=image_fork_servers(),
        cards=[card for plugin in plugins() for card in plugin.requests.media],
    )

    async def start() -> None:
        media.start()

    runner.run(start())
    return runner, media


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    runner, media = running_media()
    runner.run(media.close())
    runner.close()
    running_media.cache_clear()


def prepare(
    ask: GenerationRequest,
    defaults: AnswerDefaults | None = None,
    context: int = CONTEXT,
    tokenizer: Tokenizer = TOKENIZER,
    answer_format: AnswerFormat = SILENT,
    features: Sequence[Plugin] | None = None,
) -> PreparedRequest:
    runner, media = running_media()
    intake = InputProcessor(
        SPEC,
        tokenizer,
        ChatTemplate.load(FOLDER, tokenizer, None, SPEC.templates),
        media,
        defaults or AnswerDefaults(),
        answer_format=answer_format,
        plugins=plugins() if features is None else features,
    )
    return runner.run(intake.prepare(ask, context))


def steps(request: GenerationRequest) -> list[str]:
    """What preparing this request enters, in order."""
    _, media = running_media()
    template = ChatTemplate.load(FOLDER, TOKENIZER, None, SPEC.templates)
    intake = InputProcessor(SPEC, TOKENIZER, template, media, AnswerDefaults(), plugins=plugins())
    preparation = Preparation(request, CONTEXT, ANYBODY, BOUNDLESS, 0)
    return [step.__name__ for step in intake.order.joined(preparation, "answer")]


def user(*parts: str | Part) -> Message:
    return Message(
        "user", tuple(MessageText(part) if isinstance(part, str) else part for part in parts)
    )


def text_of(prepared: PreparedRequest) -> str:
    """The prompt's text, each run of placeholders written once."""
    tokens = list(prepared.request.tokens)
    for span in reversed(prepared.request.spans):
        tokens[span.start : span.end] = [PLACEHOLDER]
    return TOKENIZER.backend.decode(tokens, skip_special_tokens=False)


def test_a_plain_text_joins_tokenising_and_limits_alone() -> None:
    for prompt in (Chat((user("Hi"),)), "Hi", (1, 2)):
        assert steps(GenerationRequest(prompt)) == ["encode", "widen"]


def test_fields_decide_which_steps_a_request_joins() -> None:
    text, picture = Chat((user("Hi"),)), ImageSource(png(size=(64, 64)), "here")
    for request, joined in (
        (GenerationRequest(Chat((user(picture),))), ["check", "encode", "open", "widen", "limit"]),
        (
            GenerationRequest(Chat((user(SentFile(b"", "here")),))),
            ["check", "encode", "open", "open", "widen", "limit"],
        ),
        (
            GenerationRequest(text, constraint=OutputConstraint("regex", "x", "r")),
            ["choose", "encode", "compile", "widen"],
        ),
        (
            GenerationRequest(replace(text, tools=ToolSet(choice="none"))),
            ["choose", "encode", "widen"],
        ),
        (
            GenerationRequest(text, cache=CacheRequest(diagnose=True)),
            ["check", "encode", "widen", "set_breakpoints"],
        ),
        (
            GenerationRequest(text, rules=AnswerRules(priority=1)),
            ["set_readable", "encode", "check", "widen", "apply", "limit"],
        ),
        (GenerationRequest(text, prediction="x"), ["encode", "widen", "predict"]),
        (GenerationRequest(replace(text, thinks=True)), ["encode", "widen", "note_ignored"]),
    ):
        assert steps(request) == joined


def test_pictures_stand_where_they_appear_in_their_order() -> None:
    a, b, c = (ImageSource(png(size=(32 * n, 64)), f"place {n}") for n in (2, 3, 4))
    chat = Chat(
        (
            Message("system", "Look."),
            user(a, "then", b),
            Message("assistant", "Yes."),
            user("and", c, "?"),
        )
    )
    prepared = prepare(GenerationRequest(chat))
    request = prepared.request
    assert [image.grid for image in request.images] == [(1, 4, 4), (1, 4, 6), (1, 4, 8)]
    assert [(span.image, span.length, span.offset) for span in request.spans] == [
        (0, 4, 0),
        (1, 6, 0),
        (2, 8, 0),
    ]
    assert all(
        set(request.tokens[span.start : span.end]) == {PLACEHOLDER} for span in request.spans
    )
    assert [request.tokens.count(PLACEHOLDER)] == [18]
    assert prepared.places == ("place 2", "place 3", "place 4")
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"Picture 1: {pad}thenPicture 2: {pad}" in text_of(
        prepared
    ) and f"andPicture 3: {pad}?" in text_of(prepared)


def test_one_picture_twice_is_one_key_in_two_spans() -> None:
    picture = png()
    request = prepare(
        GenerationRequest(Chat((user(ImageSource(picture, "0"), ImageSource(picture, "1")),)))
    ).request
    assert request.images[0].key == request.images[1].key and len(request.spans) == 2


def test_the_salt_separates_keys_and_reaches_the_engine() -> None:
    chat = Chat((user(ImageSource(png(), "0")),))
    mine, yours = (
        prepare(GenerationRequest(chat, cache_salt="me")).request,
        prepare(GenerationRequest(chat, cache_salt="you")).request,
    )
    assert mine.images[0].key != yours.images[0].key
    assert mine.cache_salt == mine.images[0].key.salt == Client().salt("me")
    long = prepare(GenerationRequest(chat, cache_salt="me" * 10**6)).request
    assert len(long.cache_salt) == len(mine.cache_salt) == 32, "nothing keeps what was sent"


def test_nothing_is_decoded_and_a_prompt_beyond_the_context_says_both_figures() -> None:
    chat = Chat(
        (
            user(
                *[ImageSource(png(color, (640, 640)), "0") for color in ("red", "green", "blue")],
                "hm",
            ),
        )
    )
    with pytest.raises(InvalidRequest, match=r"1\d\d\d tokens.* 1000 allows 999") as caught:
        prepare(GenerationRequest(chat))
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert METRICS.value("saccade_images_decoded_total") == 0, "by no test of this file"


def pages_drawn() -> float:
    return METRICS.value("saccade_pages_rendered_total")


def some_pages(count: int, side: float = 300.0) -> SentFile:
    sheets = [Sheet([f"page {number}"], size=(side, side)) for number in range(count)]
    return SentFile(pdf(sheets), f"file of {count}")


@pytest.mark.parametrize("counts", [(40,), (4, 5)])
def test_pages_beyond_the_context_are_refused_before_one_is_drawn(counts: tuple[int, ...]) -> None:
    """Of one file, or of several together."""
    before = pages_drawn()
    chat = Chat((user(*(some_pages(count) for count in counts), "hm"),))
    with pytest.raises(InvalidRequest, match=r"at least \d{4,} tokens") as caught:
        prepare(GenerationRequest(chat))
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert pages_drawn() == before
    few = 1 + len(counts)  # a file that no other case has sent
    prepare(GenerationRequest(Chat((user(some_pages(few), "hm"),))))
    assert pages_drawn() == before + few


def test_more_pages_than_images_of_a_request_are_refused_before_one_is_drawn() -> None:
    before = pages_drawn()
    chat = Chat((user(some_pages(150, 24.0), ImageSource(png(), "0"), some_pages(106, 24.0)),))
    with pytest.raises(InvalidRequest, match="257 images; the limit is 256") as caught:
        prepare(GenerationRequest(chat), context=100_000)
    assert (caught.value.code, pages_drawn()) == ("too_many_images", before)


def test_the_answer_is_bounded_by_what_the_context_has_left() -> None:
    tokens = tuple(range(10, 20)) * 90
    assert prepare(GenerationRequest(tokens)).request.sampling.max_tokens == 100
    assert prepare(GenerationRequest(tokens, {"max_tokens": 7})).request.sampling.max_tokens == 7
    assert (
        prepare(GenerationRequest(tokens, {"max_tokens": 5000})).request.sampling.max_tokens == 100
    )
    assert prepare(GenerationRequest((10,) * 999)).request.sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match="1000 tokens"):
        prepare(GenerationRequest((10,) * 1000))


def test_the_first_bad_picture_ends_the_request_at_its_place() -> None:
    with pytest.raises(ImageError) as caught:
        prepare(
            GenerationRequest(
                Chat((user(ImageSource(png(), "good"), ImageSource(b"nonsense", "bad")),))
            )
        )
    assert caught.value.param == "bad"


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
def test_a_placeholder_written_by_hand_is_no_picture(text: str) -> None:
    assert prepare(GenerationRequest(Chat((user(text),)))).request.spans == ()
    beside = prepare(GenerationRequest(Chat((user(text, ImageSource(png(), "0")),)))).request
    assert [span.length for span in beside.spans] == [4]
    assert beside.tokens.count(PLACEHOLDER) == 4
    with pytest.raises(InvalidRequest, match="placeholder"):
        prepare(GenerationRequest(text))


def test_a_long_text_has_the_same_tokens_as_a_short_one() -> None:
    text = "Hello 中文! " * 100
    assert prepare(GenerationRequest(text)).request.tokens == tuple(TOKENIZER.encode(text))
    longer = text * 50
    assert prepare(GenerationRequest(longer), context=1 << 20).request.tokens == tuple(
        TOKENIZER.encode(longer)
    )
    with pytest.raises(
        InvalidRequest, match=f"{len(TOKENIZER.encode(longer))} tokens; the context length of 10000"
    ):
        prepare(GenerationRequest(longer), context=10_000)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was tokenised"))
    longest, context = max(map(len, TOKENIZER.backend.get_vocab())), 2000
    with pytest.raises(
        InvalidRequest,
        match=f"{longest * context + 1} characters, so at least {context + 1} tokens",
    ) as caught:
        prepare(GenerationRequest("x" * (longest * context + 1)), context=context)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (GenerationRequest((10,) * CONTEXT), "1000 tokens"),
        (
            GenerationRequest(Chat((user(ImageSource(png(), "0"), "hm " * CONTEXT),))),
            "at least 3016 tokens",
        ),
        (
            GenerationRequest(Chat((user(*[ImageSource(png(), "0")] * 257),))),
            "257 images",
        ),
        (GenerationRequest("hm", {"stop_token_ids": (10**6,)}), "stop_token_ids"),
        (GenerationRequest("hm", {"logit_bias": ((10**6, 1.0),)}), "logit_bias"),
        (GenerationRequest("hm", {"min_tokens": 9, "max_tokens": 8}), "min_tokens=9"),
    ],
)
def test_what_is_refused_for_little_is_refused_before_grammars_and_images(
    monkeypatch: pytest.MonkeyPatch, ask: GenerationRequest, match: str
) -> None:
    monkeypatch.setattr(Compiler, "compile", lambda *_: pytest.fail("it was compiled"))
    monkeypatch.setattr(Media, "open_all", lambda *_: pytest.fail("images were fetched"))
    with pytest.raises(InvalidRequest, match=match):
        prepare(replace(ask, constraint=OutputConstraint("regex", "x", "r")))


def test_a_grammar_that_will_not_do_is_refused_before_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Media, "open_all", lambda *_: pytest.fail("images were fetched"))
    with pytest.raises(InvalidRequest, match="regex"):
        prepare(
            GenerationRequest(
                Chat((user(ImageSource(png(), "0")),)),
                constraint=OutputConstraint("regex", "(", "regex"),
            )
        )


@pytest.mark.parametrize(
    ("constraint", "choice", "strict", "field"),
    [
        (OutputConstraint("json", {}, "response_format"), None, False, "response_format"),
        (None, "required", False, "tool_choice"),
        (None, None, True, "tools[0].function.strict"),
    ],
)
def test_a_form_that_no_plugin_can_hold_is_refused_by_its_field(
    constraint: OutputConstraint | None, choice: str | None, strict: bool, field: str
) -> None:
    tool = {"name": "look", "strict": strict}
    tools = ToolSet(read_tools([{"type": "function", "function": tool}]), choice)
    features = [plugin for plugin in plugins() if not plugin.requests.grammars]
    calls = AnswerFormat(FORMATS["hermes"])
    chat = Chat((user("Hi"),), tools=tools)
    with pytest.raises(InvalidRequest, match=f"^{re.escape(field)}: .*structured") as refused:
        prepare(
            GenerationRequest(chat, constraint=constraint), answer_format=calls, features=features
        )
    assert refused.value.param == field


def test_free_calls_need_no_grammar() -> None:
    tools = ToolSet(read_tools([{"type": "function", "function": {"name": "look"}}]))
    calls = AnswerFormat(FORMATS["hermes"])
    features = [plugin for plugin in plugins() if not plugin.requests.grammars]
    asked = GenerationRequest(Chat((user("Hi"),), tools=tools))
    assert prepare(asked, answer_format=calls, features=features).reading.form is calls.calls


def test_a_seed_is_drawn_when_none_is_given_and_kept_when_one_is() -> None:
    seeds = {prepare(GenerationRequest((10,))).request.sampling.seed for _ in range(3)}
    assert len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds)
    assert prepare(GenerationRequest((10,), {"seed": 5})).request.sampling.seed == 5


def test_top_p_of_nothing_means_the_likeliest_token() -> None:
    sampling = prepare(GenerationRequest((10,), {"top_p": 0.0, "top_k": 9})).request.sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


def test_what_the_client_sets_wins_over_the_checkpoint() -> None:
    defaults = AnswerDefaults(SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.05))
    sampling = prepare(GenerationRequest((10,), {"top_p": 0.5}), defaults).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.7, 0.5, 1.05)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {"temperature": 1.0}),
        ({}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 0.01, "top_p": 0.001, "top_k": 1},
            {"temperature": 0.01, "top_p": 0.001, "top_k": 1},
        ),
        (
            {"repetition_penalty": 1.05, "top_p": None, "max_new_tokens": 5},
            {"temperature": 1.0, "repetition_penalty": 1.05, "max_tokens": 5},
        ),
        (
            {"min_new_tokens": 3, "stop_strings": "END"},
            {"temperature": 1.0, "min_tokens": 3, "stop": ("END",)},
        ),
        ({"stop_strings": ["a", "b"]}, {"temperature": 1.0, "stop": ("a", "b")}),
    ],
)
def test_sampling_defaults_come_from_generation_config(
    tmp_path: Path, config: dict[str, Any] | None, expected: dict[str, float]
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    wanted = {"max_tokens": LARGEST, **expected}
    found = load_answer_defaults(tmp_path, SPEC)
    assert found == AnswerDefaults(SamplingParams(**wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "most"),
    [({}, 7), ({"max_tokens": 9}, 9), ({"min_tokens": 8}, 8), ({"max_tokens": 10**6}, None)],
)
def test_an_answer_of_no_given_length_has_the_usual_one(
    given: dict[str, int], most: int | None
) -> None:
    limited = AnswerDefaults(SamplingParams(max_tokens=7))
    request = prepare(GenerationRequest((10,), given), limited).request
    assert request.sampling.max_tokens == (most or CONTEXT - 1)


def test_sampling_out_of_bounds_is_refused_before_a_picture_is_fetched() -> None:
    """An Ask cannot even be made: nothing of it reaches the intake."""
    with pytest.raises(InvalidRequest, match="temperature: expected a number from 0 to 2, got 3"):
        GenerationRequest("text", {"temperature": 3})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"top_p": 7}',
        '{"stop_strings": [1]}',
        '{"suppress_tokens": [1e3]}',
        '{"suppress_tokens": [-1]}',
        '{"bad_words_ids": [7]}',
        '{"bad_words_ids": [[]]}',
        '{"bad_words_ids": [[1, 99999999]]}',
        '{"no_repeat_ngram_size": 100000}',
        '{"min_new_tokens": true}',
    ],
)
def test_a_broken_generation_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_answer_defaults(tmp_path, SPEC)


def test_a_checkpoints_bans_hold_for_every_answer(tmp_path: Path) -> None:
    end = SPEC.eos_token_ids[0]
    config = {"suppress_tokens": [7, 8], "bad_words_ids": [[7], [9, 4], [end]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    defaults = load_answer_defaults(tmp_path, SPEC)
    banned = ((7,), (8,), (9, 4))
    for request in (
        GenerationRequest((10,)),
        GenerationRequest("Hi", rules=AnswerRules(allowed_token_ids=(7, 9))),
        GenerationRequest(Chat((user("Hi"),))),
    ):
        allowed = () if request.rules is None else request.rules.allowed_token_ids
        rules = prepare(request, defaults).request.rules
        assert rules == TokenRules(allowed=allowed, banned=banned)


@pytest.mark.parametrize(("own", "size"), [(None, 3), (NoRepeat(2), 2)])
def test_a_requests_own_rule_goes_before_the_checkpoints(
    tmp_path: Path, own: NoRepeat | None, size: int
) -> None:
    (tmp_path / "generation_config.json").write_text('{"no_repeat_ngram_size": 3}')
    defaults = load_answer_defaults(tmp_path, SPEC)
    request = GenerationRequest((10,), rules=AnswerRules(no_repeat_ngram=own))
    assert prepare(request, defaults).request.rules == TokenRules(no_repeat=NoRepeat(size))


@pytest.mark.parametrize(
    ("given", "least"), [({}, 5), ({"max_tokens": 2}, 2), ({"min_tokens": 1}, 1)]
)
def test_the_checkpoints_shortest_answer_gives_way_to_the_requests(
    given: dict[str, int], least: int
) -> None:
    defaults = AnswerDefaults(SamplingParams(min_tokens=5))
    request = prepare(GenerationRequest((10,), given), defaults).request
    assert request.sampling.min_tokens == least


@pytest.mark.parametrize("form", ["hermes", "mistral", "gemma"])
def test_calls_that_may_not_come_are_banned_where_a_token_begins_them(form: str) -> None:
    """So that the prompt is the same whether tools may be called or not."""
    backend = Backend.from_str(TOKENIZER.backend.to_str())
    calls = FORMATS[form]
    backend.add_tokens([AddedToken(calls.opens, special=False)])
    tokenizer = Tokenizer(backend, TOKENIZER.named_tokens)
    tag: Any = backend.token_to_id(calls.opens)
    tools = read_tools([{"type": "function", "function": {"name": "look"}}])

    def made(tools: ToolSet | None, **sampling: Any) -> Request:
        ask = GenerationRequest(Chat((user("Hi"),), tools), sampling)
        return prepare(
            ask, context=4000, tokenizer=tokenizer, answer_format=AnswerFormat(calls)
        ).request

    free, none = made(ToolSet(tools)), made(ToolSet(tools, "none"))
    assert free.tokens == none.tokens and not free.sampling.logit_bias
    assert [*none.sampling.logit_bias] == [(tag, -100)]
    biased = made(ToolSet(tools, "none"), logit_bias=((7, 1.0), (tag, 5.0))).sampling
    assert [*biased.logit_bias] == [(7, 1.0), (tag, -100)]
    assert not made(None).sampling.logit_bias
    assert made(None).tokens == prepare(GenerationRequest(Chat((user("Hi"),)))).request.tokens
