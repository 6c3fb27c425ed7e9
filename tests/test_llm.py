"""`LLM`: the Python API, on a real engine process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from saccade import LLM, SamplingParams
from saccade.core.errors import CheckpointError, ConfigError, ImageError, InvalidRequest
from saccade.front.answer_rules import AnswerRules
from tests.fixtures.tiny import Reference, picture
from tests.helpers.images import data_url

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(
        checkpoint("qwen3_vl"),
        dtype="float32",
        threads=1,
        media_workers=1,
        max_total_tokens=8192,
        default_max_tokens=2,
    ) as llm:
        yield llm


def ask(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.more
def test_a_picture_may_be_an_image_an_array_a_path_bytes_or_a_url(llm: LLM, tmp_path: Path) -> None:
    pixels = picture(64, 96)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    url = data_url(path.read_bytes())
    parts: list[Any] = [
        Image.fromarray(pixels),
        pixels,
        path,
        {"type": "image", "image": path},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
    ]
    texts = {llm.chat(ask([part, "what?"]), GREEDY).text for part in parts}
    assert len(texts) == 1
    assert llm.chat(ask([picture(64, 96, seed=9), "what?"]), GREEDY).text not in texts


def test_the_same_picture_is_encoded_once(llm: LLM) -> None:
    pixels = picture(96, 64, seed=3)
    before = llm.metrics()["saccade_images_encoded_total"]
    first = llm.chat(ask([pixels, "what?"]), GREEDY)
    again = llm.chat(ask([pixels, "what?"]), GREEDY)
    assert first.text == again.text
    assert again.cached_tokens > first.cached_tokens
    assert llm.metrics()["saccade_images_encoded_total"] - before == 1


def test_a_batch_comes_back_in_order(llm: LLM) -> None:
    chats = [ask(f"number {i}") for i in range(6)]
    alone = [llm.chat(chat, GREEDY).text for chat in chats]
    assert [answer.text for answer in llm.chat(chats, GREEDY, progress=False)] == alone
    assert len(set(alone)) > 1


def test_answers_count_their_tokens(llm: LLM) -> None:
    answer = llm.chat(ask("quick brown"), SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2))
    assert answer.completion_tokens == len(answer.logprobs) == 5
    assert answer.finish_reason == "length"
    assert all(len(each.top) == 2 for each in answer.logprobs)


def test_what_cannot_be_served_is_refused_by_its_place(llm: LLM, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    place = "messages[0].content[0]"
    for content, kind, param in (
        ([broken, "x"], ImageError, place),
        ([tmp_path / "none.png", "x"], InvalidRequest, place),
        ([{"type": "video"}], InvalidRequest, f"{place}.video"),
    ):
        with pytest.raises(kind) as caught:
            llm.chat(ask(content), GREEDY)
        assert caught.value.param == param
    assert llm.chat(ask("still there?"), GREEDY).text


def test_a_prompts_tokens_are_scored_as_transformers_does(
    llm: LLM, reference: Callable[..., Reference]
) -> None:
    """In the engine's own process, in whose chunks nothing of the prompt is left out."""
    judge, pixels = reference("qwen3_vl"), picture(64, 96, seed=5)
    asked = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(2):
        answer = llm.chat(ask([pixels, "how many red circles?"]), asked, prompt_logprobs=2)
        first, *scored = answer.prompt_logprobs
        assert first is None and len(scored) == answer.prompt_tokens - 1
        assert answer.cached_tokens == 0
        found = [each for each in scored if each is not None]
        begin = Tokenizer.from_file(str(judge.folder / "tokenizer.json")).encode("<|im_start|>").ids
        tokens = [*begin, *(each.token for each in found)]
        rows = judge.logits(tokens, [judge.resize(pixels)]).log_softmax(dim=-1)[:-1]
        for row, score in zip(rows, found, strict=True):
            ids = [score.token, *(token for token, _ in score.top)]
            logprobs = [score.logprob, *(logprob for _, logprob in score.top)]
            assert len(ids) == 3 and logprobs == pytest.approx(row[ids].tolist(), abs=2e-4)
    assert llm.chat(ask("how many?"), GREEDY).prompt_logprobs == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("min_tokens", -1),
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 5),
        ("top_k", -2),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", -3),
        ("frequency_penalty", 3),
        ("seed", 2**63),
        ("logprobs", 21),
        ("logprobs", True),
        ("stop", ("x", 3)),
        ("logit_bias", ((1, 101.0),)),
        ("stop", ("x",) * 17),
        ("stop", ("",)),
        ("stop", "word"),
    ],
)
def test_sampling_out_of_bounds_is_refused_as_over_http(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: expected") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_what_the_engine_could_not_read_is_refused_before_it(llm: LLM) -> None:
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        ("stop_token_ids[1]", {"sampling": SamplingParams(stop_token_ids=(1, "2"))}),  # type: ignore[arg-type]
        ("ignore_eos", {"sampling": SamplingParams(ignore_eos="yes")}),  # type: ignore[arg-type]
        ("prompt_logprobs", {"prompt_logprobs": True}),
        ("allowed_token_ids[0]", {"rules": AnswerRules(allowed_token_ids=("a",))}),  # type: ignore[arg-type]
        ("sampling", {"sampling": object()}),
    )
    for field, given in wrong:
        with pytest.raises(InvalidRequest, match="expected") as caught:
            llm.chat(ask("hello"), **given)
        assert caught.value.param == field
    assert llm.chat(ask("hello"), SamplingParams(max_tokens=2)).completion_tokens == 2


