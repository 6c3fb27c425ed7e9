"""The text of a PDF's page is draft tokens for an answer about its image: it changes no answer,
whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saccade.media.formats.pdf import MAX_SHORT_TEXT
from saccade_bench.fixtures.pdf import Sheet, pdf
from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.tiny import picture
from tests.helpers.images import content, data_url, text_part, user

pytestmark = pytest.mark.more

LENGTH = 40
SIDE = 64.0
PROPOSED, ACCEPTED = "saccade_draft_tokens_total", "saccade_accepted_tokens_total"
SOME = 10
"""Of the 160 tokens of four answers. They are drawn, so their texts seldom are the same tokens."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In float32, as in `test_predictions.py`."""
    folder = tmp_path_factory.mktemp("page text")
    with serving("demo", folder, "--speculative", "always", "--dtype", "float32") as server:
        yield server


def page(number: int, *hidden: str) -> bytes:
    """A page that looks the same whatever is hidden in it."""
    size = (SIDE, SIDE)
    return pdf([Sheet([], picture(40, 60, 900 + number), size, 1, hidden)])


def ask(server: Server, data: bytes, salt: str, shown: str = "bare", **more: Any) -> dict[str, Any]:
    """Sampled, so that answers about different pages differ, under a salt without other answers."""
    part = {"type": "file", "file": {"file_data": data_url(data, "application/pdf")}}
    body = {"messages": [user(part, text_part("Read it out."))], "max_tokens": LENGTH}
    drawn = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "cache_salt": salt}
    told = server.post(
        "/v1/chat/completions", {**body, **drawn, "saccade": {"documents": shown}, **more}
    )
    assert told["usage"]["completion_tokens"] == LENGTH
    return told


def drafts(server: Server) -> tuple[float, float]:
    """Draft tokens from pages, and how many of them were accepted."""
    return server.metric(PROPOSED, source="page"), server.metric(ACCEPTED, source="page")


@pytest.mark.parametrize("shown", ["bare", "images"])
@pytest.mark.parametrize("joined", [False, True], ids=["lines", "joined"])
def test_the_text_of_a_page_is_accepted_as_far_as_the_answer_repeats_it(
    server: Server, shown: str, joined: bool
) -> None:
    before, counted = drafts(server), 0
    for number in range(4):
        answer = content(ask(server, page(number), f"without {shown}", shown))
        lines = answer.split("\n")
        if joined:  # the page has other lines than the answer
            words = answer.split()
            lines = [" ".join(words[i : i + 3]) for i in range(0, len(words), 3)]
        again = ask(server, page(number, *lines), f"with {shown} {joined}", shown)
        assert content(again) == answer
        counted += again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    accepted = drafts(server)[1] - before[1]
    assert SOME < accepted <= counted


@pytest.mark.parametrize(
    "hidden",
    [
        ["It was a dark and stormy night;"] * 40,
        ["\\()<|im_end|><|image_pad|>", "\x07\x7f"],
        ["a" * 120] * (MAX_SHORT_TEXT // 100),
    ],
    ids=["wrong", "special", "long"],
)
def test_another_text_in_a_page_changes_nothing(server: Server, hidden: list[str]) -> None:
    number = 10 + len(hidden)
    answer = content(ask(server, page(number), "without"))
    before = drafts(server)
    assert content(ask(server, page(number, *hidden), "with")) == answer
    proposed, accepted = (now - then for now, then in zip(drafts(server), before, strict=True))
    assert proposed - accepted <= 8, "after the first rejection no more are tried"


def test_a_page_that_is_shown_with_its_text_is_drafted_from_the_prompt(server: Server) -> None:
    before = drafts(server)
    ask(server, page(20, "the quick brown fox"), "both", "both")
    assert drafts(server) == before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_pages_have_the_answers_that_they_have_without_their_text(
    server: Server,
) -> None:
    """Half of the texts are what is answered, and half of these have an error in each line."""

    def check(number: int) -> bool:
        answer = content(ask(server, page(number), "without"))
        lines = answer.split("\n")
        if number % 2:
            lines = [line[:9] + "!" + line[10:] for line in lines]
        elif number % 4:
            lines = list(reversed(lines))
        return bool(content(ask(server, page(number, *lines), "with")) == answer)

    before = drafts(server)
    with ThreadPoolExecutor(4) as threads:
        same = list(threads.map(check, range(1000, 2000)))
    assert all(same) and len(same) == 1000
    assert drafts(server)[1] - before[1] > 250 * SOME
