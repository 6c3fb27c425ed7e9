"""Code that hostile bytes run in an image worker reaches nothing: no file, no socket, no process,
no other's pixels, no key. And nothing that sound bytes need is out of reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from saccade.core.arena import Arena
from saccade.core.errors import ImageError
from saccade.core.metrics import Metrics
from saccade.core.plan import PixelSlot
from saccade.core.recipe import whole
from saccade.media.content import Probe
from saccade.media.formats import heif
from saccade.media.formats.decode import FORMATS
from saccade.media.formats.header import probe
from saccade.media.reasons import READS_HEIC
from saccade.media.sources.fairness import Requester
from saccade.media.workers import fork_server, sandbox, thread_gate
from saccade.media.workers.decode_queue import Job
from saccade.media.workers.pool import DecodePool
from saccade.media.workers.worker_slots import TRIES
from tests.media import hostile
from tests.media.pictures import decoded, encode, photo, resized, with_orientation
from tests.media.test_pool import RESTARTS, SharedForkServers, job, running, worker_process, workers

MACHINE = os.uname().machine
pytestmark = pytest.mark.skipif(
    MACHINE not in sandbox.SYSCALL_TABLES, reason="no numbers for this machine"
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(64 << 20)
    yield arena
    arena.close()


@cache
def unbounded() -> SharedForkServers:
    """Workers whose kernel bounds no threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "SUPERVISOR", "tests.media.unbounded")
        return SharedForkServers.start()


@cache
def taken_over() -> SharedForkServers:
    """Workers run attacks, where there are keys in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "SUPERVISOR", hostile.__name__)
        for name in KEYS:
            patch.setenv(name, "secret-of-this-test")
        return SharedForkServers.start()


def order(told: str, kind: str = "PNG") -> Job:
    """For a worker that runs attacks."""
    return Job(told.encode(), told.encode(), Probe(kind, 32, 32, "RGB", 1, 1), whole((32, 32)))


async def outcome(pool: DecodePool, arena: Arena, told: str, kind: str = "PNG") -> str:
    """What an attack says of itself: in its pixels, for a worker has no words."""
    try:
        await pool.decode(order(told, kind), 0)
    except ImageError as error:
        return error.message.removeprefix("the image cannot be decoded: ")
    return bytes(arena.flat(0, 3 * 32 * 32)).rstrip(b"\0").decode()


REFUSED = "PermissionError: [Errno 1] Operation not permitted"
EXPECTED = {
    "memory to execute": REFUSED,
    "raise a hard limit": "ValueError: not allowed to raise maximum limit",
    "thread": "RuntimeError: can't start new thread",
    "environment": "it worked: []",
    # Standard input, output and errors lead nowhere; a socket, the lifeline, the address space's
    # size, and the encoded bytes to be read.
    "descriptors": "it worked: 'else, else, else, else, else, else, the inbox'",
    "a larger outbox": "",
    # Where threads may be allowed, this word is what has the C library ask by `clone`.
    "call clone3": "Function not implemented" if READS_HEIC else "Operation not permitted",
}
KEYS = ("SACCADE_API_KEY", "SACCADE_ENCODER_KEY", "HF_TOKEN", "OPENAI_API_KEY")


@pytest.mark.more
async def test_code_in_a_worker_reaches_nothing(arena: Arena) -> None:
    async with running(arena, Metrics(), taken_over, decode_memory_mb=256) as pool:
        told = {name: await outcome(pool, arena, f"do:{name}") for name in hostile.ATTACKS}
        calls = hostile.CALLS
        told |= {f"call {name}": await outcome(pool, arena, f"raw:{name}") for name in calls}
    for name in ("environment", "descriptors"):
        assert told.pop(name) == EXPECTED[name]
    grown = told.pop("grow")
    assert 128 < int(grown.removeprefix("it worked: ")) <= 256 * 3 // 2 + 128, grown
    assert told.pop("a larger outbox").startswith("its decoder crashed")
    for name, found in told.items():
        refused = ("Operation not permitted",) if name.startswith("call ") else (REFUSED,)
        assert found.startswith(EXPECTED.get(name, refused[0])), f"{name}: {found}"
    assert not Path("/tmp/written-by-an-image").exists()


@pytest.mark.more
@pytest.mark.skipif(not READS_HEIC, reason="no image has a thread")
async def test_bytes_that_may_have_threads_have_few_and_nothing_else(arena: Arena) -> None:
    """HEIC's: no process, no namespace, and from a thread nothing more than from the first."""
    reached = hostile.ATTACKS.keys() - {"a larger outbox", "grow", "thread", "exec", "spawn"}
    metrics = Metrics()
    async with running(arena, metrics, taken_over, decode_memory_mb=256) as pool:
        assert await outcome(pool, arena, "do:thread", "HEIF") == "it worked: 'a thread'"
        told = await outcome(pool, arena, "do:clones", "HEIF")
        refused = dict.fromkeys(hostile.CLONES, "Operation not permitted")
        assert told == f"it worked: {refused!r}"
        told = await outcome(pool, arena, "do:clone3", "HEIF")
        assert told == "it worked: {'Function not implemented'}"
        for name in ("fork", "vfork", "clone", "socket", "execve"):
            told = await outcome(pool, arena, f"raw:{name}", "HEIF")
            assert told == "Operation not permitted", name
        for name in sorted(reached):
            told = await outcome(pool, arena, f"thread:{name}", "HEIF")
            assert told.startswith(EXPECTED.get(name, REFUSED)), f"{name}: {told}"
        for _ in range(3):  # those of an order stay for the next
            told = await outcome(pool, arena, "do:bomb", "HEIF")
            assert int(told.removeprefix("it worked: ")) <= thread_gate.MAX_THREADS
        told = await outcome(pool, arena, "do:thread", "PNG")
        assert told == "RuntimeError: can't start new thread"
        assert metrics.value(RESTARTS) == 0
        told = await outcome(pool, arena, "do:endless", "HEIF")
        assert told.startswith("its decoder crashed")
        assert metrics.value(RESTARTS) == TRIES


