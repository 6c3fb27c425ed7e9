"""The published workloads: they send the documented requests, and the counts of each server are
reported.
"""

from __future__ import annotations

from itertools import chain

import pytest

from saccade_bench.workloads.__main__ import main
from saccade_bench.workloads.conversations import WORKLOADS, Sent, WorkloadSize, groups
from saccade_bench.workloads.published import PUBLISHED
from saccade_bench.workloads.replay import WorkloadRound, per_seen
from tests.tools.server import Script, ScriptedServer, pictures

SMALL = WorkloadSize(users=1, turns=6, counts=(1, 3), resolution=(64, 32), words=5, max_tokens=2)


def requests(workload: str, size: WorkloadSize, seed: int = 0) -> list[list[Sent]]:
    """Return all requests of each of a workload's groups, sending an answer to each."""
    found = []
    for _, make in groups(workload, size):
        conversation = make(seed)
        sent = [next(conversation)]
        while True:
            try:
                sent.append(conversation.send(f"answer {len(sent)}"))
            except StopIteration:
                break
        found.append(sent)
    return found


@pytest.mark.parametrize("workload", WORKLOADS)
def test_images_are_as_new_and_as_seen_as_a_workload_says(workload: str) -> None:
    for group in requests(workload, SMALL):
        before: set[str] = set()
        for each in group:
            shown = pictures({"messages": each.messages})
            assert len(shown) == each.new + each.seen
            assert len(set(shown) - before) == each.new
            before.update(shown)


def test_every_workload_has_a_published_size() -> None:
    assert PUBLISHED.keys() == {*WORKLOADS}
    turns = requests("window", WorkloadSize(1, 8, (5,), (64, 32), 5))
    assert [(each.new, each.seen) for each in chain(*turns)] == [(5, 0)] + [(1, 4)] * 7


def test_two_users_share_no_image() -> None:
    for workload in WORKLOADS:
        one, two = (
            {
                shown
                for each in chain(*requests(workload, SMALL, seed))
                for shown in pictures({"messages": each.messages})
            }
            for seed in (0, 1)
        )
        assert not one & two


def test_a_seen_images_part_is_the_slope_over_rounds_that_have_some() -> None:
    rounds = [
        WorkloadRound(1, seen, 0, 100 + 7.0 * seen * bool(seen), None, 0, None) for seen in range(5)
    ]
    assert per_seen(rounds, [each.computed for each in rounds]) == pytest.approx(7)
    assert per_seen(rounds, [each.cpu for each in rounds]) is None, "nobody tells it"
    assert per_seen(rounds[:2], [1, 2]) is None, "one point is no line"


def test_a_table_has_each_server_and_what_is_published(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(cached=3)
    words = ["growing-chat", "--base-url", server.url, "--peer", f"other={server.url}/v1"]
    sizes = ["--users", "2", "--turns", "3", "--size", "64x32", "--words", "5", "--pause", "0"]
    assert main([*words, *sizes, "--max-tokens", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("computed") == 2 and "this" in told and "other" in told
    assert "encoded" not in told, "no Saccade server"
    assert "57 a seen image" in told
