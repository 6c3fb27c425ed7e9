"""A chat goes on where it was, on a server that was killed and started again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.images import image_part, text_part, user

pytestmark = pytest.mark.more

IMAGES, PAGE = 8, 16
SETTINGS = {"temperature": 0, "ignore_eos": True}
KEPT = {"tier": "disk"}


def answer(server: Server, messages: list[Any], **fields: Any) -> Any:
    url = f"{server.url}/v1/chat/completions"
    body = {"messages": messages, **SETTINGS, **fields}
    return httpx.post(url, json=body, timeout=60).raise_for_status().json()


def ask(server: Server, messages: list[Any], **fields: Any) -> tuple[str, int, int]:
    """The answer, the prompt's tokens, and those of them that were cached."""
    told = answer(server, messages, **{"max_tokens": 12, **fields})
    usage = told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return told["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def begin_answer(server: Server, messages: list[Any]) -> None:
    """Read as far as its first text."""
    body = {"messages": messages, "max_tokens": 500, "stream": True, **SETTINGS}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as told:
        for line in told.iter_lines():
            if '"content":"' in line.replace(" ", "") and '"content":""' not in line:
                server.process.kill()
                return


def test_a_killed_server_goes_on_from_disk(tmp_path: Path) -> None:
    """Killed within a chat's second turn: the next server prefills no token that was written, and
    encodes nothing. Another tenant finds nothing of it, nor anybody once it was flushed.
    """
    model = make_checkpoint(tmp_path / "model", "qwen3_vl")
    options = ("--dtype", "float32", "--kv-cache-dir", str(tmp_path / "kv"))
    shown = [image_part(picture(90, 120, seed=seed)) for seed in range(IMAGES)]
    history = [user(*shown, text_part("what is there, and how many of each? " * 4))]
    with serving(model, tmp_path, *options, status=-signal.SIGKILL) as server:
        text, prompt, _ = ask(server, history)
        written = (prompt + 11) // PAGE  # the last token drawn was never computed
        server.wait_for_metric("saccade_kv_tier_entries", written, **KEPT)
        history += [{"role": "assistant", "content": text}, user(text_part("and which is red?"))]
        begin_answer(server, history)
        server.process.wait(20)
    with serving(model, tmp_path, *options) as server:
        usage = answer(server, history, max_tokens=12)["usage"]["prompt_tokens_details"]
        cached, tiers = usage["cached_tokens"], usage["cached_tokens_by_tier"]
        traced = answer(server, history, max_tokens=12, saccade={"trace": True})
        again = traced["usage"]["prompt_tokens_details"]
        assert "cached_tokens_by_tier" not in again, "all of them are on the device now"
        assert traced["saccade"]["prompt"]["tiers"] == {"device": again["cached_tokens"]}
        text = traced["choices"][0]["message"]["content"]
        assert (written - 2) * PAGE <= cached <= written * PAGE, "text may tokenise otherwise"
        assert server.metric("saccade_restored_tokens_total", **KEPT) == cached
        assert tiers == {"disk": cached}, "usage says where they lay"
        assert server.metric("saccade_images_encoded_total") == 0
        other, _, nothing = ask(server, history, cache_salt="another tenant")
        assert nothing == 0 and other == text, "computed, it is the same answer"
        assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
        assert ask(server, history) == (text, prompt_of(server, history), 0)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def prompt_of(server: Server, messages: list[Any]) -> int:
    """Tokens of the prompt."""
    return ask(server, messages, max_tokens=1)[1]