@pytest.mark.more
@pytest.mark.skipif(not READS_HEIC, reason="no image has a thread")
async def test_where_threads_cannot_be_bounded_heic_is_refused_and_other_images_are_not(
    arena: Arena,
) -> None:
    async with running(arena, Metrics(), unbounded) as pool:
        image = PIL.Image.fromarray(photo(64, 64))
        with pytest.raises(
            ImageError, match=r"cannot limit the threads of its decoder: send it as JPEG"
        ):
            await pool.decode(job(encode(image, "HEIF")), 0)
        await pool.decode(job(encode(image, "PNG")), 0)


@pytest.mark.more
@pytest.mark.parametrize(
    "how",
    [
        *("another's answer", "an answer before its order", "an answer of another kind"),
        *("half an answer", "an endless answer", "no answer of any kind", "nonsense"),
        *("words of its own", "another sentence's numbers", "numbers without end"),
        *("a time that is none", "a successor", "arrays in arrays"),
    ],
)
async def test_what_a_worker_may_not_say_ends_it_and_no_other(arena: Arena, how: str) -> None:
    metrics = Metrics()
    async with running(arena, metrics, taken_over, media_workers=2, decode_timeout=2.0) as pool:
        lying = asyncio.create_task(pool.decode(order(f"forge:{how}"), 0))
        for number in range(8):
            await pool.decode(order(f"good:{number}"), 1 << 20)
        assert (arena.view(PixelSlot(1 << 20, 32, 32)) == 7).all()
        with pytest.raises(Exception, match=r"decoder crashed|no CPU time"):
            await lying
        assert metrics.value(RESTARTS) == 2
        assert (arena.view(PixelSlot(0, 32, 32)) == 0).all()


@pytest.mark.more
@pytest.mark.skipif(os.geteuid() != 0, reason="/proc of such a process is root's")
async def test_no_worker_has_the_arena_or_another_workers_memory(arena: Arena) -> None:
    async with running(arena, media_workers=2) as pool:
        await worker_process()
        await pool.decode(job(encode(photo(64, 64))), 0)
        for name, own in (("saccade-decode", 1), ("saccade-header", 0)):
            for process in workers(name):
                proc = Path(f"/proc/{process.pid}")
                maps = (proc / "maps").read_text()
                links = [str(each.readlink()) for each in (proc / "fd").iterdir()]
                status = (proc / "status").read_text()
                environment = (proc / "environ").read_text()
                assert "saccade-arena" not in maps + " ".join(links)
                assert maps.count("saccade-outbox") == own
                assert "saccade-outbox" not in " ".join(links)
                assert sum("saccade-inbox" in link for link in links) == 1
                assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
                assert "CapPrm:\t0000000000000000" in status
                assert "CapEff:\t0000000000000000" in status
                assert "KEY" not in environment


