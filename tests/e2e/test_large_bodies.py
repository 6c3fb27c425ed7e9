"""What a large body costs a server's first process when it comes again. Freed memory stays for the
next body, else each of its pages is filled with zeros and mapped again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.helpers.images import image_part, text_part, user
from tests.media.pictures import encode, noise

pytestmark = pytest.mark.more

IMAGES, SIDE = 7, 1000
"""A body of 28 MB: their bytes are noise, which PNG does not make smaller."""
MAX_FAULTS = 3000
"""From the third body on, 735 to 3,911 were measured where 160 MiB stay, and 6,814 to 9,987 where
32 do. Some bodies find the heap in pieces, so the least of four counts.
"""


def minor_faults(server: Server) -> int:
    """Pages mapped so far without reading a disk."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])


def test_equal_bodies_are_read_into_memory_of_those_before(tmp_path: Path) -> None:
    files = [encode(noise(SIDE, SIDE, seed), compress_level=0) for seed in range(IMAGES)]
    asked = user(*map(image_part, files), text_part("how many?"))
    with serving("demo", tmp_path) as server:
        faults = []
        for _ in range(6):
            before = minor_faults(server)
            server.chat(asked, max_tokens=1)
            faults.append(minor_faults(server) - before)
        assert server.metric("saccade_images_encoded_total") <= IMAGES
    assert min(faults[2:]) < MAX_FAULTS, faults
