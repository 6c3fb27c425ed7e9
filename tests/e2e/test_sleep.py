"""A server that sleeps: its memory is given back, what is asked meanwhile waits, and answers are
the same afterwards. As `/sleep` and `/wake_up`, and as SGLang's routes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from saccade_bench.fixtures.server import serving
from tests.e2e.test_weights import KEY, OPTIONS, Served
from tests.fixtures.tiny import make_checkpoint

pytestmark = pytest.mark.more

WIDE = 1 << 16
"""Of the language model's inner layer: the checkpoint has some hundred megabytes."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base, logs = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("log")
    folders = {
        "first": make_checkpoint(base / "first", "qwen3_vl", text={"intermediate_size": WIDE}),
        "other": make_checkpoint(
            base / "other", "qwen3_vl", seed=7, text={"intermediate_size": WIDE}
        ),
    }
    with serving(folders["first"], logs, *OPTIONS, "--metrics-without-key") as server:
        yield Served(server, folders)


def weights(served: Served) -> int:
    return (served.folders["first"] / "model.safetensors").stat().st_size


def memory(served: Served) -> int:
    """What the server's processes have for themselves."""
    children = psutil.Process(served.server.process.pid).children(recursive=True)
    return sum(each.memory_full_info().uss for each in children)


def sleeping(served: Served) -> bool:
    found: bool = httpx.get(f"{served.server.url}/is_sleeping", headers=KEY).json()["is_sleeping"]
    return found


def test_weights_go_with_a_deep_sleep_and_come_back(served: Served) -> None:
    first, _ = served.ask()
    assert served.ask()[1] > 0
    encoded, before = served.encoded, memory(served)
    told = served.post("/sleep?level=2").raise_for_status().json()
    assert told == {"status": "asleep", "released": ["weights", "kv_cache"]} and sleeping(served)
    assert before - memory(served) > 0.8 * weights(served)
    told = served.post("/wake_up").raise_for_status().json()
    assert told == {"status": "awake", "released": [], "embeddings_kept": True}
    assert not sleeping(served) and memory(served) < before + 0.3 * weights(served)
    assert served.ask() == (first, 0), "KV went; the answer is the same"
    assert served.encoded == encoded + 1, "so did the embedding"


def test_other_weights_leave_no_memory_to_the_old(served: Served) -> None:
    found = []
    for name in ("other", "first", "other", "first"):
        served.update(name)
        found.append(memory(served))
    assert max(found) < min(found) + 0.3 * weights(served)


def test_a_light_sleep_keeps_weights_that_lie_in_host_memory(served: Served) -> None:
    first, _ = served.ask()
    told = served.post("/sleep").raise_for_status().json()
    assert told["released"] == ["kv_cache"]
    assert served.post("/wake_up").json()["status"] == "awake"
    assert served.ask() == (first, 0)


def test_a_request_waits_for_the_end_of_a_sleep(served: Served) -> None:
    wanted, _ = served.ask()
    served.post("/sleep?level=2").raise_for_status()
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(served.ask()[0]))
    asking.start()
    refused = served.post("/resume")
    assert refused.status_code == 400 and "/wake_up" in refused.json()["error"]["message"]
    assert served.post("/wake_up?tags=kv_cache").json()["released"] == ["weights"]
    asking.join(1.0)
    assert asking.is_alive() and sleeping(served)
    assert served.post("/wake_up?tags=weights").json()["status"] == "awake"
    asking.join(30)
    assert found == [wanted]


def test_a_sleeper_takes_other_weights_without_a_second_network(served: Served) -> None:
    """As training loops do: weights are written while the server sleeps."""
    first, _ = served.ask()
    told = served.post("/release_memory_occupation", {"tags": ["weights"]}).json()
    assert told["released"] == ["weights"]
    body = {"model_path": str(served.folders["other"])}
    assert served.post("/update_weights_from_disk", body).json()["embeddings_kept"] is False
    assert not sleeping(served)
    assert served.post("/resume_memory_occupation", {}).json()["status"] == "awake"
    assert served.ask()[0] != first
    served.update("first")
    assert served.ask()[0] == first


def test_weights_that_are_gone_leave_the_server_asleep(served: Served) -> None:
    first, _ = served.ask()
    folder = served.folders["first"]
    served.post("/sleep?level=2&mode=wait").raise_for_status()
    folder.rename(folder.with_name("gone"))
    answer = served.post("/wake_up")
    assert answer.status_code == 400 and str(folder) in answer.json()["error"]["message"]
    assert sleeping(served)
    folder.with_name("gone").rename(folder)
    assert served.post("/wake_up").json()["status"] == "awake"
    assert served.ask()[0] == first


def test_what_cannot_be_slept_is_refused_and_all_goes_on(served: Served) -> None:
    first, _ = served.ask()
    for path, said in (
        ("/sleep?level=0", "expected 1 or 2"),
        ("/sleep?mode=keep", "abort, wait"),
        ("/wake_up?tags=all", "weights, kv_cache"),
    ):
        answer = served.post(path)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], path
    for path in ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"):
        assert httpx.post(served.server.url + path, json={}).status_code == 401, path
    assert not sleeping(served)
    assert served.ask()[0] == first


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_embeddings_on_disk_outlive_a_sleep(tmp_path: Path, ranks: str) -> None:
    """An image is encoded once, whether or not the server slept since."""
    folder = make_checkpoint(tmp_path / "model", "qwen3_vl")
    kept = ("--embedding-cache-dir", str(tmp_path / "embeddings"), "--tp-size", ranks)
    with serving(folder, tmp_path, *OPTIONS, *kept, "--metrics-without-key") as server:
        served = Served(server, {})
        first, _ = served.ask()
        for level in (1, 2):
            served.post(f"/sleep?level={level}").raise_for_status()
            assert served.post("/wake_up").json()["embeddings_kept"] is True
            assert served.ask() == (first, 0)
        assert served.encoded == 1


@pytest.mark.slow
def test_weights_stay_while_something_holds_on_to_them(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_vl")
    kept = ("--kv-cache-dir", str(tmp_path / "kv"))
    with serving(folder, tmp_path, *OPTIONS, *kept) as server:
        served = Served(server, {})
        first, _ = served.ask()
        answer = served.post("/sleep?level=2")
        assert answer.status_code == 400
        assert "--kv-cache-dir" in answer.json()["error"]["message"]
        assert served.ask()[0] == first, "it was not left paused"
        assert served.post("/sleep").is_success and served.post("/wake_up").is_success
        assert served.ask()[0] == first


@pytest.mark.slow
def test_a_refused_sleep_ends_no_request(tmp_path: Path) -> None:
    """A deep sleep that would end requests in flight, of a server that must keep its weights."""
    options = (*OPTIONS, "--kv-cache-dir", str(tmp_path / "kv"))
    body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 200}
    body |= {"stream": True, "ignore_eos": True}
    with (
        serving("demo", tmp_path, *options) as server,
        httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        refused = client.post("/sleep?level=2")
        assert refused.status_code == 400
        assert "--kv-cache-dir" in refused.json()["error"]["message"]
        assert not client.get("/is_sleeping").json()["is_sleeping"]
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"length"' in "".join(rest), "and it went on"
