"""When changes of the weights may be made, and what waits while the engine is paused."""

from __future__ import annotations

from dataclasses import replace

from saccade.core.plan import Change, Changed
from saccade.core.types import AdapterRef, Caching, Delta, Request, SamplingParams
from saccade.engine.changes import Changes
from saccade.engine.pause import PauseState
from saccade.ipc.messages import Alter, Altered

LOAD, DROP = Change("load adapter", 2, "/a"), Change("drop adapter", 1)


def request(id: str, adapter: int = 0) -> Request:
    made = Request(id, (1,), (), (), SamplingParams())
    return replace(made, caching=Caching(adapter=AdapterRef(adapter, "f")))


def test_an_adapter_is_dropped_when_nobody_has_it_and_loads_pass_that_wait() -> None:
    encoding = {1}
    changes = Changes(lambda number: number in encoding)
    for each in (request("a", 1), request("b", 1), request("c", 3)):
        changes.entered(each)
    changes.add(Alter(7, DROP))
    changes.add(Alter(8, LOAD))
    assert changes.take_change() == LOAD and changes.take_change() is None
    assert changes.made(Changed(rank=4)) == Altered(8, Changed(rank=4))
    changes.ended([Delta("a", finish="stop"), Delta("b", (1,))])
    assert changes.take_change() is None
    changes.ended([Delta("b", finish="abort")])
    assert changes.take_change() is None and changes.under_way, "an image is encoded with it"
    encoding.clear()
    assert changes.take_change() == DROP
    assert changes.made(Changed()).id == 7 and not changes.under_way


def test_a_pause_is_told_once_nothing_is_left_to_do() -> None:
    pause = PauseState()
    pause.begin_pause(1, keeps=False)
    pause.hold_request(request("late"))
    assert (pause.holds, pause.freezes) == (True, False), "what is in flight is computed"
    assert (pause.settle(idle=False), pause.empty) == ([], False)
    pause.begin_pause(2, keeps=True)
    assert pause.settle(idle=True) == [Altered(1, Changed()), Altered(2, Changed())]
    assert (pause.empty, pause.freezes, pause.settle(idle=True)) == (True, True, [])
    assert (pause.leave(), pause.holds) == (([], []), True), "nobody has asked for its end"
    pause.end_pause(3)
    held, told = pause.leave()
    assert [each.id for each in held] == ["late"] and told == [Altered(3, Changed())]
    assert (pause.holds, pause.waiting) == (False, False)


def test_what_is_kept_is_frozen_at_once() -> None:
    pause = PauseState()
    pause.begin_pause(1, keeps=True)
    assert pause.freezes
    pause.settle(idle=True)
    assert not pause.empty, "no weights may change under what is kept"


def test_who_waits_in_a_pause_can_leave_or_be_ended() -> None:
    pause = PauseState()
    pause.begin_pause(1, keeps=False)
    for id in ("a", "b"):
        pause.hold_request(request(id))
    assert pause.drop("a") and not pause.drop("a")
    assert pause.fail_all("over") == [Delta("b", finish="error", error="over")]
    assert not pause.waiting


def test_weights_that_are_about_to_change_are_waited_for() -> None:
    changes = Changes(lambda _: False)
    changes.add(Alter(1, Change("weights", folder="/w")))
    assert changes.take_change() == Change("weights", folder="/w")
    before = changes.halts
    changes.made(Changed(tower=True))
    assert (before, changes.halts) == (True, False)
