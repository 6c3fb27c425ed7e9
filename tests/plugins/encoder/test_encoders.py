"""Which encoders are asked, where a file names them."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3

import saccade.plugins.encoder.encoders
from saccade.core.arena import Arena
from saccade.core.errors import ConfigError
from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.core.types import Image, ImageKey, Tower
from saccade.plugins.encoder.encoders import Encoders
from saccade.plugins.encoder.exchange import RESULT_HEADER, EmbeddingRequest, EmbeddingResult
from saccade.plugins.encoder.options import RoleOptions

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
    monkeypatch.setattr(saccade.plugins.encoder.encoders, "CHECK_SECONDS", 0.01)
    path, arena = tmp_path / "encoders", Arena.create(1 << 20)
    options = RoleOptions(role="language", encoders=(str(path),))
    slot = PixelSlot(0, 64, 64, 1 << 16)

    async def ask(*names: str) -> str:
        path.write_text("".join(f"{name}\n" for name in names))
        await asyncio.sleep(0.02)  # until the next look
        return (await encoders.encode(EmbeddingRequest(IMAGE, TOWER), b"", slot)).outcome

    async def scene() -> list[str]:
        encoders.trust(TOWER)
        assert encoders.fits(4, slot)
        missing = (await encoders.encode(EmbeddingRequest(IMAGE, TOWER), b"", slot)).outcome
        first, second = nobody(), nobody()
        found = [missing, await ask(), await ask(first)]
        found += [await ask(first), await ask(second), await ask("https://secret"), await ask()]
        path.write_text(f"{nobody()}\n")
        await asyncio.sleep(0.02)
        wanted = [replace(IMAGE, key=replace(IMAGE.key, salt=name)) for name in "ab"]
        asked = (encoders.encode(EmbeddingRequest(image, TOWER), b"", slot) for image in wanted)
        assert {each.outcome for each in await asyncio.gather(*asked)} == {"unreachable"}
        await encoders.close()
        return found

    encoders = Encoders(options, arena, Metrics())
    with caplog.at_level(logging.WARNING):
        found = asyncio.run(scene())
    # One that has just failed is left alone; another is asked at once.
    assert found == ["away", "away", "unreachable", "away", "unreachable", "away", "away"]
    assert "https://secret" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_embedding_with_values_that_are_no_numbers_is_refused_though_its_checksum_is_right(
    dtype: str,
) -> None:
    tower = Tower("f", dtype, 8)
    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    sound = torch.tensor([0.0, -0.0, 1.5, largest, -largest, torch.finfo(kind).tiny] * 6)[:32]
    answers = [sound.to(kind, copy=True)]
    for value in (float("nan"), float("inf"), -float("inf")):
        answers.append(sound.to(kind, copy=True))
        answers[-1][31] = value
    given = iter(answers)
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                values = next(given).view(torch.uint8).numpy().tobytes()
                told = EmbeddingResult(tower, 4, blake3(values).hexdigest(), 1.0)
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(values)}\r\n{RESULT_HEADER}: "
                writer.write(head.encode() + msgspec.json.encode(told) + b"\r\n\r\n" + values)
                await writer.drain()

    async def scene() -> list[str]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        slot, found = PixelSlot(0, 64, 64, 1 << 16), []
        for _ in answers:
            options = RoleOptions(
                role="language", encoders=(f"http://127.0.0.1:{port}",), encoder_key="k"
            )
            encoders = Encoders(options, Arena.create(1 << 20), Metrics())
            encoders.trust(tower)
            found.append((await encoders.encode(EmbeddingRequest(IMAGE, tower), b"", slot)).outcome)
            await encoders.close()
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        server.close()
        return found

    assert asyncio.run(scene()) == ["embedding", *["damaged"] * 3]


def test_encoders_are_named_once_and_only_where_somebody_asks_them() -> None:
    for options in (
        {"role": "language"},
        {"encoders": ("./x",)},
        {"role": "encode", "encoders": ("http://a:1",)},
    ):
        with pytest.raises(ConfigError, match="--role language requires --encoders"):
            RoleOptions(**options)
    for encoders, word in (
        (("http://a:1", "./x"), "either one file or a list of URLs"),
        (("a:1",), r"http://HOST"),
    ):
        with pytest.raises(ConfigError, match=f"^--encoders .*{word}"):
            RoleOptions("language", encoders)
