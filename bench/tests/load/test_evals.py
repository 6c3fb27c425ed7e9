from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from saccade.core.errors import ConfigError
from saccade_bench.drawn.draw import DrawnShape, Scene
from saccade_bench.drawn.tasks import Exchange, held_out
from saccade_bench.eval import mmmu, ocr, ocrbench, shapes, video
from saccade_bench.eval.consistency import mark_png
from saccade_bench.eval.contract import (
    EvalMessage,
    GradedAnswer,
    Item,
    SampleError,
    grade,
    read_journal,
    summarise,
)
from saccade_bench.eval.run import evaluate
from saccade_bench.options import EvalName, EvalOptions, TargetOptions
from tests.tools.server import Json, Script, ScriptedServer, pictures, texts


def item(name: str, group: str = "all") -> Item:
    return Item(
        name,
        group,
        "yes",
        lambda: [{"role": "user", "content": name}],
        lambda text: float(text == "yes"),
    )


def png(colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 24), colour).save(buffer, "PNG")
    return buffer.getvalue()


# The contract


def test_a_score_is_a_mean_with_its_standard_error() -> None:
    answers = [GradedAnswer(str(i), "a" if i < 4 else "b", "", "", float(i % 2)) for i in range(10)]
    result = summarise("x", answers)
    assert (result.n, result.score, result.stderr) == (10, 0.5, pytest.approx(math.sqrt(0.25 / 10)))
    assert [(group.name, group.n, group.score) for group in result.groups] == [
        ("a", 4, 0.5),
        ("b", 6, 0.5),
    ]


def test_a_run_taken_up_again_asks_only_what_has_no_answer(tmp_path: Path) -> None:
    asked: list[str] = []

    def sampler(messages: list[EvalMessage]) -> str:
        asked.append(messages[0]["content"])
        if messages[0]["content"] == "two" and len(asked) < 4:
            raise SampleError("HTTP 500")
        return "yes"

    journal = tmp_path / "answers.jsonl"
    items = [item("one"), item("two"), item("three")]
    first = grade("x", items, sampler, 1, journal)
    assert (first.n, first.score, first.failed) == (3, pytest.approx(2 / 3), 1)
    journal.write_text(journal.read_text() + '{"id": "thr')  # a crash while writing
    second = grade("x", items, sampler, 1, journal)
    assert (second.n, second.score, second.failed) == (3, 1.0, 0)
    assert asked == ["one", "two", "three", "two"]


def test_an_answer_cut_short_in_the_journal_does_not_swallow_the_next(tmp_path: Path) -> None:
    journal = tmp_path / "answers.jsonl"
    journal.write_text('{"id": "thr')
    grade("x", [item("one")], lambda messages: "yes", 1, journal)
    assert [answer.id for answer in read_journal(journal)] == ["one"]


# Scoring


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("The number is 4711.", "4711", 1),
        ("4,711", "4711", 1),
        ("47110", "4711", 0),
        ("It says ZEBRA!", "zebra", 1),
        ("zebras", "zebra", 0),
        ("", "7", 0),
    ],
)
def test_a_reading_is_right_if_the_text_stands_in_the_answer_as_a_word(
    text: str, expected: str, right: int
) -> None:
    assert ocr.says(text, expected) == right


def scene(*things: tuple[str, str]) -> Scene:
    return Scene(
        99,
        99,
        (0, 0, 0),
        (0, 0, 0),
        tuple(DrawnShape(kind, colour, (0, 0, 0), 0, 0, 9) for colour, kind in things),
    )


@pytest.mark.parametrize(
    ("kind", "answer", "text", "right"),
    [
        ("shape", "The red shape is a star.", "A star", True),
        ("shape", "The red shape is a star.", "a star or a circle", False),
        ("colour", "The star is red.", "It's RED.", True),
        ("colour", "The star is red.", "blue", False),
        ("count", "There are 3 stars.", "three", True),
        ("count", "There are 3 stars.", "I count 4", False),
        ("which", "The red star is in picture 2.", "Picture 2", True),
        ("which", "The red star is in picture 2.", "picture 1", False),
        ("describe", "A red star and a blue heart.", "I see a red star, and a blue heart.", True),
        ("describe", "A red star and a blue heart.", "A blue heart and a red star", False),
        ("describe", "A red star and a blue heart.", "A red star", False),
    ],
)
def test_an_answer_about_shapes_is_judged_by_what_it_names(
    kind: str, answer: str, text: str, right: bool
) -> None:
    turn = Exchange(kind, (scene(("red", "star"), ("blue", "heart")),), "?", answer)
    assert shapes.is_right(kind, turn, text) is right


