"""Photos as phones write them, over HTTP: with the extra that reads them, and without it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade.demo.run import QUESTIONS
from saccade_bench.fixtures.server import Server, serving
from tests.helpers.images import content, data_url, text_part, user

pytestmark = pytest.mark.slow  # its decoding, its workers and its refusals: tests/media

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest, **named):
        return None if name == "pillow_heif" else super().find_spec(name, *rest, **named)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Every process of a server begins with it, and finds no package of that name."""


def photo_url(kind: str) -> str:
    pillow_heif = pytest.importorskip("pillow_heif")
    file, image = io.BytesIO(), Image.open(QUESTIONS[0].images[0])
    if kind == "heic":
        pillow_heif.from_pillow(image).save(file, quality=95, chroma=444)
    else:
        image.save(file, "PNG")
    return data_url(file.getvalue(), f"image/{kind}")


def ask(server: Server, url: str, status: int = 200) -> Any:
    image = {"type": "image_url", "image_url": {"url": url}}
    asked = user(image, text_part(QUESTIONS[0].question))
    return server.post(
        "/v1/chat/completions", {"messages": [asked], "temperature": 0}, status=status
    )


def test_a_heic_is_answered_as_its_png_is_and_decoded_once(tmp_path: Path) -> None:
    with serving("demo", tmp_path) as server:
        url = photo_url("heic")
        told = content(ask(server, url))
        assert told == content(ask(server, photo_url("png"))) and told
        decoded = server.metric("saccade_images_decoded_total")
        assert content(ask(server, url)) == told
        assert server.metric("saccade_images_decoded_total") == decoded == 2
        assert server.metric("saccade_images_encoded_total") == 2


def test_without_the_extra_a_heic_is_refused_by_its_name_and_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "path"
    path.mkdir()
    (path / "sitecustomize.py").write_text(WITHOUT)
    url, other = photo_url("heic"), photo_url("png")
    monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with serving("demo", tmp_path) as server:
        refused = ask(server, url, status=400)
        assert "scripts/install.py '.[heic]'" in refused["error"]["message"]
        assert content(ask(server, other))
