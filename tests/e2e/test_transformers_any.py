"""A server of a model that transformers' own modules serve: an image is decoded and encoded once,
and answers are transformers' own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
from safetensors.torch import load_file, save_file

from saccade.families.registry import load_spec
from saccade_bench.fixtures.server import Server, serving
from tests.e2e.test_picture_path import DECODED, ENCODED, OPTIONS, ask, image, png, spent, words
from tests.fixtures.tiny_any import AnyReference, any_reference, make_any, make_kind
from tests.fixtures.unlisted import SEERS
from tests.helpers.breadth import broad
from tests.helpers.images import text_part, user

pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(300),  # five processes import transformers
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
NEW_TOKENS = 24
SIZES = ((64, 96), (150, 70), (90, 200))


KINDS = ["llava_onevision", "glm4v", "granite4_vision", "idefics2"]


@pytest.fixture(scope="module", params=broad(KINDS, keep=["glm4v"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Positions of one axis, and of three; features for layers; text around images. A start
    imports transformers in five processes, so by default there is one: `tests/plugins/any_model`
    compares the other kinds.
    """
    folder = make_any(tmp_path_factory.mktemp("model") / "tiny", request.param)
    load_spec(folder)  # what transformers says of it is kept: a server's start does not wait for it
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(folder, tmp_path_factory.mktemp("log"), *OPTIONS) as server:
        yield server


def test_answers_are_transformers_own_and_an_image_is_encoded_once(
    server: Server, folder: Path
) -> None:
    reference = any_reference(folder)
    messages: list[dict[str, Any]] = []
    for number, size in enumerate(SIZES, 1):
        messages.append(user(image(png(*size, seed=1)), text_part("and this?")))
        with spent(server, DECODED, ENCODED) as so_far:
            answer = words(ask(server, *messages, max_tokens=NEW_TOKENS))
            assert so_far() == [1, 1]
        shown = [np.asarray(PIL.Image.open(BytesIO(png(*each, seed=1)))) for each in SIZES[:number]]
        assert answer == reference_words(reference, messages, shown)
        messages.append({"role": "assistant", "content": answer})
    with spent(server, DECODED, ENCODED) as so_far:
        ask(server, *messages, user(text_part("which was best?")))
        assert so_far() == [0, 0]


@pytest.mark.slow
def test_an_unproven_architecture_is_served_where_it_is_allowed(tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "model", SEERS["vipllava"])
    command = [sys.executable, "-m", "saccade", "serve", str(folder), *OPTIONS, "--port", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert refused.returncode != 0
    assert "VipLlavaForConditionalGeneration is not among the architectures" in refused.stderr
    assert "--parity unproven" in refused.stderr
    with serving(folder, tmp_path, *OPTIONS, "--parity", "unproven") as server:
        assert "unproven  a few prompts were compared" in server.log.read_text()
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert models[0]["unproven"] is True
        shown = image(png(64, 96, seed=1))
        answer = words(ask(server, user(shown, text_part("and this?")), max_tokens=NEW_TOKENS))
        pixels = np.asarray(PIL.Image.open(BytesIO(png(64, 96, seed=1))))
        messages = [user(shown, text_part("and this?"))]
        assert answer == reference_words(any_reference(folder), messages, [pixels])


def test_the_start_says_who_computes_and_what_is_slower(server: Server) -> None:
    said = server.log.read_text()
    assert "ForConditionalGeneration is not implemented natively" in said
    assert "slower" in said


@pytest.mark.slow
def test_a_server_whose_answers_are_transformers_own_starts(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, *OPTIONS, "--parity", "generate") as server:
        assert httpx.get(f"{server.url}/health").is_success


@pytest.mark.slow
def test_a_server_whose_answers_differ_does_not_start(tmp_path: Path) -> None:
    """The file has another head when transformers reads it than the engine has read."""
    wrong = make_any(tmp_path / "model", "llava_onevision")
    tensors, other = load_file(wrong / "model.safetensors"), tmp_path / "other.safetensors"
    (head,) = (name for name in tensors if name.endswith("lm_head.weight"))
    tensors[head] = tensors[head].flip(0).contiguous()
    save_file(tensors, other, metadata={"format": "pt"})
    swap = f"""
import shutil, sys
import saccade.plugins.any_model.parity as parity
from saccade.__main__ import main
real = parity.ReferenceChild.__init__
def after_the_engine_has_loaded(self, folder, *more):
    shutil.copy({str(other)!r}, folder / "model.safetensors")
    real(self, folder, *more)
parity.ReferenceChild.__init__ = after_the_engine_has_loaded
main()
"""
    words = ("serve", str(wrong), *OPTIONS, "--parity", "generate", "--port", "0")
    ended = subprocess.run(
        [sys.executable, "-c", swap, *words], capture_output=True, text=True, timeout=250
    )
    assert ended.returncode != 0
    assert "--parity generate: token 1 of the answer to" in ended.stdout + ended.stderr


def reference_words(
    reference: AnyReference, messages: list[dict[str, Any]], images: list[np.ndarray]
) -> str:
    tokenizer = reference.processor.tokenizer
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    made = reference.generate(prompt, images, NEW_TOKENS)
    found: str = tokenizer.decode(made, skip_special_tokens=True)
    return found
