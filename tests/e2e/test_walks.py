"""How far a request walks: the files that it enters in front, engine and worker, on the default
demo server in float32, beside those that `tests/walks.txt` names.

A request should enter what it asks for, and nothing else. A file that is entered for the first
time needs a line there, with a reason. Image workers cannot be looked into: a new image enters five
files more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.helpers.images import data_url, png

pytestmark = pytest.mark.more

WALKS = ("text", "new", "seen")
IDLE = 1
"""The walk of a server that nobody asks: what it enters is nobody's."""
BY_MACHINE = "kernels/"
"""Which kernels are entered follows from the processor."""
LIST = Path(__file__).parents[1] / "walks.txt"
GROWTH = 1.03
"""A walk may enter so many times the listed functions: their number differs from run to run."""


@dataclass(frozen=True)
class Listed:
    """tests/walks.txt. files: the walks that each file is in. functions: how many, by walk.
    unexplained: files of lines that lack a reason.
    """

    files: dict[str, set[str]]
    functions: dict[str, int]
    unexplained: list[str]


def read(text: str) -> Listed:
    """Lines are `file: walks`, followed below "Since then" by ` - reason`."""
    files: dict[str, set[str]] = {}
    functions: dict[str, int] = {}
    unexplained, later = [], False
    for line in text.splitlines():
        later |= line.startswith("# Since then")
        if not line or line.startswith("#"):
            continue
        if found := re.fullmatch(r"functions of (\w+): (\d+)", line):
            functions[found[1]] = int(found[2])
            continue
        rest, _, reason = line.partition(" - ")
        name, _, walks = rest.partition(":")
        files[name] = set(walks.split())
        assert files[name] <= {*WALKS}, line
        if later and not reason.strip():
            unexplained.append(name)
    return Listed(files, functions, unexplained)


@pytest.fixture(scope="module")
def walked(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, set[tuple[str, str]]]]:
    """The (file, function) of each walk, in all three processes."""
    folder = tmp_path_factory.mktemp("walks")
    walk = folder / "walk"
    walk.write_bytes(b"\0")
    with pytest.MonkeyPatch.context() as patch:
        path = [str(LIST.parent / "walking"), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("SACCADE_WALKS", str(folder))
        with serving("demo", folder, "--dtype", "float32") as server:
            for seed in range(2):  # what only first requests enter is not looked at
                for first in bodies(seed):
                    ask(server, first)
            asked: list[dict[str, Any] | None] = [None, *bodies(7)]
            for number, body in enumerate(asked, IDLE):
                settle(server)
                record(walk, number)
                if body is None:
                    time.sleep(3)
                else:
                    ask(server, body)
                record(walk, 0)
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in ("idle", *WALKS)}
    roles = set()
    for notes in folder.glob("*-*.txt"):
        for line in notes.read_text().splitlines():
            at, role, file, function = line.split(" ", 3)
            found[("idle", *WALKS)[int(at) - IDLE]].add((file, function))
            roles.add(role)
    assert roles == {"front", "engine", "worker"}
    idle = found.pop("idle")
    yield {
        name: {each for each in entered - idle if not each[0].startswith(BY_MACHINE)}
        for name, entered in found.items()
    }


def record(walk: Path, number: int) -> None:
    with walk.open("r+b") as file:
        file.write(bytes([number]))


def settle(server: Server) -> None:
    """Wait until nothing is under way."""
    server.wait_for_metric("saccade_requests_in_flight", 0)


def bodies(seed: int) -> list[dict[str, Any]]:
    """A text, a new image, the same image with another question."""
    drawn = png(f"#0000{seed:02x}", (240, 160))
    image = {"type": "image_url", "image_url": {"url": data_url(drawn)}}
    asked = [[], [image], [image]]
    words = (f"Say {seed}.", f"What is this, {seed}?", f"And what number, {seed}?")
    return [
        {
            "model": "demo",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}],
        }
        for shown, text in zip(asked, words, strict=True)
    ]


def ask(server: Server, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    answer.raise_for_status()


def test_a_request_enters_the_files_that_are_named(
    walked: dict[str, set[tuple[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    listed = read(LIST.read_text())
    assert not listed.unexplained, "a file that is newly entered has a reason in tests/walks.txt"
    new = [
        f"{file}: {walk}"
        for walk, entered in walked.items()
        for file in sorted({file for file, _ in entered})
        if walk not in listed.files.get(file, ())
    ]
    with capsys.disabled():
        for walk, entered in walked.items():
            print(
                f"\n{walk}: {len({f for f, _ in entered})} files, {len(entered)} functions", end=""
            )
    assert not new, "\n".join(("entered, but not in tests/walks.txt:", *new))
    more = {
        walk: len(entered)
        for walk, entered in walked.items()
        if len(entered) > GROWTH * listed.functions[walk]
    }
    assert not more, f"functions entered: {more}; listed: {listed.functions}"


def test_a_listed_file_is_entered(walked: dict[str, set[tuple[str, str]]]) -> None:
    """What is entered no longer leaves the list, so that it cannot come back unseen."""
    entered = {(walk, file) for walk, found in walked.items() for file, _ in found}
    gone = [
        f"{name}: {walk}"
        for name, walks in read(LIST.read_text()).files.items()
        for walk in sorted(walks)
        if (walk, name) not in entered
    ]
    assert not gone, "\n".join(("in tests/walks.txt, but not entered:", *gone))


def test_a_line_without_a_reason_is_found() -> None:
    text = """functions of text: 2
a.py: text new
# Since then
b.py: text
c.py: new - x"""
    assert read(text) == Listed(
        {"a.py": {"text", "new"}, "b.py": {"text"}, "c.py": {"new"}}, {"text": 2}, ["b.py"]
    )
