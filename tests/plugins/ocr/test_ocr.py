"""`saccade ocr` beside a scripted server: what it asks, keeps and writes, and how it ends."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade.core.errors import ConfigError, SaccadeError
from saccade.plugins.ocr.client import ServerGone
from saccade.plugins.ocr.done_pages import SUFFIX, done_pages
from saccade.plugins.ocr.files import chosen, page_ranges
from saccade.plugins.ocr.page_prompts import GENERAL, asked, prompt_of
from saccade.plugins.ocr.run import OcrJob, block, ocr, unfenced
from tests.helpers.images import png
from tests.tools.server import Script, ScriptedServer, pictures, texts

Run = Callable[..., int]


@pytest.fixture
def run(server: ScriptedServer) -> Run:
    def run(*files: Path, **job: Any) -> int:
        return ocr(OcrJob(files, **job), None, server.url, None)

    return run


def images(folder: Path, count: int) -> list[Path]:
    """Files whose names count from 1, each of another size."""
    paths = [folder / f"{number}.png" for number in range(1, count + 1)]
    for number, path in enumerate(paths, 1):
        path.write_bytes(png(size=(8, number)))
    return paths


def size_of(body: dict[str, Any]) -> tuple[int, int]:
    (url,) = pictures(body)
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        return image.size


def by_height(body: dict[str, Any]) -> list[str]:
    return [f"text {size_of(body)[1]}"]


def kept(output: Path) -> Path:
    return output.with_name(output.name + SUFFIX)


def test_pages_are_printed_in_order_whatever_their_answers_order(
    server: ScriptedServer, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(answer=by_height, first=0.02)
    assert run(*images(tmp_path, 6), concurrency=2) == 0
    told = capsys.readouterr()
    blocks = [f"<!-- {number}.png -->\n\ntext {number}\n\n" for number in range(1, 7)]
    assert told.out == "".join(blocks)
    assert server.seen.most_running <= 2 and len(server.seen.bodies) == 6
    assert told.err.startswith("6 pages in ") and "30 of " in told.err


def test_a_general_model_sees_the_prompt_before_the_page(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    server.script = Script(answer=lambda body: ["```markdown\n# a\n```"])
    assert run(*images(tmp_path, 1), output=tmp_path / "o.md", max_tokens=7, ngram=5) == 0
    (body,) = server.seen.bodies
    text, image = body["messages"][0]["content"]
    assert (text["text"], image["type"]) == (GENERAL, "image_url")
    assert (body["temperature"], body["max_tokens"]) == (0, 7)
    assert body["vllm_xargs"] == {"ngram_size": 5, "window_size": 90}
    assert (tmp_path / "o.md").read_text() == "<!-- 1.png -->\n\n# a\n\n"


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        ("PaddlePaddle/PaddleOCR-VL-1.5", "OCR:"),
        ("/models/glm_ocr", "Text Recognition:"),
        ("lightonai/LightOnOCR-2-1B", ""),
        ("deepseek-ai/DeepSeek-OCR-2", "Free OCR."),
        ("Qwen/Qwen3-VL-2B-Instruct", GENERAL),
        ("demo", GENERAL),
    ],
)
def test_a_model_is_asked_as_it_was_trained(model: str, prompt: str) -> None:
    words = prompt_of(model)
    page = {"type": "image_url"}
    text = {"type": "text", "text": prompt}
    general = [text, page]
    assert words.content(page) == (
        general if prompt == GENERAL else [page, text] if prompt else [page]
    )
    assert asked(model, "Read.", None).prompt == "Read."
    assert "vllm_xargs" not in asked(model, None, 0).fields


@pytest.mark.parametrize(
    ("model", "task", "prompt", "fields"),
    [
        ("PaddlePaddle/PaddleOCR-VL", "table", "Table Recognition:", {}),
        ("PaddleOCR-VL-1.5", "spotting", "Spotting:", {"skip_special_tokens": False}),
        ("zai-org/GLM-OCR", "formula", "Formula Recognition:", {}),
    ],
)
def test_a_task_is_asked_as_the_model_was_trained(
    model: str, task: str, prompt: str, fields: dict[str, Any]
) -> None:
    words = asked(model, None, None, task)
    page = {"type": "image_url"}
    assert words.content(page) == [page, {"type": "text", "text": prompt}]
    assert words.fields == fields


@pytest.mark.parametrize(
    ("model", "has"), [("zai-org/GLM-OCR", "formula, table"), ("Qwen3-VL", "no tasks")]
)
def test_a_task_that_a_model_was_not_trained_for_is_refused(model: str, has: str) -> None:
    with pytest.raises(ConfigError, match=f"--task chart: {model} has {has}; use --prompt"):
        asked(model, None, None, "chart")


def test_a_task_is_asked_of_the_server(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    """Its model, whose name says nothing, has none."""
    with pytest.raises(ConfigError, match=r"--task table: .* has no tasks"):
        run(*images(tmp_path, 1), task="table")
    assert not server.seen.bodies


def test_deepseeks_rule_against_repetition_keeps_its_words_when_its_size_changes() -> None:
    rule = asked("DeepSeek-OCR", None, 20).fields["vllm_xargs"]
    assert rule == {
        "ngram_size": 20,
        "window_size": 90,
        "whitelist_token_ids": [128821, 128822],
    }
    assert asked("DeepSeek-OCR", None, 0).fields == {"skip_special_tokens": False}


def test_a_page_that_fails_costs_no_other_and_is_tried_again(
    server: ScriptedServer, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {2}
    server.script = Script(
        answer=by_height, refuse=lambda _, body: 400 if size_of(body)[1] in bad else None
    )
    paths, output = images(tmp_path, 4), tmp_path / "o.md"
    broken = tmp_path / "broken.pdf.png"
    broken.write_bytes(b"nothing known")
    assert run(paths[0], broken, *paths[1:], output=output) == 1
    told = capsys.readouterr().err
    assert "error: 2.png: refused by script" in told
    assert "error: broken.pdf.png: it is not a PDF or an image" in told and "2 failed" in told
    assert output.read_text() == (
        "<!-- 1.png -->\n\ntext 1\n\n"
        "<!-- broken.pdf.png: it is not a PDF or an image, or it is damaged: use PDF, PNG, JPEG, "
        "WebP or TIFF files -->\n\n"
        "<!-- 2.png: refused by script -->\n\n"
        "<!-- 3.png -->\n\ntext 3\n\n<!-- 4.png -->\n\ntext 4\n\n"
    )
    bad.clear()
    server.seen.bodies.clear()
    assert run(*paths, output=output) == 0
    assert [size_of(body)[1] for body in server.seen.bodies] == [2]
    assert "text 2" in output.read_text() and not kept(output).exists()
    assert "3 kept from before" in capsys.readouterr().err


def test_what_changed_begins_anew(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    """The first image always fails, so that the others are kept."""
    server.script = Script(
        answer=by_height, refuse=lambda _, body: 400 if size_of(body) == (8, 1) else None
    )
    paths, output = images(tmp_path, 3), tmp_path / "o.md"

    def asked_for(**job: Any) -> int:
        server.seen.bodies.clear()
        assert run(*paths, output=output, **job) == 1
        return len(server.seen.bodies) - 1

    assert asked_for() == 2
    assert asked_for() == 0
    assert asked_for(max_tokens=99) == 0, "these pages were not cut"
    assert asked_for(prompt="Read.") == 2
    assert asked_for(ngram=3) == 2
    paths[2].write_bytes(png(size=(9, 9)))
    assert asked_for() == 1
    paths.reverse()
    assert asked_for() == 0


def test_a_page_that_was_cut_is_written_and_named_and_read_again_with_more_room(
    server: ScriptedServer, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(answer=by_height, finish="length")
    paths, output = images(tmp_path, 2), tmp_path / "o.md"
    assert run(*paths, output=output, max_tokens=5) == 1
    assert "cut: 1.png: its text ends after 5 tokens (--max-tokens)" in capsys.readouterr().err
    assert output.read_text().startswith("<!-- 1.png, cut after 5 tokens -->\n\ntext 1\n")
    server.seen.bodies.clear()
    assert run(*paths, output=output, max_tokens=5) == 1 and not server.seen.bodies
    server.script.finish = "stop"
    assert run(*paths, output=output, max_tokens=6) == 0 and len(server.seen.bodies) == 2


def test_a_line_that_was_torn_is_one_page_to_read_again(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    server.script = Script(
        answer=by_height, refuse=lambda _, body: 400 if size_of(body) == (8, 1) else None
    )
    paths, output = images(tmp_path, 4), tmp_path / "o.md"
    assert run(*paths, output=output, concurrency=1) == 1
    lines = kept(output).read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    for damage in (lines[2][:-9], b"\xff\xfe", b'{"name": 3}\n', b"[]\n\n"):
        kept(output).write_bytes(b"".join(lines[:2]) + damage)
        server.seen.bodies.clear()
        assert run(*paths, output=output) == 1
        assert sorted(size_of(body)[1] for body in server.seen.bodies) == [1, 4]
        assert kept(output).read_bytes().splitlines()[-1] == lines[2].strip()


def test_a_busy_server_is_asked_again(
    server: ScriptedServer, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(
        answer=by_height, refuse=lambda _, body: 429 if len(server.seen.bodies) == 1 else None
    )
    assert run(*images(tmp_path, 1)) == 0
    assert len(server.seen.bodies) == 2 and "text 1" in capsys.readouterr().out


def test_a_server_that_is_away_ends_the_run_and_says_what_is_kept(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    output = tmp_path / "o.md"
    paths = images(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"cannot connect to .* is the server running"):
        ocr(OcrJob(tuple(paths), output), None, "http://127.0.0.1:9", None)
    assert [*tmp_path.glob("o.md*")] == []
    server.script = Script(answer=by_height, refuse=lambda n, _: 403 if n else None)
    with pytest.raises(ServerGone, match=r"refused by script: 1 page kept in .*o\.md\.pages"):
        run(*paths, output=output, concurrency=1)
    assert len(server.seen.bodies) == 2 and not output.exists()


def test_another_servers_pdfs_are_refused_by_name(
    server: ScriptedServer, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(b"%PDF-1.7\n")
    assert run(path) == 1
    assert "error: a.pdf: " in capsys.readouterr().err and not server.seen.bodies


def test_each_picture_of_a_tiff_is_a_page(
    server: ScriptedServer, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(answer=by_height)
    frames = [Image.new(mode, (8, 3 + n)) for n, mode in enumerate(("1", "L", "CMYK", "RGB"))]
    path = tmp_path / "scan.tif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert run(path, pages="2-") == 0
    blocks = [f"<!-- scan.tif, page {n} -->\n\ntext {n + 2}\n\n" for n in (2, 3, 4)]
    assert capsys.readouterr().out == "".join(blocks)


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        (None, [1, 2, 3, 4, 5]),
        ("2", [2]),
        ("4-,1", [1, 4, 5]),
        ("1-2,2-3", [1, 2, 3]),
        ("2-999999999", [2, 3, 4, 5]),
        (" 3 , 1-1 ", [1, 3]),
    ],
)
def test_ranges_name_pages(text: str | None, pages: list[int]) -> None:
    assert chosen(page_ranges(text), 5) == pages


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "3-1", "a", "1,,2", "1-2-3", "9" * 10, "٣", ",".join("1" * 2000)]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--pages"):
        page_ranges(text)


def test_a_range_beyond_a_file_is_that_files_error() -> None:
    with pytest.raises(SaccadeError, match="requests page 6, but the file has 5 pages"):
        chosen(page_ranges("1,6-"), 5)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"concurrency": 0}, "--concurrency 0: expected 1 to 256"),
        ({"concurrency": 257}, "--concurrency"),
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"ngram": 257}, "--no-repeat-ngram 257"),
        ({"ngram": -1}, "--no-repeat-ngram -1"),
        ({"pages": "x"}, "--pages x"),
        ({"task": "poem"}, "--task poem is not supported: use one of chart, formula"),
        ({"task": "table", "prompt": "Read."}, "--task table sets the prompt: omit --prompt"),
        ({"output": Path("/dev/null")}, "--output '/dev/null' is not a file"),
        ({"output": Path("/nowhere/o.md")}, "--output /nowhere/o.md: No such file"),
        ({"output": Path("{0}")}, "is one of the files to read"),
    ],
)
def test_what_cannot_work_is_said_before_a_server_is_asked(
    tmp_path: Path, job: dict[str, Any], said: str
) -> None:
    (path,) = images(tmp_path, 1)
    if job.get("output") == Path("{0}"):
        job = {"output": path}
    with pytest.raises(ConfigError) as caught:
        ocr(OcrJob((path,), **job), None, "http://127.0.0.1:9", None)
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="select a model with --model"):
        ocr(OcrJob((path,)), None, None, None)


def test_two_commands_do_not_write_one_output(tmp_path: Path) -> None:
    output = tmp_path / "o.md"
    with done_pages(output), pytest.raises(ConfigError, match="another saccade ocr"):
        with done_pages(output):
            pass


def test_a_title_cannot_leave_its_comment() -> None:
    assert block("a --> <script> --- b", None, "x\n-->") == (
        "<!-- a - - <script - -- b: x - - -->\n\n"
    )


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("```markdown\na\nb\n```", "a\nb"),
        ("  ```\na\n```\n", "a"),
        ("```python\na\n```", "```python\na\n```"),
        ("```\na\n```\nb\n```\nc\n```", "```\na\n```\nb\n```\nc\n```"),
        ("a", "a"),
        ("", ""),
    ],
)
def test_a_fence_around_the_whole_page_is_taken_off(text: str, left: str) -> None:
    assert unfenced(text) == left


def test_kept_pages_are_lines_of_json(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    server.script = Script(answer=lambda body: ["ä\n \N{GRINNING FACE} —"], finish="length")
    output = tmp_path / "o.md"
    assert run(*images(tmp_path, 1), output=output, max_tokens=3) == 1
    (line,) = kept(output).read_text().splitlines()
    page = json.loads(line)
    assert {*page} == {"name", "text", "whole", "max_tokens"} and not page["whole"]
    assert texts(server.seen.bodies[0])
