"""Which encoders are asked, where a file names them."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from pathlib import Path

import pytest

import saccade.media.encoders
from saccade.core.arena import Arena
from saccade.core.errors import ConfigError
from saccade.core.exchange import EmbeddingWanted
from saccade.core.metrics import Metrics
from saccade.core.options import RoleOptions
from saccade.core.plan import PixelSlot
from saccade.core.types import Image, ImageKey, Tower
from saccade.media.encoders import Encoders

IMAGE = Image(ImageKey(bytes(32), bytes(16)), (1, 4, 4), 4, 16, (64, 64))
TOWER = Tower("f", "float32", 8)


def nobody() -> str:
    """Where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_file_of_encoders_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it names one, and after it names none, nobody is asked; nonsense changes nothing."""
    monkeypatch.setattr(saccade.media.encoders, "LOOK_SECONDS", 0.01)
    path, arena = tmp_path / "encoders", Arena.create(1 << 20)
    options = RoleOptions(role="language", encoders_file=str(path))
    slot = PixelSlot(0, 64, 64, 1 << 16)

    async def ask(*names: str) -> str:
        path.write_text("".join(f"{name}\n" for name in names))
        await asyncio.sleep(0.02)  # until the next look
        return (await encoders.ask(EmbeddingWanted(IMAGE, TOWER), b"", slot)).outcome

    async def scene() -> list[str]:
        encoders.trust(TOWER)
        assert encoders.fits(4, slot)
        missing = (await encoders.ask(EmbeddingWanted(IMAGE, TOWER), b"", slot)).outcome
        first, second = nobody(), nobody()
        found = [missing, await ask(), await ask(first)]
        found += [await ask(first), await ask(second), await ask("https://secret"), await ask()]
        path.write_text(f"{nobody()}\n")
        await asyncio.sleep(0.02)
        wanted = [replace(IMAGE, key=replace(IMAGE.key, salt=name)) for name in "ab"]
        asked = (encoders.ask(EmbeddingWanted(image, TOWER), b"", slot) for image in wanted)
        assert {each.outcome for each in await asyncio.gather(*asked)} == {"unreachable"}
        await encoders.close()
        return found

    encoders = Encoders(options, arena, Metrics())
    with caplog.at_level(logging.WARNING):
        found = asyncio.run(scene())
    # One that has just failed is left alone; another is asked at once.
    assert found == ["away", "away", "unreachable", "away", "unreachable", "away", "away"]
    assert "https://secret" in caplog.text


def test_encoders_are_named_once_and_only_where_somebody_asks_them() -> None:
    for options in (
        {"role": "language"},
        {"encoders_file": "x"},
        {"role": "encode", "encoders": ("http://a:1",)},
        {"role": "language", "encoders": ("http://a:1",), "encoders_file": "x"},
    ):
        with pytest.raises(ConfigError, match="say who encodes"):
            RoleOptions(**options)
