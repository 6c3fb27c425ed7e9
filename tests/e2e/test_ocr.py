"""`saccade ocr` beside real servers: each page is drawn, decoded and encoded once, the prompt is
shared, and what was done is not done again.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.plugins.ocr.page_prompts import GENERAL
from saccade_bench.fixtures.pdf import Sheet, pdf
from saccade_bench.fixtures.server import Server, serving
from tests.e2e.test_picture_path import DECODED, ENCODED, spent
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.images import png

pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(300),
]
RENDERED = "saccade_pages_rendered_total"
OCR = [sys.executable, "-m", "saccade", "ocr"]
SIZE = (160.0, 128.0)


def sheets(count: int, first: int = 0) -> list[Sheet]:
    return [
        Sheet([f"page {number}"], picture(40, 60, 500 + number), SIZE, 12)
        for number in range(first, first + count)
    ]


def talkative(folder: Path) -> Path:
    """A model whose answers end by themselves: most of its tokens are ends."""
    path = folder / "generation_config.json"
    facts: dict[str, Any] = json.loads(path.read_text())
    size = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    path.write_text(json.dumps({**facts, "eos_token_id": [*range(0, size, 2)]}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "PaddleOCR-VL"
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}  # as large as pages are drawn
    return talkative(make_checkpoint(folder, "paddleocr_vl", processor={"size": size}))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = tmp_path_factory.mktemp("files")
    with serving(model, tmp_path_factory.mktemp("log"), "--files-dir", str(files)) as server:
        yield server


def ocr(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OCR, *map(str, words)], capture_output=True, text=True, timeout=200)


def answers(server: Server) -> float:
    return server.metric("saccade_requests_total", outcome="stop")


def test_each_page_is_drawn_decoded_and_encoded_once(server: Server, tmp_path: Path) -> None:
    path, output = tmp_path / "six.pdf", tmp_path / "six.md"
    path.write_bytes(pdf(sheets(6)))
    with spent(server, RENDERED, DECODED, ENCODED) as so_far:
        done = ocr(path, "--model", server.url, "--output", output, "--pages", "1-2,5-")
        assert done.returncode == 0, done.stderr
        assert so_far() == [4, 4, 4]
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    titles = [f"<!-- six.pdf, page {number} -->" for number in (1, 2, 5, 6)]
    text = output.read_text()
    assert re.findall("<!--.*-->", text) == titles
    assert {*tmp_path.iterdir()} == {path, output}
    assert httpx.get(f"{server.url}/v1/files").json()["data"] == [], "uploads are deleted"
    with spent(server, RENDERED, DECODED, ENCODED) as so_far:
        done = ocr(path, "--base-url", f"{server.url}/v1", "--concurrency", "1")
        assert done.returncode == 0, done.stderr
        assert so_far() == [2, 2, 2], "the server knows the other four"
    assert all(each in done.stdout for each in text.split("\n\n"))


def test_a_page_is_asked_as_the_model_was_trained(server: Server, tmp_path: Path) -> None:
    """The answer is that to the page's image and two words, and nothing else."""
    path, image = tmp_path / "one.pdf", tmp_path / "one.png"
    path.write_bytes(pdf(sheets(1, first=20)))
    import pypdfium2

    with pypdfium2.PdfDocument(path) as document:
        drawn = document[0].render(scale=108 / 72, rev_byteorder=True, may_draw_forms=False)
        drawn.to_pil().convert("RGB").save(image)
    texts = []
    for each in (path, image):
        done = ocr(each, "--model", server.url, "--output", tmp_path / "o.md")
        assert done.returncode == 0, done.stderr
        texts.append((tmp_path / "o.md").read_text().partition("\n")[2])
    assert texts[0] == texts[1]


def test_a_bad_page_costs_no_other(server: Server, tmp_path: Path) -> None:
    odd = Sheet(["a ribbon"], size=(8.0, 4000.0))
    path = tmp_path / "odd.pdf"
    path.write_bytes(pdf([*sheets(2, first=30), odd, *sheets(1, first=32)]))
    done = ocr(path, "--model", server.url)
    assert done.returncode == 1
    assert "error: odd.pdf, page 3: " in done.stderr and "1 failed" in done.stderr
    titles = re.findall(r"<!-- odd.pdf, page (\d)(:?)", done.stdout)
    assert titles == [("1", ""), ("2", ""), ("3", ":"), ("4", "")]


def test_an_interrupted_command_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    path, output = tmp_path / "many.pdf", tmp_path / "many.md"
    path.write_bytes(pdf(sheets(40, first=100)))
    kept = output.with_name("many.md.pages")
    words = [path, "--model", server.url, "--output", output]
    command = [*OCR, *map(str, words), "--concurrency", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 100
        while not kept.exists() or kept.read_bytes().count(b"\n") < 3:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=100)
    done = kept.read_bytes().count(b"\n")
    assert running.returncode == 130 and f"{done} pages kept in {kept}" in told
    assert 3 <= done < 40 and not output.exists()
    server.wait_for_metric("saccade_requests_running", 0)
    before = answers(server)
    again = ocr(*words)
    assert again.returncode == 0, again.stderr
    assert f"{done} kept from before" in again.stderr
    assert answers(server) - before == 40 - done
    assert output.read_text().count("<!-- many.pdf, page ") == 40 and not kept.exists()


def test_pages_share_the_prompts_text(tmp_path: Path) -> None:
    """A general model sees the prompt first: after the first page its tokens are cached."""
    path = tmp_path / "five.pdf"
    path.write_bytes(pdf(sheets(5)))
    model = talkative(make_checkpoint(tmp_path / "model", "qwen3_vl"))
    with serving(model, tmp_path, "--tune", "page_size=16") as server:
        message = {"role": "user", "content": GENERAL}
        body = {"messages": [message], "add_generation_prompt": False}
        prompt = httpx.post(f"{server.url}/tokenize", json=body).json()["count"]
        done = ocr(path, "--model", server.url, "--concurrency", "1")
        assert done.returncode == 0, done.stderr
        cached = re.search(r"(\d+) of \d+ prompt tokens cached", done.stderr)
    assert cached is not None and prompt > 32
    assert int(cached[1]) in (4 * (prompt // 16 * 16), 4 * ((prompt - 2) // 16 * 16))


def test_the_command_serves_a_model_itself_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    image, output = tmp_path / "a.png", tmp_path / "a.md"
    image.write_bytes(png(size=(64, 56)))
    done = ocr(image, "--model", model, "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_text().startswith("<!-- a.png -->\n")
    gone = ocr(image, "--model", tmp_path / "nothing")
    assert gone.returncode == 1 and "the server exited with status 1" in gone.stderr
    assert "nothing" in gone.stderr and gone.stdout == ""