def of_every_kind() -> dict[str, bytes]:
    """Each format, with what decoders do differently."""
    pixels = photo(70, 90)
    image = PIL.Image.fromarray(pixels)
    made = {
        "JPEG progressive": encode(image, "JPEG", progressive=True),
        "JPEG grey": encode(image.convert("L"), "JPEG"),
        "JPEG CMYK": encode(image.convert("CMYK"), "JPEG"),
        "PNG palette": encode(image.quantize(64), "PNG"),
        "PNG alpha": encode(image.convert("RGBA"), "PNG"),
        "PNG 16 bits": encode(PIL.Image.fromarray(pixels[..., 0].astype(np.uint16) << 8), "PNG"),
        "WEBP lossless": encode(image, "WEBP", lossless=True),
        "TIFF lzw": encode(image, "TIFF", compression="tiff_lzw"),
        "TIFF deflate": encode(image, "TIFF", compression="tiff_deflate"),
        "TIFF jpeg": encode(image, "TIFF", compression="jpeg"),
        "TIFF group4": encode(image.convert("1"), "TIFF", compression="group4"),
        "TIFF of 64 bits": encode(image, "TIFF", big_tiff=True, compression="tiff_lzw"),
        "JPEG 2000 lossy": encode(image, "JPEG2000", irreversible=True, tile_size=(40, 40)),
        "JPEG 2000 codestream": encode(image.convert("RGBA"), "JPEG2000", no_jp2=True),
        "ICO of bitmaps": encode(image.convert("RGBA"), "ICO", bitmap_format="bmp"),
        "PPM as text": b"P3 2 2 9 1 2 3 4 5 6 7 8 9 0 1 2",
    }
    plain = {kind: encode(image, kind) for kind in FORMATS}
    turned = {
        f"{kind} turned": with_orientation(pixels, 6, kind)
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", *heif.FORMATS)
    }
    return made | plain | turned


@pytest.mark.more
async def test_a_confined_worker_decodes_as_ever(arena: Arena) -> None:
    """Headers, and pixels as stored and resized, bit for bit."""
    async with running(arena) as pool:
        for kind, data in of_every_kind().items():
            found = probe(data, 10**9)
            assert await pool.headers.read_header(data, data, Requester()) == found, kind
            for size in (found.upright, (56, 84), (224, 252)):
                await pool.decode(job(data, size), 4096)
                made = arena.view(PixelSlot(4096, *size))
                told = f"{kind} at {size}"
                np.testing.assert_array_equal(made, resized(decoded(data), size), told)


MODES = (
    *("1", "L", "LA", "La", "P", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "LAB"),
    *("HSV", "I", "I;16", "F"),
)
"""Of Pillow's images."""


def of_every_mode() -> Iterator[tuple[str, bytes]]:
    """Each mode that Pillow itself writes, in each format that has it."""
    image = PIL.Image.fromarray(photo(24, 40))
    by_way_of = {"La": "LA", "RGBa": "RGBA", "PA": "LA", "I;16": "L", "I": "L", "F": "L"}
    for mode, kind in product(MODES, set(FORMATS) - set(heif.FORMATS)):
        made = PIL.Image.frombytes("LAB", image.size, image.tobytes())
        if mode != "LAB":
            made = image.convert(by_way_of.get(mode, "RGB")).convert(mode)
        with contextlib.suppress(ValueError, OSError, KeyError):  # as Pillow says: not there
            yield f"{kind} {mode}", encode(made, kind)


@pytest.mark.more
async def test_a_confined_worker_has_loaded_what_every_mode_needs(arena: Arena) -> None:
    """L*a*b* once had Pillow load its colour management, which a worker may not."""
    seen = set()
    async with running(arena, metrics := Metrics()) as pool:
        for name, data in of_every_mode():
            found = await pool.headers.read_header(data, data, Requester())
            await pool.decode(job(data), 0)
            made = arena.view(PixelSlot(0, *found.upright))
            np.testing.assert_array_equal(made, decoded(data), name)
            seen.add(name)
        assert metrics.value(RESTARTS) == 0
    assert {"TIFF LAB", "TIFF F", "JPEG2000 I;16", "PPM I", "ICO RGBA", "WEBP RGBX"} <= seen
    assert len(seen) > 60


@pytest.mark.more
def test_what_the_kernel_does_not_take_is_said_and_the_work_goes_on(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "SUPERVISOR", "tests.media.unconfined")

    async def scenario() -> None:
        async with running(arena, forked_from=None) as pool:
            data = encode(photo(64, 64))
            await pool.decode(job(data), 0)
            np.testing.assert_array_equal(arena.view(PixelSlot(0, 64, 64)), decoded(data))

    asyncio.run(scenario())
    told = "image workers run without a seccomp filter (system calls on abacus are not supported)"
    assert told in caplog.text


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("machine", sandbox.SYSCALL_TABLES)
def test_each_machines_calls_are_the_same(
    machine: str, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for `poll`, which newer machines lack."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    numbers = sandbox.SYSCALL_TABLES[machine].calls
    assert numbers.keys() - {"poll"} == sandbox.AARCH64.keys()
    assert len(set(numbers.values())) == len(numbers)
    program = sandbox.program(threads)
    for at, (code, yes, no, _) in enumerate(program):
        if code not in (sandbox.BPF_LD_ABS, sandbox.BPF_RET):
            assert at + 1 + max(yes, no) < len(program), "no jump leads out"
    assert program[-1] == (sandbox.BPF_RET, 0, 0, sandbox.RET_EPERM)
