"""The core without each plugin: its folder is deleted from a copy of the package.

By default, half of the plugins are deleted at a time, in so many ways that each is deleted where
any other is still there. Each is deleted alone in `make test-all`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, permutations
from pathlib import Path

import pytest

import saccade
from saccade.plugin import Plugin
from saccade.plugins import plugins

PACKAGE = Path(saccade.__file__).parent
ROOT = PACKAGE.parent
OWN = [plugin for plugin in plugins() if (PACKAGE / "plugins" / plugin.name).is_dir()]
DRAWS = 8
HALVES = dict(zip(OWN, combinations(range(DRAWS), DRAWS // 2), strict=False))
"""By plugin, the draws that delete it: as many of each plugin, so none's are among another's."""
PROGRAM = """
import json, re, sys
import saccade
from saccade.api.operations import EXAMPLE_CHAT
from saccade.commands import app
from saccade.plugins import plugins
from tests.helpers.served import serving

copy, deleted, paths = sys.argv[1], {*json.loads(sys.argv[2])}, json.loads(sys.argv[3])
assert saccade.__file__.startswith(copy)
assert not deleted & {plugin.name for plugin in plugins()}
app.parse_args(["serve", "demo"])
with serving() as served:
    for messages in [{"role": "user", "content": "Hi"}], EXAMPLE_CHAT:
        answer = served.http.post("/v1/chat/completions", json={"messages": messages})
        print(answer.status_code, answer.json()["choices"][0]["message"]["content"])
    if "grammar" in deleted:
        held = {"messages": messages, "response_format": {"type": "json_object"}}
        answer = served.http.post("/v1/chat/completions", json=held)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "response_format"), error
    for path in paths:
        answer = served.http.get(re.sub("{.*?}", "x", path))
        print(answer.status_code, answer.json())
"""


def test_each_folder_is_the_plugin_of_that_name() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("plugins/*/__init__.py")}
    assert folders == {plugin.name for plugin in OWN}


def drawn(draw: int) -> list[Plugin]:
    return [plugin for plugin in OWN if draw in HALVES[plugin]]


def test_each_is_deleted_where_any_other_is_there() -> None:
    draws = [drawn(draw) for draw in range(DRAWS)]
    for one, other in permutations(OWN, 2):
        assert any(one in deleted and other not in deleted for deleted in draws)


@pytest.mark.more
@pytest.mark.parametrize(
    "deleted",
    [
        *(pytest.param(drawn(draw), id=f"draw {draw}") for draw in range(DRAWS)),
        *(pytest.param([plugin], id=plugin.name, marks=pytest.mark.slow) for plugin in OWN),
    ],
)
def test_the_core_answers_without(deleted: Sequence[Plugin], tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "saccade")  # and what is compiled already
    for plugin in deleted:
        shutil.rmtree(tmp_path / "saccade" / "plugins" / plugin.name)
    paths = [path for plugin in deleted for path in plugin.http.paths]
    search = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "bench")))
    names = [plugin.name for plugin in deleted]
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(tmp_path), json.dumps(names), json.dumps(paths)],
        env={**os.environ, "PYTHONPATH": search},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    text, image, *unknown = done.stdout.splitlines()
    assert text == image == "200 Hello!"
    assert len(unknown) == len(paths)
    for answer in unknown:
        assert answer.startswith("404 ") and "there is no /" in answer, answer