def test_what_is_no_conversation_is_refused_by_its_place(llm: LLM) -> None:
    cases: tuple[tuple[Any, str], ...] = (
        ("x", "messages"),
        (ask("x")[0], "messages"),
        (["x"], "messages"),
        ([[]], "messages"),
        ([{"content": "x"}], "messages[0]"),
        ([*ask("x"), "y"], "messages[1]"),
        (ask([{"type": "text"}]), "messages[0].content[0].text"),
        (
            ask(["x", {"type": "image_url", "image_url": {}}]),
            "messages[0].content[1].image_url.url",
        ),
    )
    for messages, param in cases:
        with pytest.raises(InvalidRequest) as caught:
            llm.chat(messages, GREEDY, progress=False)
        assert caught.value.param == param, messages


def test_no_limit_of_top_k_has_two_spellings(llm: LLM) -> None:
    texts = {
        llm.chat(
            ask("hello"), SamplingParams(max_tokens=8, temperature=1.0, seed=3, top_k=top_k)
        ).text
        for top_k in (0, -1)
    }
    assert len(texts) == 1


def test_one_bad_conversation_of_a_batch_is_told_and_harms_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat([ask("fine"), ask([np.zeros((4, 4), np.float32), "x"])], GREEDY, progress=False)
    assert llm.chat(ask("still there?"), GREEDY).text


def test_an_option_or_model_that_will_not_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="thread"):
        LLM("demo", thread=1)
    with pytest.raises(ConfigError, match=r"--tune arena_mb=1: .*11 or more"):
        LLM("demo", arena_mb=1)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(tmp_path)


def chat_command(checkpoint: Callable[..., Path], *words: str) -> Any:
    """`saccade chat` about a file, ended."""
    asked = (sys.executable, "-m", "saccade", "chat", "what is it?")
    command = [*asked, "--model", str(checkpoint("qwen3_vl")), *words]
    wide = os.environ | {"COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=wide)


@pytest.mark.more
def test_the_command_line_answers_about_a_file(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(picture(64, 64)).save(path, "JPEG")
    done = chat_command(checkpoint, "--image", str(path), "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.more
def test_the_command_line_refuses_files_before_it_looks_for_the_model(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    missing = chat_command(checkpoint, "--image", str(tmp_path / "no.jpg"))
    assert missing.returncode != 0
    assert "no.jpg" in missing.stdout + missing.stderr
    assert "Traceback" not in missing.stderr
    text = tmp_path / "notes.md"
    text.write_text("no image")
    refused = chat_command(lambda _: tmp_path / "no-model", "--image", str(text))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {text}: the image is text")


LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"enum": ["left", "right"]},
                "box": {"type": "array", "items": {"enum": [0, 7]}, "minItems": 2, "maxItems": 4},
            },
            "required": ["where", "box"],
            "additionalProperties": False,
        },
    },
}