@pytest.mark.parametrize("kind", shapes.KINDS)
def test_the_known_answer_is_always_right(kind: str) -> None:
    for seed in range(40):
        turn = held_out(kind, seed, ("default",)).turns[-1]
        assert shapes.is_right(kind, turn, turn.answer), turn.answer
        assert not shapes.is_right(kind, turn, "I cannot see the picture.")


QUESTION = mmmu.Question(
    "validation_Art_1",
    "Which <image 1>?",
    ("Mona Lisa", "The Scream", "Guernica", "Olympia"),
    ("B",),
    (png(),),
)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("The answer is (C).", "C"),
        ("(A) is wrong, so it is (D)", "D"),
        ("A or B ? B ", "B"),
        ("Option D. It is clear", "D"),
        ("I am quite sure that this is the scream", "B"),
        ("mona lisa or rather guernica, I should say", "C"),
    ],
)
def test_a_choice_is_parsed_as_published(response: str, letter: str) -> None:
    assert mmmu.parse_choice(response, QUESTION.letters, QUESTION.options) == letter


def test_without_a_choice_one_is_drawn_and_always_the_same() -> None:
    drawn = [
        mmmu.parse_choice("no idea", QUESTION.letters, QUESTION.options, f"q{i}")
        for i in range(200)
    ]
    assert drawn == [
        mmmu.parse_choice("no idea", QUESTION.letters, QUESTION.options, f"q{i}")
        for i in range(200)
    ]
    assert set(drawn) == {"A", "B", "C", "D"}


@pytest.mark.parametrize(
    ("answers", "response", "right"),
    [
        (("24/7", "3.429"), "so the ratio is 3.43.", True),
        (("3.429",), "the result is 3.4291", True),
        (("1,000",), "= 1000", True),
        (("Paris",), "The final answer is paris", True),
        (("x",), "max", False),
        (("x",), "the variable is x", True),
        (("5",), "It is 15", False),
        (("0.5",), "thus we get 5e-1", True),
    ],
)
def test_an_open_answer_is_judged_as_published(
    answers: tuple[str, ...], response: str, right: bool
) -> None:
    assert mmmu.is_open_right(answers, mmmu.parse_open(response)) is right


def test_pictures_stand_where_the_question_names_them() -> None:
    parts = QUESTION.parts()
    assert parts[:2] == ["Which ", QUESTION.images[0]]
    assert (
        parts[2]
        == "?\n(A) Mona Lisa\n(B) The Scream\n(C) Guernica\n(D) Olympia\n" + mmmu.CHOICE_PROMPT
    )


@pytest.mark.parametrize(
    ("text", "answers", "formula", "right"),
    [
        ("The sign says Central\nPark today", ("central park",), False, True),
        ("central", ("Central Park",), False, False),
        ("x ^ { 2 }", ("x^{2}",), True, True),
        ("X^{2}", ("x^{2}",), True, False),
    ],
)
def test_ocrbench_is_scored_as_published(
    text: str, answers: tuple[str, ...], formula: bool, right: bool
) -> None:
    assert ocrbench.is_right(text, answers, formula) is right


# Files


