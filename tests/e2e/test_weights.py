"""A server whose weights change: KV goes with the language model's, an image's embedding stays
until the vision tower's change, and nobody's answer is of two models.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.images import image_part, text_part, user
from tests.helpers.paths import strange_paths

pytestmark = pytest.mark.more

ENCODED = "saccade_images_encoded_total"
OPTIONS = ("--dtype", "float32", "--served-model-name", "tiny", "--api-key", "secret")
KEY = {"Authorization": "Bearer secret"}


def changed(folder: Path, part: str) -> Path:
    """A checkpoint like the one of `make_checkpoint`, but for one tensor whose name has `part`."""
    make_checkpoint(folder, "qwen3_vl")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if part in name)
    tensors[name] = tensors[name] + 1.0
    save_file(tensors, path, {"format": "pt"})
    return folder


def weights_file(served: Served, name: str) -> Path:
    return served.folders[name] / "model.safetensors"


@dataclass(frozen=True)
class Served:
    server: Server
    folders: Mapping[str, Path]

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, headers=KEY, timeout=60)

    def update(self, name: str) -> dict[str, Any]:
        assert self.post("/pause").json() == {"status": "paused"}
        body = {"model_path": str(self.folders[name])}
        told: dict[str, Any] = self.post("/update_weights", body).raise_for_status().json()
        assert self.post("/resume").json() == {"status": "resumed"}
        return told

    def body(self, **fields: Any) -> dict[str, Any]:
        parts = (image_part(picture(90, 120, seed=1)), text_part("what is there? " * 4))
        settings = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return {"messages": [user(*parts)], **settings, **fields}

    def ask(self) -> tuple[str, int]:
        """The answer, and how much of its prompt was cached."""
        answer = self.post("/v1/chat/completions", self.body()).raise_for_status().json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached

    @property
    def encoded(self) -> float:
        return self.server.metric(ENCODED)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base, logs = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("log")
    folders = {
        "first": make_checkpoint(base / "first", "qwen3_vl"),
        "language": changed(base / "language", "language_model.layers.0.self_attn.q_proj"),
        # Of the learned positions a small image meets few.
        "tower": changed(base / "tower", "visual.pos_embed"),
        "wider": make_checkpoint(base / "wider", "qwen3_vl", text={"intermediate_size": 160}),
    }
    with serving(folders["first"], logs, *OPTIONS, "--metrics-without-key") as server:
        yield Served(server, folders)


def test_kv_goes_with_the_language_model_and_embeddings_with_the_tower(
    served: Served, tmp_path: Path
) -> None:
    first, _ = served.ask()
    assert served.ask()[1] > 0 and served.encoded == 1
    assert served.update("language")["embeddings_kept"] is True
    other, cached = served.ask()
    assert other != first and cached == 0
    assert served.encoded == 1, "the tower is the same: so is the embedding"
    with serving(served.folders["language"], tmp_path, *OPTIONS) as fresh:
        assert Served(fresh, {}).ask()[0] == other
    assert served.update("tower")["embeddings_kept"] is False
    _, cached = served.ask()
    assert cached == 0 and served.encoded == 2
    assert served.update("first")["embeddings_kept"] is False
    assert served.ask() == (first, 0) and served.encoded == 3


def test_weights_that_cannot_be_read_change_nothing(served: Served, tmp_path: Path) -> None:
    before, _ = served.ask()
    body = {"model_path": str(served.folders["language"])}
    answer = served.post("/update_weights", body)
    assert answer.status_code == 400 and "must be paused" in answer.json()["error"]["message"]
    assert served.post("/pause?mode=wait").is_success
    for folder, said in (
        (served.folders["wider"], "config.json"),
        (tmp_path / "nowhere", "nowhere"),
        (Path("relative"), "absolute"),
    ):
        answer = served.post("/update_weights", {"model_path": str(folder)})
        assert answer.status_code == 400, folder
        assert said in answer.json()["error"]["message"]
    assert served.post("/resume").is_success
    assert served.ask()[0] == before


def test_paths_that_cannot_be_read_change_nothing(served: Served, tmp_path: Path) -> None:
    """As the folder or the file of weights, and as each of a folder's files."""
    before, _ = served.ask()
    strange = strange_paths(tmp_path)
    asked = [path for kind, path in strange.items() if kind != "surrogate"]
    for at, kind in enumerate(("loop", "folder", "pipe", "device", "below a file")):
        for name in ("config.json", "model.safetensors"):
            folder = tmp_path / f"{at} {name}"
            shutil.copytree(served.folders["language"], folder)
            (folder / name).unlink()
            (folder / name).symlink_to(strange[kind])
            asked.append(str(folder))
    unsayable = tmp_path / "names"
    shutil.copytree(served.folders["language"], unsayable)
    index = {"weight_map": {"x": "\ud800.safetensors"}}
    (unsayable / "model.safetensors.index.json").write_text(json.dumps(index))
    huge = tmp_path / "huge"
    shutil.copytree(served.folders["language"], huge)
    os.truncate(huge / "config.json", 1 << 40)
    assert served.post("/pause?mode=wait").is_success
    for path in (*asked, str(unsayable), str(huge)):
        answer = served.post("/update_weights_from_disk", {"model_path": path})
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["param"] == "model_path", path
    assert served.post("/resume").is_success
    assert served.ask()[0] == before