def test_a_forced_call_is_whole_whatever_the_weights_say(llm: LLM) -> None:
    """Every turn's call goes back with an image as its result."""
    messages = ask([picture(64, 96), "what?"])
    named = {"type": "function", "function": {"name": "look"}}
    drawn = set()
    for turn in range(4):
        sampling = SamplingParams(max_tokens=600, temperature=1.0, seed=turn)
        answer = llm.chat(messages, sampling, tools=[LOOK], tool_choice=named)
        (call,) = answer.tool_calls
        arguments = json.loads(call.arguments)
        assert (call.name, answer.text, answer.finish_reason) == ("look", "", "tool_calls")
        assert arguments["where"] in ("left", "right") and 2 <= len(arguments["box"]) <= 4
        assert answer.cached_tokens > 0 or turn == 0
        drawn.add(call.arguments)
        function = {"name": call.name, "arguments": call.arguments}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": call.id, "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": [picture(64, 96, seed=turn)]},
        ]
    assert len(drawn) > 1


def test_a_call_that_the_length_cuts_off_has_what_came_of_it(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=600, temperature=1.0, seed=3)
    forced: dict[str, Any] = {"tools": [LOOK], "tool_choice": "required"}
    whole = llm.chat(ask("what?"), sampling, **forced, parallel_tool_calls=False)
    cut = llm.chat(
        ask("what?"), replace(sampling, max_tokens=whole.completion_tokens - 14), **forced
    )
    (call,) = cut.tool_calls
    assert cut.finish_reason == "length" and not cut.text
    assert whole.tool_calls[0].arguments.startswith(call.arguments)


def test_tools_are_refused_in_python_as_over_http(llm: LLM) -> None:
    for given, param in (
        ({"tools": [LOOK, LOOK]}, "tools[1].function.name"),
        ({"tools": [LOOK], "tool_choice": "sometimes"}, "tool_choice"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.chat(ask("what?"), GREEDY, **given)
        assert caught.value.param == param
    free = llm.chat(ask("what?"), GREEDY, tools=[LOOK])
    assert (free.finish_reason, free.tool_calls, free.completion_tokens) == ("length", (), 8)


def test_an_answer_may_be_held_to_a_form(llm: LLM) -> None:
    hot = SamplingParams(max_tokens=50, temperature=1.0, seed=1)
    colours = {"choice": ["red", "blue"]}
    answers = llm.chat([ask("a"), ask("b")], hot, structured_outputs=colours, progress=False)
    assert all(answer.text in colours["choice"] for answer in answers)
    whole = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [[1, 2]]}}}
    assert llm.chat(ask("a"), hot, response_format=whole).text == "[1, 2]"
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json\.not"):
        llm.chat(ask("a"), hot, structured_outputs={"json": {"not": {}}})


def test_answers_are_as_long_as_the_option_says_where_a_call_says_nothing(llm: LLM) -> None:
    assert llm.chat(ask("Hello")).completion_tokens <= 2
    longer = SamplingParams(max_tokens=3, ignore_eos=True)
    assert llm.chat(ask("Hello"), longer).completion_tokens == 3


@pytest.mark.slow
def test_a_chat_goes_on_from_disk_in_another_process(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "media_workers": 1}
    options |= {"max_total_tokens": 8192, "kv_cache_dir": str(tmp_path / "kv")}
    question = ask([picture(96, 64, seed=3), "what is there, and how many of each? " * 4])
    with LLM(checkpoint("qwen3_vl"), **options) as llm:
        first, warm = llm.chat(question, GREEDY), llm.chat(question, GREEDY)
    with LLM(checkpoint("qwen3_vl"), **options) as llm:
        again = llm.chat(question, GREEDY)
        metrics = llm.metrics()
    assert again.text == first.text == warm.text
    assert again.cached_tokens == warm.cached_tokens > 0
    assert metrics["saccade_images_encoded_total"] == 0
