"""The core without each plugin: its folder is deleted from a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade.plugin import Plugin
from saccade.plugins import plugins

PACKAGE = Path(saccade.__file__).parent
ROOT = PACKAGE.parent
OWN = [plugin for plugin in plugins() if (PACKAGE / "plugins" / plugin.name).is_dir()]
PROGRAM = """
import json, re, sys
import saccade
from saccade.api.operations import EXAMPLE_CHAT
from saccade.commands import app
from saccade.plugins import plugins
from tests.helpers.served import serving

copy, deleted, paths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
assert saccade.__file__.startswith(copy)
assert deleted not in {plugin.name for plugin in plugins()}
app.parse_args(["serve", "demo"])
with serving() as served:
    for messages in [{"role": "user", "content": "Hi"}], EXAMPLE_CHAT:
        answer = served.http.post("/v1/chat/completions", json={"messages": messages})
        print(answer.status_code, answer.json()["choices"][0]["message"]["content"])
    if deleted == "grammar":
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


@pytest.mark.more
@pytest.mark.parametrize("plugin", OWN, ids=lambda plugin: plugin.name)
def test_the_core_answers_without(plugin: Plugin, tmp_path: Path) -> None:
    copy = tmp_path / "saccade"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "plugins" / plugin.name)
    search = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "bench")))
    arguments = str(tmp_path), plugin.name, json.dumps(plugin.http.paths)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *arguments],
        env={**os.environ, "PYTHONPATH": search},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    text, image, *unknown = done.stdout.splitlines()
    assert text == image == "200 Hello!"
    assert len(unknown) == len(plugin.http.paths)
    for answer in unknown:
        assert answer.startswith("404 ") and "there is no /" in answer, answer
