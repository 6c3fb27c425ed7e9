"""Adapters on a real server: chosen by `model`, listed, loaded and unloaded while others are
answered, and one embedding for all that leave the tower alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.adapters import LANGUAGE, endless, train
from tests.helpers.images import image_part, text_part, user
from tests.helpers.paths import strange_paths

pytestmark = pytest.mark.more

ENCODED = "saccade_images_encoded_total"
TOWER = r".*visual\.blocks\.\d+\.attn\.(qkv|proj)"


@dataclass(frozen=True)
class Served:
    server: Server
    folders: Mapping[str, Path]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, timeout=60)

    def load(self, name: str, folder: str) -> httpx.Response:
        path = str(self.folders[folder])
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def ask(self, model: str, seed: int = 1) -> str:
        parts = (image_part(picture(90, 120, seed=seed)), text_part("what is there?"))
        fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        body = {"model": model, "messages": [user(*parts)], **fields}
        answer = self.post("/v1/chat/completions", body).raise_for_status().json()
        assert answer["model"] == model
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def models(self) -> dict[str, str | None]:
        listed = httpx.get(f"{self.server.url}/v1/models").json()["data"]
        return {each["id"]: each.get("parent") for each in listed}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_vl")
    whole, logs = endless(folder), tmp_path_factory.mktemp("log")
    kinds = {"one": LANGUAGE, "two": LANGUAGE, "tower": TOWER}
    folders = {
        name: train(folder / name, whole, seed, modules, r=4, lora_alpha=8).folder
        for seed, (name, modules) in enumerate(kinds.items())
    }
    options = ("--dtype", "float32", "--served-model-name", "tiny", "--tune", "max_loras=3")
    with serving(folder, logs, *options, "--lora", f"one={folders['one']}") as server:
        yield Served(server, folders)


def test_an_adapter_is_a_model_by_its_name(served: Served) -> None:
    assert served.models() == {"tiny": None, "one": "tiny"}
    assert served.ask("one") != served.ask("tiny")
    one = httpx.get(f"{served.server.url}/v1/models/one").json()
    assert one["id"] == "one" and one["max_model_len"] > 0
    fields = {"max_tokens": 1, "max_output_tokens": 1, "messages": [user(text_part("hi"))]}
    body = {"model": "no such", "prompt": "hi", "input": "hi", **fields}
    for path, names in {
        "/v1/chat/completions": ("model", "messages", "max_tokens"),
        "/v1/completions": ("model", "prompt", "max_tokens"),
        "/v1/messages": ("model", "messages", "max_tokens"),
        "/v1/responses": ("model", "input", "max_output_tokens"),
    }.items():
        asked = {name: body[name] for name in names}
        assert served.post(path, asked).status_code == 404
        answer = served.post(path, {**asked, "model": "one"})
        assert (answer.status_code, answer.json()["model"]) == (200, "one"), path
    # Decisions are the model's own: no adapter is passed over in silence.
    question = {"type": "predicate", "name": "fox", "instructions": "There is a fox."}
    decisions = {"model": "one", "input": "hi", "questions": [question]}
    assert served.post("/v1/decisions", decisions).status_code == 404


def test_adapters_that_leave_the_tower_alone_share_one_embedding(served: Served) -> None:
    assert served.load("two", "two").is_success
    before = served.server.metric(ENCODED)
    assert len({served.ask(name, seed=2) for name in ("tiny", "one", "two")}) == 3
    assert served.server.metric(ENCODED) == before + 1
    assert served.load("tower", "tower").is_success
    assert served.ask("tower", seed=2) == served.ask("tower", seed=2)
    assert served.server.metric(ENCODED) == before + 2
    assert served.unload("tower").is_success and served.unload("two").is_success


def test_loads_and_unloads_harm_no_answer_beside_them(served: Served) -> None:
    wanted = {name: served.ask(name, seed=3) for name in ("tiny", "one")}
    assert served.load("two", "two").is_success
    changed = served.ask("two", seed=3)
    assert served.unload("two").is_success
    over, faults = threading.Event(), list[str]()

    def go_on(name: str) -> None:
        while not over.is_set():
            if (answer := served.ask(name, seed=3)) != wanted[name]:
                faults.append(f"{name}: {answer}")

    threads = [threading.Thread(target=go_on, args=(name,)) for name in wanted for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(6):
        name = f"two {turn}"
        assert served.load(name, "two").is_success
        assert served.ask(name, seed=3) == changed
        assert served.unload(name).is_success
        body = {"model": name, "messages": [user(text_part("hi"))]}
        assert served.post("/v1/chat/completions", body).status_code == 404
    over.set()
    for thread in threads:
        thread.join()
    assert not faults


def test_an_unload_lets_its_requests_end(served: Served) -> None:
    assert served.load("two", "two").is_success
    fields = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    body = {"model": "two", "messages": [user(text_part("what is there?"))], **fields}
    url = f"{served.server.url}/v1/chat/completions"

    def stream(disturb: bool) -> list[str]:
        texts = []
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if '"content"' in line:
                    texts.append(line.split('"delta":')[1])
                    if disturb and len(texts) == 2:
                        assert served.unload("two").is_success
        return texts

    undisturbed = stream(disturb=False)
    assert stream(disturb=True) == undisturbed
    assert served.models() == {"tiny": None, "one": "tiny"}


def test_what_cannot_be_loaded_is_refused(served: Served, tmp_path: Path) -> None:
    def said(name: str, path: str) -> str:
        body = {"lora_name": name, "lora_path": path}
        answer = served.post("/v1/load_lora_adapter", body)
        assert answer.status_code == 400
        message: str = answer.json()["error"]["message"]
        return message

    one = str(served.folders["one"])
    assert "'one' is loaded" in said("one", one)
    assert "name of the base model" in said("tiny", one)
    assert "expected an absolute path" in said("new", "adapters/one")
    assert "No such file" in said("new", str(tmp_path))
    assert served.unload("new").status_code == 404
    assert served.load("two", "two").is_success and served.load("three", "two").is_success
    assert "the limit is 3" in said("four", one)
    assert served.unload("two").is_success and served.unload("three").is_success


def test_a_path_that_cannot_be_read_ends_nothing(served: Served, tmp_path: Path) -> None:
    """Neither the server nor the request in flight."""
    wanted = served.ask("tiny", seed=4)
    fields = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    body = {"model": "tiny", "messages": [user(text_part("what is there?"))], **fields}
    url = f"{served.server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        for kind, path in strange_paths(tmp_path).items():
            told = path.replace("\ud800", "\\ud800").replace("\0", "\\u0000")
            content = f'{{"lora_name": "new", "lora_path": "{told}"}}'
            answer = httpx.post(
                f"{served.server.url}/v1/load_lora_adapter", content=content, timeout=60
            )
            assert answer.status_code == 400, (kind, answer.text)
            if kind != "surrogate":  # which is no JSON
                assert answer.json()["error"]["param"] == "lora_path", kind
        assert "data: [DONE]" in list(lines)
    assert served.ask("tiny", seed=4) == wanted
    assert httpx.get(f"{served.server.url}/health").status_code == 200
