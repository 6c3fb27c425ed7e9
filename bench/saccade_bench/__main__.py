"""`python -m saccade_bench COMMAND`: the benchmark commands when the package is not installed and
only its sources are on `PYTHONPATH`. If it is installed, they are subcommands of `saccade`.
"""

from __future__ import annotations

import sys

from saccade.commands import app, run
from saccade_bench.cli import bench, evaluation, probe, proof
from saccade_bench.lab.cli import checkpoints, simulation

COMMANDS = (bench, probe, evaluation, proof, simulation, checkpoints)


def main() -> int:
    """Run the command line of `saccade`, with the benchmark commands added."""
    for command in COMMANDS:
        if command.name[0] in app:
            del app[command.name[0]]
        app.command(command)
    return run()


if __name__ == "__main__":
    sys.exit(main())
