"""The line that a message names for what is not installed: it works where it is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saccade.core.extras import SOURCE, ask_operator, how_to_install


def test_the_line_is_whole_where_the_source_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "my clone"
    (source / "scripts").mkdir(parents=True)
    (source / "scripts" / "install.py").touch()
    monkeypatch.setattr(sys, "executable", str(source / ".venv" / "bin" / "python"))
    begin = f"cd '{source}' && .venv/bin/python scripts/install.py "
    assert how_to_install(".[gguf]", source) == f"{begin}-e '.[gguf]'"
    assert how_to_install("./bench", source) == f"{begin}./bench"
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert how_to_install("pyarrow", source).endswith(
        "&& /usr/bin/python3 scripts/install.py pyarrow"
    )


def test_where_a_wheel_brought_it_the_line_says_in_which_folder_to_type_it(tmp_path: Path) -> None:
    told = "python scripts/install.py '.[gguf]' in Saccade's source directory"
    assert how_to_install(".[gguf]", tmp_path) == told


def test_clients_learn_what_the_operator_must_do_and_no_folder() -> None:
    told = ask_operator("video")
    assert "operator" in told and "scripts/install.py '.[video]'" in told
    assert str(SOURCE) not in told and sys.executable not in told


def test_no_message_says_pip() -> None:
    """An environment that uv has made has none: another Python's would answer."""
    # These environments are made by hand, beside ours.
    own = {"openvino_server.py", "plan.py", "machine.py", "proxy.md", "safety.md", "get-started.md"}
    files = [
        *SOURCE.glob("saccade/**/*.py"),
        *SOURCE.glob("bench/saccade_bench/**/*.py"),
        *SOURCE.glob("docs/**/*.md"),
        SOURCE / "bench" / "README.md",
    ]
    found = [path for path in files if "pip install" in path.read_text()]
    assert [path.name for path in found if path.name not in own] == []
