"""A class's fields are looked up by one thread, and no other decodes it meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

BETWEEN = """
from __future__ import annotations
import threading
from msgspec import Struct, json, msgpack
from saccade.core.decoders import convert, json_decoder, msgpack_decoder

looking, decoded = threading.Event(), threading.Event()

def looked_up():
    looking.set()
    decoded.wait(0.5)
    return int

class Inner(Struct):
    first: looked_up() = 0

class Outer(Struct):
    inner: Inner | None = None
    last: int = 0

given = {"last": 1}
ways = {
    "json": lambda: json_decoder(Outer).decode(json.encode(given)),
    "msgpack": lambda: msgpack_decoder(Outer).decode(msgpack.encode(given)),
    "convert": lambda: convert(given, Outer),
}
first, second = WAYS
thread = threading.Thread(target=ways[first])
thread.start()
looking.wait()
assert ways[second]().last == 1
decoded.set()
thread.join()
print("decoded")
"""


@pytest.mark.parametrize(
    ("first", "second"), [("json", "json"), ("msgpack", "convert"), ("convert", "msgpack")]
)
def test_a_class_is_decoded_while_another_thread_looks_its_fields_up(
    first: str, second: str
) -> None:
    script = BETWEEN.replace("WAYS", repr((first, second)))
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "decoded\n"), found.stderr