def test_sglang_s_clients_need_no_pause(served: Served, tmp_path: Path) -> None:
    """A request in flight is answered first, by the weights that it began with."""
    first, _ = served.ask()
    path, settings = "/update_weights_from_disk", {"flush_cache": True, "weight_version": "7"}
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(served.ask()[0]))
    asking.start()
    body = {"model_path": str(served.folders["language"]), **settings}
    assert served.post(path, body).raise_for_status().json()["success"] is True
    asking.join(60)
    other, _ = served.ask()
    assert other != first and found[0] in (first, other)
    for wrong in (tmp_path / "nowhere", Path("relative")):
        assert served.post(path, {"model_path": str(wrong)}).status_code == 400
    refused = served.post(path, {**body, "load_format": "flash_rl"})
    assert refused.status_code == 400 and "load_format" in refused.json()["error"]["message"]
    assert served.ask()[0] == other, "nobody waits for the end of a pause"
    back = {"model_path": str(served.folders["first"]), "keep_pause": True}
    served.post(path, back).raise_for_status()
    assert served.post("/resume").is_success and served.ask()[0] == first


def test_weights_come_by_shared_memory_and_are_copied(served: Served) -> None:
    """One segment in safetensors' layout, written again by the trainer while the server answers."""
    first, _ = served.ask()
    segment = SharedMemory(create=True, size=weights_file(served, "language").stat().st_size)
    assert segment.buf is not None
    try:
        folders = dict(served.folders) | {"shared": Path("/dev/shm") / segment.name}
        trainer = Served(served.server, folders)
        answers = {}
        for name in ("language", "tower"):
            segment.buf[:] = weights_file(served, name).read_bytes()
            kept = trainer.update("shared")["embeddings_kept"]
            assert kept is (name == "language")
            segment.buf[:] = bytes(segment.size)
            answers[name] = trainer.ask()[0]
        assert served.update("tower") and served.ask()[0] == answers["tower"]
        assert served.update("language") and served.ask()[0] == answers["language"] != first
        assert served.post("/pause").is_success
        refused = served.post("/update_weights", {"model_path": str(folders["shared"])})
        assert refused.status_code == 400 and segment.name in refused.json()["error"]["message"]
        assert served.post("/resume").is_success
        assert served.ask()[0] == answers["language"], "what is no checkpoint changes nothing"
    finally:
        segment.close()
        segment.unlink()
    assert served.update("first") and served.ask()[0] == first


def test_a_request_waits_for_the_end_of_a_pause(served: Served) -> None:
    wanted, _ = served.ask()
    paused = f"{served.server.url}/is_paused"
    assert served.post("/pause_generation?mode=keep").is_success
    assert httpx.get(paused, headers=KEY).json() == {"is_paused": True}
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(served.ask()[0]))
    asking.start()
    asking.join(1.0)
    assert asking.is_alive() and not found
    assert served.post("/continue_generation").is_success
    asking.join(30)
    assert found == [wanted]
    assert httpx.get(paused, headers=KEY).json() == {"is_paused": False}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_what_becomes_of_a_stream_is_the_modes_to_say(served: Served, mode: str) -> None:
    url = f"{served.server.url}/v1/chat/completions"
    body = served.body(max_tokens=300, stream=True)

    def stream(disturb: bool) -> tuple[list[str], bool]:
        texts, failed = [], False
        with httpx.stream("POST", url, json=body, headers=KEY, timeout=60) as answer:
            for line in answer.iter_lines():
                if '"content"' in line:
                    texts.append(line.split('"delta":')[1])
                    if disturb and len(texts) == 3:
                        assert served.post(f"/pause?mode={mode}").is_success
                        assert served.post("/resume").is_success
                failed |= '"error"' in line
        return texts, failed

    whole, _ = stream(disturb=False)
    texts, failed = stream(disturb=True)
    if mode == "abort":
        assert failed and len(texts) < len(whole)
    else:
        assert texts == whole and not failed


def test_only_who_has_the_key_may(served: Served) -> None:
    for path in ("/pause", "/resume", "/update_weights"):
        assert httpx.post(served.server.url + path, json={}).status_code == 401
    answer = served.post("/pause?mode=never")
    assert answer.status_code == 400 and "abort, wait, keep" in answer.json()["error"]["message"]
