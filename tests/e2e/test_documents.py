"""PDFs through the real server: an answer about a PDF is the answer about its pages as images and
text, and a page that was seen is neither drawn nor encoded again.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pypdfium2
import pytest
from blake3 import blake3

from saccade_bench.fixtures.pdf import Sheet, pdf
from saccade_bench.fixtures.server import Server, serving
from tests.e2e.test_scores import FLAGS
from tests.e2e.ways import KEY
from tests.fixtures.tiny import picture
from tests.helpers.images import content, data_url, image_part, text_part, user

pytestmark = pytest.mark.more

SMALL = 32 * 32 * 4
COUNTED = (
    "saccade_pages_rendered_total",
    "saccade_images_decoded_total",
    "saccade_images_encoded_total",
)
ROOM = ("--max-total-tokens", "16384")


def pages(count: int, first: int = 0) -> bytes:
    """Each looks otherwise, in the size in which it is drawn, too."""
    size = (128.0, 128.0)
    return pdf(
        [
            Sheet([f"page {n}"], picture(40, 60, 100 + n), size, 16)
            for n in range(first, first + count)
        ]
    )


def part(data: bytes) -> dict[str, Any]:
    url = data_url(data, "application/pdf")
    return {"type": "file", "file": {"file_data": url, "max_pixels": SMALL}}


def ask(server: Server, data: bytes, question: str, **body: Any) -> str:
    asked = user(part(data), text_part(question))
    return str(content(server.chat(asked, **{"max_tokens": 4, **body})))


def counts(server: Server) -> tuple[float, ...]:
    return tuple(server.metric(name) for name in COUNTED)


@pytest.mark.slow
def test_a_pdf_of_a_hundred_pages_costs_its_work_once_and_nothing_after_a_restart(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    hundred, folder = pages(100), str(tmp_path / "embeddings")
    disk = ("--embedding-cache-dir", f"{folder}:256MiB")
    answers = []
    with serving(checkpoint("qwen3_vl"), tmp_path, *FLAGS, *ROOM, *disk) as server:
        for question in ("what is on page 7?", "and on page 8?", "what is on page 7?"):
            answers.append(ask(server, hundred, question))
            assert counts(server) == (100, 100, 100)
    with serving(checkpoint("qwen3_vl"), tmp_path, *FLAGS, *ROOM, *disk) as server:
        answers.append(ask(server, hundred, "what is on page 7?"))
        assert counts(server) == (0, 0, 0)
    assert answers[0] == answers[2] == answers[3]


def test_the_same_page_of_two_pdfs_has_one_embedding(server: Server) -> None:
    before = counts(server)
    ask(server, pages(3, first=200), "how many?")
    ask(server, pages(4, first=201), "how many?")
    assert np.subtract(counts(server), before).tolist() == [7, 5, 5]


def test_an_answer_about_a_pdf_is_that_about_its_pages(server: Server) -> None:
    data = pages(2, first=300)
    document = pypdfium2.PdfDocument(data)
    parts: list[dict[str, Any]] = []
    for number, page in enumerate(document, 1):
        drawn = page.render(scale=64 / 128, may_draw_forms=False, rev_byteorder=True).to_pil()
        assert drawn.size == (64, 64)
        text = f"{'' if number == 1 else chr(10)}Page {number} of 2\npage {299 + number}\n"
        parts += [text_part(text), image_part(np.asarray(drawn.convert("RGB")))]
    document.close()
    images = server.chat(user(*parts, text_part("how many?")), max_tokens=12)
    assert ask(server, data, "how many?", max_tokens=12) == content(images)


def test_a_page_whose_embedding_has_gone_is_drawn_again(server: Server) -> None:
    data = pages(2, first=400)
    answer = ask(server, data, "how many?")
    before = counts(server)
    client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0)
    client.post("/flush_cache", cast_to=object)
    assert ask(server, data, "how many?") == answer
    assert np.subtract(counts(server), before).tolist() == [2, 2, 2]


def test_a_part_of_a_page_answers_as_the_clients_crop(server: Server) -> None:
    """Drawn at its own scale: four times that of the page. The same again costs a hash."""
    data, box = pages(2, first=500), (32, 32, 64, 64)
    document = pypdfium2.PdfDocument(data)
    large = document[1].render(scale=4, may_draw_forms=False, rev_byteorder=True).to_pil()
    document.close()
    crop = np.asarray(large.crop([4 * side for side in box]).convert("RGB"))

    def say(part: dict[str, Any]) -> tuple[str, int]:
        told = server.chat(user(part, text_part("what?")), max_tokens=12)
        return content(told), told["usage"]["prompt_tokens"]

    wanted = say(image_part(crop))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    uploaded = client.files.create(file=("a.pdf", data), purpose="user_data")
    part = {"page": 2, "region": [*box], "max_pixels": 128 * 128}
    before = counts(server)
    for source in (
        {"file_id": uploaded.id},
        {"digest": f"blake3-{blake3(data).hexdigest()}"},
        {"file_data": base64.b64encode(data).decode()},
    ):
        assert say({"type": "file", "file": {**source, **part}}) == wanted
        drawn = np.subtract(counts(server), before).tolist()
        assert drawn[0] == 1 and max(drawn[1:]) <= 1, "drawn once, and encoded at most once"
