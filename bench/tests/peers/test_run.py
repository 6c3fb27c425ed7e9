"""Tables that compare servers."""

from __future__ import annotations

from saccade_bench.peers.run import PeerResult, table


def test_a_row_has_median_least_and_most_and_says_how_far_ours_is_ahead() -> None:
    lines = table(
        [
            PeerResult("peer", "row", (2.0, 4.0), 1.5),
            PeerResult("peer", "row", (9.0,), 1.25),
            PeerResult("Saccade int8", "row", (2.0,), 0.5),
            PeerResult("peer", "load", (1.0,), 3.0),
            PeerResult("Saccade int8", "load", (1.5,), 2.0),
        ]
    )
    assert lines[0] == "| | peer | Saccade int8 | ours ahead |"
    assert lines[2] == "| row, ms/token | 4 (2 to 9) | 2 (2 to 2) | 2.00 |"
    assert lines[3] == "| load, 1/s | 1 (1 to 1) | 1.5 (1.5 to 1.5) | 1.50 |"
    assert "| row | 1.25 | 0.50 |" in lines


def test_a_server_that_answered_nothing_has_no_figure() -> None:
    lines = table([PeerResult("peer", "cold", (), 0.1), PeerResult("Saccade", "cold", (5.0,), 0.1)])
    assert "| cold, ms | - | 5 (5 to 5) | - |" in lines
