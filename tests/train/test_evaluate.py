"""Claims about the held-out evaluation: exact scoring, whole chats, and errors that say what the
server said.
"""

import base64
import io
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from PIL import Image

from saccade_bench.drawn.draw import DEFAULT_FONT
from saccade_bench.drawn.tasks import TWO_HOPS, held_out
from train.evaluate import (
    ANY_SIZE,
    LARGE,
    ChatMessage,
    ask_task,
    evaluate,
    http_asker,
    main,
    of_pictures,
    of_size,
    score_skill,
    user_message,
)


def test_a_right_answer_counts_and_a_wrong_one_is_kept() -> None:
    expected = {held_out("number", seed, [DEFAULT_FONT]).turns[0].answer for seed in range(10)}

    def ask(messages: list[ChatMessage]) -> str:
        del messages
        return min(expected)

    score = score_skill(ask, "number", range(10), (DEFAULT_FONT,), "default", 2)
    assert (score.right, score.count, len(score.misses)) == (1, 10, 9)
    assert score.accuracy == 0.1
    assert 0.09 < score.error < 0.1


def test_every_turn_of_a_chat_is_asked_with_the_models_own_answers_before_it() -> None:
    task = held_out("chat", 0, [DEFAULT_FONT])
    lengths = []

    def ask(messages: list[ChatMessage]) -> str:
        lengths.append(len(messages))
        assert all(message["content"] == "So." for message in messages[1::2])
        return "So. "

    assert ask_task(ask, task) == ["So."] * len(task.turns)
    assert lengths == list(range(1, 2 * len(task.turns), 2))


def test_pictures_go_as_png_in_front_of_the_question() -> None:
    turn = held_out("which", 0, [DEFAULT_FONT]).turns[0]
    *pictures, text = user_message(turn)["content"]
    assert text == {"type": "text", "text": turn.question}
    for part, scene in zip(pictures, turn.scenes, strict=True):
        encoded = part["image_url"]["url"].removeprefix("data:image/png;base64,")
        assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (scene.width, scene.height)


def test_evaluate_scores_the_skills_that_are_named() -> None:
    scores = evaluate(lambda messages: "no", 2, skills=["count", "chat"], threads=1)
    assert [score.skill for score in scores] == ["count", "chat"]
    assert all(score.right == 0 for score in scores)


def test_reading_is_also_scored_by_the_size_of_the_text() -> None:
    expected = [held_out("number", seed, [DEFAULT_FONT]).turns[0] for seed in range(20)]
    small = {
        turn.answer
        for turn in expected
        if turn.scenes[0].text is not None and turn.scenes[0].text.size < LARGE
    }
    assert 0 < len(small) < 20
    answers = iter(turn.answer for turn in expected)

    def ask(messages: list[ChatMessage]) -> str:
        answer = next(answers)
        return "no" if answer in small else answer

    score = score_skill(ask, "number", range(20), (DEFAULT_FONT,), "default", 1)
    large, rest = (
        of_size(score, range(20), (DEFAULT_FONT,), sizes)
        for sizes in (range(LARGE, ANY_SIZE), range(LARGE))
    )
    assert (large.right, large.count, large.fonts) == (
        20 - len(small),
        20 - len(small),
        "default, from 28 px",
    )
    assert (rest.right, rest.count, rest.fonts) == (0, len(small), "default, below 28 px")
    assert len(rest.misses) == len(small)


def test_two_hop_questions_are_also_scored_by_the_number_of_images() -> None:
    turns = [held_out(TWO_HOPS, seed, [DEFAULT_FONT]).turns[0] for seed in range(30)]
    answers = {turn.question: turn.answer for turn in turns if len(turn.scenes) == 3}

    def ask(messages: list[ChatMessage]) -> str:
        *pictures, text = messages[0]["content"]
        return answers[text["text"]] if len(pictures) == 3 else "no"

    whole = score_skill(ask, TWO_HOPS, range(30), (DEFAULT_FONT,), "default", 1)
    parts = [of_pictures(whole, range(30), (DEFAULT_FONT,), count) for count in (2, 3, 4)]
    shown = [sum(len(turn.scenes) == count for turn in turns) for count in (2, 3, 4)]
    assert [part.count for part in parts] == shown
    assert sum(shown) == whole.count == 30
    assert [part.right for part in parts] == [0, whole.right, 0]
    assert 0 < whole.right <= shown[1]
    assert parts[1].fonts == "default, 3 images"


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"error": {"message": "no such model"}}'
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def refusing_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_refusal_is_raised_with_the_servers_words(refusing_server: str) -> None:
    with (
        http_asker(refusing_server + "/v1", "demo", None) as ask,
        pytest.raises(httpx.HTTPStatusError, match="no such model"),
    ):
        ask([{"role": "user", "content": "Hello"}])


def test_a_server_that_is_not_there_or_refuses_ends_it_in_one_line(
    refusing_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for url, told in (
        (nobody, "Connection refused"),
        (refusing_server, "no such model"),
        ("localhost:1", "protocol"),
    ):
        model = ["--model", "demo"] if url == refusing_server else []
        monkeypatch.setattr(
            sys,
            "argv",
            ["evaluate", "--base-url", url, *model, "--num-prompts", "1", "--skills", "count"],
        )
        with pytest.raises(SystemExit) as ended:
            main()
        error = capsys.readouterr().err
        assert ended.value.code == 1
        assert (
            error.startswith(f"error: --base-url {url}: ")
            and told in error
            and error.count("\n") == 1
        )
