"""The whole product: a real server process on real checkpoints' files, asked by the `openai`
SDK.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from saccade_bench.fixtures.server import Server, serving
from tests.e2e.ways import KEY
from tests.families.every import SEEING
from tests.fixtures.tiny import (
    Reference,
    picture,
    reference,
)
from tests.helpers.breadth import broad
from tests.helpers.images import image_part, text_part, user

pytestmark = pytest.mark.more

OPTIONS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "65536"),
    *("--chunked-prefill-size", "64"),
)
COUNTS = ("saccade_images_encoded_total", "saccade_images_decoded_total")
NEW_TOKENS = 32
PAGE = 16
"""Tokens of a page of the KV cache, which is found whole or not at all."""


def ask(client: openai.OpenAI, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    body = {"ignore_eos": True, **options.pop("extra_body", {})}
    settings = {"max_tokens": NEW_TOKENS, "temperature": 0, **options}
    create: Any = client.chat.completions.create
    return create(model="tiny", messages=messages, extra_body=body, **settings)


def reference_text(
    folder: Path,
    judge: Reference,
    messages: Sequence[dict[str, Any]],
    pictures: Sequence[np.ndarray],
) -> str:
    """transformers' own answer: its template rendering, its tokenizer's file, its pixels, its
    generate.
    """
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    plain = [
        {
            **message,
            "content": [
                {"type": "image"} if p["type"] == "image_url" else p for p in message["content"]
            ],
        }
        for message in messages
    ]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    prompt = tokenizer.apply_chat_template(
        plain, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pixels = [judge.resize(each) for each in pictures]
    tokens = backend.encode(judge.expand(str(prompt), pixels)).ids
    generation = judge.model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    return str(backend.decode(judge.generate(tokens, pixels, max_new_tokens=NEW_TOKENS)))


@pytest.mark.parametrize(
    # Of each family the engine's answers are compared in tests/families/test_contract.py.
    "family",
    broad(
        SEEING,
        keep=["qwen3_vl"],
    ),
)
def test_answers_over_http_are_those_of_transformers(
    family: Any,
    checkpoint: Callable[..., Path],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Text, one picture, three of different sizes, and a chat of three turns; then all at once."""
    folder = checkpoint(family)
    judge = reference(folder)
    a, b, c = picture(64, 90, seed=1), picture(130, 77, seed=2), picture(400, 300, seed=3)
    chats: list[tuple[list[dict[str, Any]], list[np.ndarray]]] = [
        ([user(text_part("how many red circles are there?"))], []),
        ([user(image_part(a), text_part("what?"))], [a]),
        (
            [
                user(
                    text_part("one "),
                    image_part(a),
                    text_part(" two "),
                    image_part(b),
                    text_part(" three "),
                    image_part(c),
                )
            ],
            [a, b, c],
        ),
    ]
    turns: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if family == "qwen3_vl":
            server: Server = request.getfixturevalue("tiny")
        else:
            server = stack.enter_context(serving(folder, tmp_path, *OPTIONS))
        before = [server.metric(name) for name in COUNTS]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        for index, each in enumerate((a, b, c)):
            turns.append(user(image_part(each), text_part(f"turn {index}")))
            answer = ask(client, turns).choices[0].message.content
            assert answer == reference_text(folder, judge, turns, [a, b, c][: index + 1])
            turns.append({"role": "assistant", "content": [text_part(answer)]})
        wanted = [reference_text(folder, judge, *chat) for chat in chats]
        for chat, want in zip(chats, wanted):
            assert ask(client, chat[0]).choices[0].message.content == want
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda chat: ask(client, chat[0]).choices[0].message.content, chats * 3)
            )
        assert answers == wanted * 3
        assert [server.metric(name) for name in COUNTS] == [each + 3 for each in before]


@pytest.mark.parametrize(
    "options",
    [
        ("--tune", "arena_mb=1"),  # refused by the server
        # Refused by the engine, which alone sees the devices.
        ("--tune", "all_reduce=nccl", "--device", "cpu"),
    ],
)
def test_a_start_up_error_is_one_line(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "saccade", "serve", "demo", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    # What is being loaded is said before anything is known to be wrong.
    assert done.returncode == 1 and "http://" not in done.stdout
    assert re.fullmatch(rf"error: {options[0]} {options[1]}.*\n", done.stderr)
