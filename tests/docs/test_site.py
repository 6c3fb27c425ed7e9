"""The documents as a site: `make check-docs` is silent on success, and fails on a broken link."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
PLANTED = {
    "leaves the documents": "[figures](../bench/README.md)",
    "has no page": "[figures](nowhere.md)",
    "has no heading": "[figures](speed.md#nowhere)",
    "has no image": "![figures](nowhere.png)",
    "is absolute": "[figures](/speed.md)",
}


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `make check-docs` on a copy of the documents, with what is installed here."""
    binaries = Path(sys.executable).parent
    make = ("make", "-f", str(ROOT / "Makefile"), "-o", ".venv/.installed", f"BIN={binaries}")
    command = [*make, "--no-print-directory", "check-docs"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A copy of what the site is made of, and of what a link could lead to outside of it."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "bench").mkdir()
    for name in ("mkdocs.yml", "bench/README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.more
def test_the_documents_are_checked_without_a_word(documents: Path) -> None:
    done = check(documents)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (documents / "build/docs/index.html").exists()


@pytest.mark.more
def test_every_broken_link_fails_the_check_and_is_named(documents: Path) -> None:
    page = documents / "docs" / "safety.md"
    page.write_text("\n\n".join((page.read_text(), *PLANTED.values())))
    done = check(documents)
    assert done.returncode, "make fails"
    assert f"Aborted with {len(PLANTED)} warnings in strict mode" in done.stdout
    for why, link in PLANTED.items():
        (target,) = LINK.findall(link) or [link.partition("#")[2].rstrip(")")]
        assert re.search(rf"WARNING .*safety\.md.*{re.escape(target)}", done.stdout), why


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_somewhere_and_none_leaves_the_site(page: Path) -> None:
    site = ROOT / "docs"
    for link in LINK.findall(page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / link).resolve()
        assert target.exists(), f"{link}: no such file"
        assert not page.is_relative_to(site) or target.is_relative_to(site), (
            f"{link} is outside of docs/ and not part of the site"
        )
