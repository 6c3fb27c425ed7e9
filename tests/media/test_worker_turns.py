"""Whose turn it is at a worker: clients in turn, and the requests of each."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.media.sources.fairness import Requester, Turns


@dataclass(eq=False)
class Item:
    name: str
    requester: Requester
    wanted: bool = True


def some(name: str, client: str, request: str) -> Item:
    return Item(name, Requester(client, request=request))


def served(turns: Turns[Item]) -> str:
    return "".join(item.name for item in iter(turns.take_next, None))


def test_clients_take_turns_and_so_do_the_requests_of_one() -> None:
    turns: Turns[Item] = Turns()
    for name in "abc":
        turns.add(some(name, "one", "1"))
    for name in "de":
        turns.add(some(name, "one", "2"))
    for name in "xy":
        turns.add(some(name, "two", "3"))
    assert [item.name for item in turns] == [*"abcdexy"]
    assert served(turns) == "axdybec"
    assert not [*turns]


def test_who_comes_while_another_is_served_is_next() -> None:
    turns: Turns[Item] = Turns()
    for name in "abc":
        turns.add(some(name, "one", "1"))
    first = turns.take_next()
    assert first is not None and first.name == "a"
    turns.add(some("x", "two", "2"))
    turns.add(some("d", "one", "3"))
    assert served(turns) == "xdbc"


def test_what_is_not_wanted_is_dropped_and_what_does_not_fit_waits() -> None:
    turns: Turns[Item] = Turns()
    items = [some(name, name, "") for name in "abc"]
    for item in items:
        turns.add(item)
    items[0].wanted = False
    found = turns.take_next(lambda item: item.name != "b")
    assert found is items[2]
    turns.put_back(items[2])
    assert served(turns) == "cb"
