"""What a default server of the demo model loads, and what its requests enter, compared with
`tests/loads.txt` and `tests/walks.txt`. `python -m tests.e2e.walks` writes both lists anew.

Which kernels a request enters follows from the processor, so `walks.txt` names none of those that
`loads.txt` lists. What depends on the processor, or on what an earlier start compiled, stands in
`loads.txt` "by machine": it may be absent.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.helpers.images import data_url, png
from tests.walking.sitecustomize import END, LOADED, PACKAGE, ROLES

TESTS = Path(__file__).parents[1]
WALKS = ("text", "new", "seen")
IDLE = 1
"""The walk of a server without requests. What it enters belongs to no request."""
KERNELS = ("kernels/", "plugins/cpu/", "runtime/batch_invariance.py")
GROWTH = 1.03
"""Factor by which a count may exceed the listed one. Functions differ from run to run."""
LATER = "# Since then"
BY_MACHINE = "# By machine"
COUNT = re.compile(r"\w+ of (\w+): (\d+)")
COMMAND = "python -m tests.e2e.walks"


@dataclass(frozen=True)
class Measured:
    """Files by group (a walk or a process), each with its size in `unit`: functions or lines."""

    unit: str
    files: Mapping[str, Mapping[str, int]]

    def describe(self) -> str:
        return "; ".join(
            f"{group}: {len(files)} files, {sum(files.values()):,} {self.unit}"
            for group, files in self.files.items()
        )

    def without(self, names: set[str]) -> Measured:
        """Return the files that are not among `names`."""
        kept = {
            group: {name: size for name, size in files.items() if name not in names}
            for group, files in self.files.items()
        }
        return Measured(self.unit, kept)


@dataclass(frozen=True)
class Listed:
    """A list in `tests/`: lines of `file: groups`, followed by ` - reason` below `LATER`, lines of
    `functions of text: 462`, and names of files below `BY_MACHINE`.
    """

    files: Mapping[str, set[str]]
    by_machine: set[str]
    counts: Mapping[str, int]
    unexplained: list[str]

    def kernels(self) -> set[str]:
        """Return the listed kernels."""
        return {name for name in {*self.files, *self.by_machine} if name.startswith(KERNELS)}

    def differences(self, measured: Measured) -> list[str]:
        """Return how a server differs from the list, each with what to do."""
        found = {(name, group) for group, files in measured.files.items() for name in files}
        listed = {(name, group) for name, groups in self.files.items() for group in groups}
        return [
            *(f"{name}: give a reason" for name in self.unexplained),
            *(
                f"{name}: {group}: new: give it a line with its reason ({COMMAND})"
                for name, group in sorted(found - listed)
                if name not in self.by_machine
            ),
            *(
                f"{name}: {group}: gone: remove it from the list ({COMMAND})"
                for name, group in sorted(listed - found)
            ),
            *(
                f"{measured.unit} of {group}: {size}, listed are {self.counts[group]}"
                for group, files in measured.files.items()
                if (size := _size(files, self.by_machine)) > GROWTH * self.counts[group]
            ),
        ]


def _size(files: Mapping[str, int], without: set[str]) -> int:
    return sum(size for name, size in files.items() if name not in without)


def read(text: str) -> Listed:
    """Read a list."""
    files: dict[str, set[str]] = {}
    by_machine: set[str] = set()
    counts: dict[str, int] = {}
    unexplained: list[str] = []
    section = ""
    for line in text.splitlines():
        entry, _, reason = line.partition(" - ")
        name, _, groups = entry.partition(":")
        if line in (LATER, BY_MACHINE):
            section = line
        elif count := COUNT.fullmatch(line):
            counts[count[1]] = int(count[2])
        elif not line or line.startswith("#"):
            continue
        elif section == BY_MACHINE:
            by_machine.add(line)
        else:
            files[name] = set(groups.split())
            if section == LATER and not reason.strip():
                unexplained.append(name)
    return Listed(files, by_machine, counts, unexplained)


def rewrite(text: str, usual: Measured, others: Sequence[Measured]) -> str:
    """Return the list of what was measured. New files come last, without a reason.

    A kernel that is absent from one of the others is listed by machine while its file exists.
    """
    present: dict[str, set[str]] = {}
    by_machine = {name for name in read(text).by_machine if (Path(PACKAGE) / name).is_file()}
    for group in usual.files:
        every = [{*each.files[group]} for each in (usual, *others)]
        varying = every[0].union(*every) - every[0].intersection(*every)
        by_machine |= {name for name in varying if name.startswith(KERNELS)}
        for name in {*usual.files[group]} - by_machine:
            present.setdefault(name, set()).add(group)
    lines = []
    for line in text.partition(BY_MACHINE)[0].rstrip().splitlines():
        entry, dash, reason = line.partition(" - ")
        name, colon, _ = entry.partition(":")
        if count := COUNT.fullmatch(line):
            size = max(_size(each.files[count[1]], by_machine) for each in (usual, *others))
            lines.append(f"{usual.unit} of {count[1]}: {size}")
        elif not colon or line.startswith("#"):
            lines.append(line)
        elif groups := present.pop(name, None):
            lines.append(_line(name, groups, usual) + dash + reason)
    lines += [_line(name, groups, usual) for name, groups in sorted(present.items())]
    return "\n".join([*lines, "", BY_MACHINE, *sorted(by_machine)]) + "\n"


def _line(name: str, groups: set[str], measured: Measured) -> str:
    return f"{name}: {' '.join(group for group in measured.files if group in groups)}"


def measure(folder: Path) -> tuple[Measured, Measured]:
    """Start a server in `folder` and send it requests. Return its walks and its loads."""
    switch = folder / "walk"
    switch.write_bytes(b"\0")
    with pytest.MonkeyPatch.context() as patch:
        path = [str(TESTS / "walking"), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("WALKS_FOLDER", str(folder))
        with serving("demo", folder) as server:
            for seed in range(2):  # what only first requests enter is not looked at
                for first in bodies(seed):
                    ask(server, first)
            requests: list[dict[str, Any] | None] = [None, *bodies(7)]
            for number, body in enumerate(requests, IDLE):
                settle(server)
                set_switch(switch, number)
                if body is None:
                    time.sleep(3)
                else:
                    ask(server, body)
                set_switch(switch, 0)
            set_switch(switch, LOADED)
            wait_for_modules(server, folder)
    return walks_of(folder), loads_of(folder)


def set_switch(switch: Path, number: int) -> None:
    """Say what to record from now on. The processes map the file, so it keeps its size."""
    with switch.open("r+b") as file:
        file.write(bytes([number]))


def wait_for_modules(server: Server, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while sum(file == END for _, _, file, _ in notes(folder)) < len(ROLES):
        assert time.monotonic() < deadline, "a process has not reported its modules"
        settle(server)
        time.sleep(0.1)


def notes(folder: Path) -> list[tuple[int, str, str, str]]:
    """Return the number, process, file and function of each whole line."""
    lines = chain.from_iterable(
        path.read_text().rpartition("\n")[0].splitlines() for path in folder.glob("*-*.txt")
    )
    fields = (line.split(" ", 3) for line in lines)
    return [(int(number), role, file, name) for number, role, file, name in fields]


def walks_of(folder: Path) -> Measured:
    """Return the files of each walk, and its functions outside kernels."""
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in ("idle", *WALKS)}
    names = [*found]
    for number, _, file, function in notes(folder):
        if number != LOADED:
            found[names[number - IDLE]].add((file, function))
    idle = found.pop("idle")
    walks = {name: Counter(file for file, _ in entered - idle) for name, entered in found.items()}
    sizes = {
        name: {file: 0 if file.startswith(KERNELS) else size for file, size in files.items()}
        for name, files in walks.items()
    }
    return Measured("functions", sizes)


def loads_of(folder: Path) -> Measured:
    """Return the files that each process has imported, with their lines."""
    found: dict[str, dict[str, int]] = {"front": {}, "engine": {}, "worker": {}}
    for number, role, file, _ in notes(folder):
        if number == LOADED and file != END:
            found[role][file] = len((Path(PACKAGE) / file).read_text().splitlines())
    return Measured("lines", found)


def settle(server: Server) -> None:
    """Wait until no request is in flight."""
    server.wait_for_metric("saccade_requests_in_flight", 0)


def bodies(seed: int) -> list[dict[str, Any]]:
    """Return a text, a new image, and the same image with another question, all streamed."""
    drawn = png(f"#0000{seed:02x}", (240, 160))
    image = {"type": "image_url", "image_url": {"url": data_url(drawn)}}
    images = [[], [image], [image]]
    questions = (f"Say {seed}.", f"What is this, {seed}?", f"And what number, {seed}?")
    return [
        {
            "model": "demo",
            "max_tokens": 8,
            "stream": True,
            "messages": [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}],
        }
        for shown, text in zip(images, questions, strict=True)
    ]


def ask(server: Server, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    answer.raise_for_status()
    assert answer.text.rstrip().endswith("data: [DONE]"), answer.text


def main() -> None:
    """Write both lists: of this machine, of its first start, and of one without AVX-512."""
    measured = []
    avx2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    for setting in ({}, {"XDG_CACHE_HOME": "cache"}, avx2):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            for name, value in setting.items():
                patch.setenv(name, str(Path(folder) / value) if value == "cache" else value)
            measured.append(measure(Path(folder)))
    walks, loads = zip(*measured, strict=True)
    listed = write(TESTS / "loads.txt", loads)
    write(TESTS / "walks.txt", [each.without(listed.kernels()) for each in walks])
    print(f"{walks[0].describe()}\n{loads[0].describe()}")


def write(path: Path, measured: Sequence[Measured]) -> Listed:
    """Write a list of what was measured, and return it."""
    path.write_text(rewrite(path.read_text(), measured[0], measured[1:]))
    return read(path.read_text())


if __name__ == "__main__":
    main()