def test_mmmu_is_read_from_the_hubs_columns(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    rows = [
        {
            "id": "validation_Art_1",
            "question": "<image 1> A?",
            "options": "['x', 'y']",
            "answer": "B",
            "image_1": "a.png",
            "image_2": None,
        },
        {
            "id": "validation_Math_2",
            "question": "n?",
            "options": "[]",
            "answer": "['7', 'seven']",
            "image_1": {"bytes": None, "path": "a.png"},
        },
    ]
    path = tmp_path / "val.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = mmmu.load_questions(str(path))
    assert (first.options, first.answers, first.images, first.subject) == (
        ("x", "y"),
        ("B",),
        (png(),),
        "Art",
    )
    assert (second.options, second.answers, second.images, second.subject) == (
        (),
        ("7", "seven"),
        (png(),),
        "Math",
    )


def test_ocrbench_is_read_from_the_authors_and_the_hubs_columns(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    authors = [
        {
            "dataset_name": "IIIT5K",
            "image_path": "a.png",
            "id": 0,
            "question": "what?",
            "answers": ["CENTRE"],
            "type": "Regular Text Recognition",
        }
    ]
    path = tmp_path / "OCRBench.json"
    path.write_text(json.dumps(authors))
    (found,) = ocrbench.items(str(path))
    assert (found.group, found.expected, found.score("centre"), found.score("no")) == (
        "Regular Text Recognition",
        "CENTRE",
        1.0,
        0.0,
    )
    hub = {
        "dataset": "HME100k",
        "question": "?",
        "question_type": "x",
        "answer": ["a b"],
        "image": base64.b64encode(png()).decode(),
    }
    path = tmp_path / "hub.jsonl"
    path.write_text(json.dumps(hub))
    (found,) = ocrbench.items(str(path))
    assert (found.score("ab"), found.score("AB")) == (1.0, 0.0)


@pytest.mark.parametrize(
    "text", ["nonsense", '{"id": 1}', '{"question": "?", "image": "missing.png", "answer": "a"}']
)
def test_a_wrong_file_of_questions_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError):
        ocrbench.items(str(path))
    with pytest.raises(ConfigError):
        mmmu.load_questions(str(path))


# Through HTTP


@cache
def readings() -> dict[bytes, str]:
    made = [ocr.draw_reading(seed, kind) for seed in range(20) for kind in ("number", "word")]
    return {reading.encoded: reading.expected for reading in made}


def knowing(body: Json) -> list[str]:
    """Answer like a model that recognizes every drawn image by its bytes."""
    (url,) = pictures(body)
    return [f"It is {readings()[base64.b64decode(url.partition(',')[2])]}."]


def run(server: ScriptedServer, name: EvalName, **options: object) -> tuple[float, int, int]:
    result = evaluate(name, TargetOptions(base_url=server.url), EvalOptions(quiet=True, **options))  # type: ignore[arg-type]
    return result.score, result.n, result.failed


def test_ocr_asks_each_question_once_and_scores_it(server: ScriptedServer) -> None:
    server.script = Script(answer=knowing)
    assert run(server, "ocr", num_prompts=20, concurrency=3) == (1.0, 20, 0)
    assert len({pictures(body)[0] for body in server.seen.bodies}) == 20
    assert {(body["temperature"], body["max_tokens"]) for body in server.seen.bodies} == {(0, 48)}


def test_a_journal_is_taken_up_again_and_one_of_another_run_refused(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = Script(answer=knowing, refuse=lambda number, body: 500 if number < 3 else None)
    path = tmp_path / "sub" / "ocr.jsonl"
    assert run(server, "ocr", num_prompts=10, concurrency=1, output_file=path) == (0.7, 10, 3)
    assert run(server, "ocr", num_prompts=10, concurrency=1, output_file=path) == (1.0, 10, 0)
    assert len(server.seen.bodies) == 13
    assert [
        json.loads(line)["result"]["score"]
        for line in path.read_text().splitlines()
        if '"result"' in line
    ] == [0.7, 1.0]
    with pytest.raises(ConfigError, match="holds another run"):
        run(server, "ocr", num_prompts=10, max_tokens=9, output_file=path)


def test_shapes_shows_several_pictures_where_it_asks_about_several(server: ScriptedServer) -> None:
    server.script = Script(answer=lambda body: ["no idea"])
    assert run(server, "shapes", num_prompts=12, concurrency=4) == (0.0, 12, 0)
    counts = [
        len(pictures(body))
        for body in server.seen.bodies
        if "which" in texts(body).lower() and "picture" in texts(body).lower()
    ]
    assert all(count == 2 for count in counts)
    assert max(len(pictures(body)) for body in server.seen.bodies) > 1


def test_mmmu_sends_its_pictures_and_parses_the_answers(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = Script(answer=lambda body: ["The answer is ", "(B)"])
    (tmp_path / "a.png").write_bytes(png())
    row = {
        "id": "validation_Art_1",
        "question": "<image 1> A?",
        "options": ["x", "y"],
        "answer": "B",
        "image_1": "a.png",
        "question_type": "multiple-choice",
    }
    path = tmp_path / "val.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(row | {"id": f"validation_Art_{i}", "answer": "AB"[i % 2]}) for i in range(6)
        )
    )
    assert run(server, "mmmu", dataset_path=str(path)) == (0.5, 6, 0)
    assert all(
        len(pictures(body)) == 1 and mmmu.CHOICE_PROMPT in texts(body)
        for body in server.seen.bodies
    )


def test_a_consistent_server_is_found_consistent_and_is_shown_new_bytes_in_every_pass(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = Script(answer=lambda body: ["always ", "the same"])
    path = tmp_path / "c.jsonl"
    assert run(server, "consistency", num_prompts=4, concurrency=2, output_file=path) == (
        1.0,
        12,
        0,
    )
    asked = [body for body in server.seen.bodies if pictures(body)]
    assert len(asked) == 16
    assert (
        len({json.dumps(body["messages"]) for body in asked}) == 12
    )  # cold and warm are the same, the others new
    assert len(read_journal(path)) == 12


def test_an_inconsistent_server_is_found_out(server: ScriptedServer) -> None:
    seen: list[int] = []

    def warm_answers_differ(body: Json) -> list[str]:
        seen.append(1)
        return ["odd" if 4 < len(seen) <= 8 else "even"]

    server.script = Script(answer=warm_answers_differ)
    result = evaluate(
        "consistency",
        TargetOptions(base_url=server.url),
        replace(EvalOptions(quiet=True), num_prompts=4, concurrency=1),
    )
    assert {group.name: group.score for group in result.groups} == {
        "warm": 0.0,
        "batched": 1.0,
        "beside long prompts": 1.0,
    }


def test_a_marked_picture_has_new_bytes_and_the_same_pixels() -> None:
    marked = mark_png(png(), "mark")
    assert marked != png()
    with Image.open(io.BytesIO(marked)) as image, Image.open(io.BytesIO(png())) as original:
        image.load()
        assert image.tobytes() == original.tobytes()
        assert image.info["Comment"] == "mark"


def test_mmmu_sums_subjects_by_domain_as_if_scored_together() -> None:
    scores = {"Art": [1, 0], "Music": [1, 1, 1], "Math": [0]}
    answers = [
        GradedAnswer(f"validation_{subject}_{i}", subject, "", "", float(score))
        for subject, each in scores.items()
        for i, score in enumerate(each)
    ]
    result = mmmu.with_domains(summarise("mmmu", answers))
    found = {each.name: each for each in result.groups if each.name.startswith("Overall-")}
    arts = summarise("x", [each for each in answers if each.group != "Math"])
    assert found.keys() == {"Overall-Art and Design", "Overall-Science"}
    assert found["Overall-Art and Design"].n == 5 and found["Overall-Science"].score == 0
    assert found["Overall-Art and Design"].score == pytest.approx(arts.score)
    assert found["Overall-Art and Design"].stderr == pytest.approx(arts.stderr)
    subjects = [subject for each in mmmu.DOMAINS.values() for subject in each]
    assert len(subjects) == len({*subjects}) == 30 and len(mmmu.DOMAINS) == 6


def test_a_failing_server_scores_nothing_and_says_how_often(server: ScriptedServer) -> None:
    server.script = Script(refuse=lambda number, body: 503)
    assert run(server, "ocr", num_prompts=5) == (0.0, 5, 5)


# Videos


@pytest.mark.parametrize("item", video.items(30, 0), ids=lambda item: item.id)
def test_a_question_about_a_clip_has_one_right_answer(item: Item) -> None:
    (message,) = item.messages()
    clip, question = message["content"]
    frames = clip["video"]
    assert clip["type"] == "video" and len(frames) % 2 == 0 and 4 <= len(frames) <= 8
    assert item.score(f"it is {item.expected}.") == 1
    others = {"frame k": "no number", "second k": "no number", "first colour": "pink"}
    assert item.score(others[item.group]) == 0
    if item.group == "frame k":
        assert len(set(frames)) == len(frames)
    else:
        assert frames[::2] == frames[1::2] and len(set(frames)) == len(frames) // 2
    assert question["text"].endswith("?")


def test_a_clip_s_first_colour_is_not_any_of_its_colours() -> None:
    (_, _, item) = video.items(3, 0)
    later = next(colour for colour in ("red", "blue") if colour != item.expected)
    assert item.score(f"{later}, then {item.expected}") == 0
