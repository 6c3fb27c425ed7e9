"""What is sent to a machine with a GPU, word by word: the two commands, with what to carry and how
long each may take.

    python -m saccade_bench.gpu_check.plan --prepare    (once, with a network: fills .whl, 6 MB)
    python -m saccade_bench.gpu_check.plan              (prints the commands)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from saccade_bench.gpu_check.machine import COMMIT, ROOT
from saccade_bench.gpu_check.stages import COMMANDS, Command
from saccade_bench.gpu_check.wheels import download, names

CARRIED = ".whl"
"""Ignored by git, so it travels by its name."""
BEFORE = f"{CARRIED}/a.json"
"""Where the second command looks for the first one's summary.json."""
MOST_CHARACTERS = 2000


def line_of(command: Command) -> str:
    """The shell's line, to be run in the repository's root; $OUT is the folder that comes back."""
    after = f" --after {BEFORE}" if command.name != "a" else ""
    run = (
        f"python3 -u -m saccade_bench.gpu_check --command {command.name} --wheels {CARRIED}{after}"
    )
    return f'set -o pipefail; PYTHONPATH=.:bench {run} --out "$OUT" 2>&1 | tee "$OUT/command.txt"'


def plan() -> Iterator[str]:
    """For people, and for who sends it."""
    folder = ROOT / CARRIED
    wheels = sorted(folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in wheels) / 1e6
    lacking = len(names()) - len(wheels)
    yield f"Carry {CARRIED}: {len(wheels)} wheels, {size:.1f} MB."
    if lacking > 0 or not (folder / COMMIT).is_file():
        yield f"NOT READY: {lacking} wheels or {CARRIED}/{COMMIT} are not there: --prepare"
    for command in COMMANDS.values():
        stages = ", ".join(stage.name for stage in command.stages)
        yield ""
        yield f"{command.name.upper()}, at most {command.seconds:.0f} s: {stages}"
        yield line_of(command)
    yield ""
    yield f"Between them: copy A's summary.json to {BEFORE}: what failed is run again, first."
    yield "Afterwards: python -m saccade_bench.gpu_check.report PLACE --fill docs/speed.md"


def prepare(folder: Path) -> int:
    """The wheels, and which commit this is. The status of what failed."""
    folder.mkdir(exist_ok=True)
    (folder / Path(BEFORE).name).unlink(missing_ok=True)  # of another check
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    (folder / COMMIT).write_text(head.stdout)
    return download(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prepare", action="store_true", help="download what travels")
    args = parser.parse_args(arguments)
    if args.prepare and (status := prepare(ROOT / CARRIED)):
        return status
    print("\n".join(plan()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
