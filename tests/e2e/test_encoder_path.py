"""The encoder path through the real server: its options change no answer, its disk outlives a
restart, its budgets hold for any request.
"""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from saccade_bench.fixtures.server import Server, serving
from tests.e2e.test_serve import ask, reference_text
from tests.e2e.ways import TOWER
from tests.fixtures.tiny import make_checkpoint, picture, reference
from tests.helpers.images import data_url, image_part, text_part, user

pytestmark = pytest.mark.more

COMMON = ("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "8192")
MIB = 1 << 20
ROUNDS = 4


def connect(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=900)


def chat(client: openai.OpenAI, rounds: int) -> list[str]:
    """Answers of a chat with a new picture a round, all of it sent again each time."""
    messages: list[dict[str, Any]] = []
    for number in range(rounds):
        messages.append(
            user(
                image_part(picture(96, 64 + 32 * (number % 3), seed=number)),
                text_part(f"and picture {number}?"),
            )
        )
        answer = ask(client, messages, max_tokens=6).choices[0].message.content
        messages.append({"role": "assistant", "content": [text_part(answer)]})
    return [message["content"][0]["text"] for message in messages if message["role"] == "assistant"]


@pytest.mark.slow
def test_answers_with_every_option_of_the_tower_are_those_of_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2_5_vl")
    judge = reference(folder)
    pictures = [picture(130, 77, seed=2), picture(400, 300, seed=3)]
    message = [
        user(
            text_part("one "),
            image_part(pictures[0]),
            text_part(" two "),
            image_part(pictures[1]),
            text_part(" which?"),
        )
    ]
    with serving(folder, tmp_path, *COMMON, *TOWER, "--chunked-prefill-size", "32") as server:
        assert ask(connect(server), message).choices[0].message.content == reference_text(
            folder, judge, message, pictures
        )
        assert server.metric("saccade_images_encoded_total") == 2


@pytest.mark.slow
def test_a_restarted_server_answers_a_chat_from_disk(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_vl")
    disk = ("--embedding-cache-dir", f"{tmp_path / 'disk'}:64MiB")
    with serving(folder, tmp_path, *COMMON, *disk) as server:
        before = chat(connect(server), ROUNDS)
        assert server.metric("saccade_images_encoded_total") == ROUNDS
    with serving(folder, tmp_path, *COMMON, *disk) as server:
        assert chat(connect(server), ROUNDS) == before
        assert server.metric("saccade_images_encoded_total") == 0
        assert server.metric("saccade_images_decoded_total") == 0
        assert server.metric("saccade_embedding_hits_total", tier="disk") == ROUNDS


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_request_of_64_large_pictures_keeps_its_budgets(tmp_path: Path) -> None:
    """401 MB of pixels through an arena of 32, two pictures' patches in a step at most."""
    text = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 262144,
    }
    vision = {"depth": 1, "num_heads": 1, "hidden_size": 16, "deepstack_visual_indexes": [0]}
    folder = make_checkpoint(tmp_path / "model", "qwen3_vl", text=text, vision=vision)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["size"]["longest_edge"] = 1 << 22
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    patches = (1088 // 16) * (1920 // 16)
    options = (
        "--dtype",
        "float32",
        "--served-model-name",
        "tiny",
        *("--tune", "arena_mb=32", "--tune", f"max_encode_patches={2 * patches}"),
    )
    with serving(folder, tmp_path, *options, threads=2) as server:
        most = 0.0
        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.2):
                most = max(most, server.metric("saccade_arena_bytes_in_use"))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            answer = ask(
                connect(server),
                [user(*(jpeg_part(number) for number in range(64)), text_part("which?"))],
                max_tokens=4,
            )
        finally:
            done.set()
            watching.join()
        assert answer.usage.prompt_tokens > 64 * patches // 4
        assert (
            server.metric("saccade_images_encoded_total")
            == server.metric("saccade_images_decoded_total")
            == 64
        )
        assert server.metric("saccade_image_patches_encoded_total") == 64 * patches
        # An image is begun as soon as its pixels are there: with or without another.
        assert patches <= server.metric("saccade_max_step_patches") <= 2 * patches
        assert server.metric("saccade_image_bytes_shipped_total") == 64 * 1088 * 1920 * 3
        assert 0 < most <= 32 * MIB
        server.wait_for_metric("saccade_arena_bytes_in_use", 0)


def jpeg_part(number: int) -> dict[str, Any]:
    """A picture of 1920x1080 unlike the others, in few bytes."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((1080, 1920, 3), (number * 3, 90, 255 - number), np.uint8)).save(
        buffer, "JPEG"
    )
    return {
        "type": "image_url",
        "image_url": {"url": data_url(buffer.getvalue(), "image/jpeg")},
    }
