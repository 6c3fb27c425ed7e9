"""A child for `test_child.py`: answers, dies or hangs as it is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

from saccade.ipc.child import Channel, Codec, Disconnected, enter


@dataclass(frozen=True, slots=True)
class Greeting:
    name: str
    descriptor: int


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Do:
    what: str


@dataclass(frozen=True, slots=True)
class Said:
    text: str


Order = Say | Do


def main() -> int:
    greeting, parent = enter(Greeting)
    channel: Channel[Said, Order] = Channel(parent.socket, Codec(Said, Order))
    os.write(greeting.descriptor, greeting.name.encode())
    try:
        while True:
            match channel.receive():
                case Say(text):
                    channel.send(Said(text))
                case Do("die"):
                    os.kill(os.getpid(), signal.SIGKILL)
                case Do("give up while the main thread hangs"):
                    threading.Timer(0.05, parent.give_up, ("it hangs" + "x" * 100_000,)).start()
                    time.sleep(600)
                case Do("count signals"):
                    for number in (signal.SIGINT, signal.SIGTERM):
                        os.kill(os.getpid(), number)
                    channel.send(Said("alive"))
                case Do("hang"):
                    time.sleep(600)
    except Disconnected:
        return 7


if __name__ == "__main__":
    sys.exit(main())
