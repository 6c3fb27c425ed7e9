"""Each command, option and file that a document names exists."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from saccade.commands import SERVE_OPTIONS, TUNING, app
from saccade.tools.foreign_options import OPTIONS as FOREIGN
from saccade_bench.cli import bench
from tests.docs.pages import PAGES, ROOT, code

REMOVED = "(removed since)"


def names() -> set[str]:
    """The first words of `saccade`'s commands, those of saccade-bench included."""
    brought = re.findall(r"^([\w-]+) = ", (ROOT / "bench/pyproject.toml").read_text(), flags=re.M)
    return {name for name in app if not name.startswith("-")} | set(brought)


OPTIONS = {"--" + field.name.replace("_", "-") for kind in SERVE_OPTIONS for field in fields(kind)}
MORE = {"--tune", "--help", "--help-advanced", "--host", "--port", "--model"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    removed = {*re.findall(rf"`([^`]+)`[^`\n]*{re.escape(REMOVED)}", page.read_text())}
    for line in code(page):
        if line in removed:
            continue
        for module in re.findall(r"python3? -m ((?:saccade|train)[\w.]*)", line):
            assert find_spec(module), f"{line}: no module {module}"
        for path in re.findall(
            r"(?<![\w/.-])((?:tests|examples|scripts|docs|bench|train)/[\w./-]+)", line
        ):
            assert re.search(r"[*A-Z]{2}|\*", path) or (ROOT / path.rstrip("./")).exists(), (
                f"{line}: no file {path}"
            )
        for command in re.findall(r"(?:^|[;&|] *)saccade ([a-z][\w-]*)", line):
            assert command in names(), f"{line}: no command {command}"
        for command in re.findall(r"(?:^|[;&|] *)saccade bench ([a-z]+)", line):
            assert command in bench, f"{line}: no command {command}"
        for target in re.findall(r"(?:^|[;&|] *)make ([a-z][\w-]*)", line):
            assert re.search(
                rf"^[\w\s-]*\b{target}\b[\w\s-]*:", (ROOT / "Makefile").read_text(), flags=re.M
            )
        for name in re.findall(r"--tune ([a-z]\w*)", line):
            assert name in TUNING, f"{line}: no tuning value {name}"
        if re.match(r"saccade serve\b", line):
            given = set(re.findall(r"(?<=\s)--[\w-]+", line.split(" #")[0]))
            known = OPTIONS | MORE
            known |= FOREIGN.keys() if page.name == "coming-from.md" else set()
            assert given <= known, f"{line}: {given - known}"
