"""Run pytest, and what failed once more, alone: some tests need a moment of the machine, which the
others beside them may have had.

    python scripts/run_tests.py [arguments of pytest]

Exit status: pytest's; of the second run, where there is one. More than a few failures are no bad
luck, and neither is an error of collection or a process that crashed: no second run.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

MAX_FAILURES = 5
TESTS_FAILED = 1
"""pytest's exit status when all tests ran and some failed."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def run(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments]).returncode


def counted(report: Path) -> int:
    """Failures and errors, of which a test that crashed and passed in another process is one."""
    suite = ElementTree.parse(report).getroot()[0]
    return int(suite.attrib["failures"]) + int(suite.attrib["errors"])


def main(arguments: list[str]) -> int:
    LAST_FAILED.unlink(missing_ok=True)
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = run(*arguments, f"--junitxml={report}")
        if status != TESTS_FAILED or "-x" in arguments:  # which leaves others out
            return status
        count = counted(report)
    failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) == count <= MAX_FAILURES:
        return status
    print("\nonce more, alone:", *failed, sep="\n  ", flush=True)
    # By name alone: which tests a mark picks depends on those that are collected beside them.
    marks = arguments.index("-m") if "-m" in arguments else len(arguments)
    status = run(*arguments[:marks], *arguments[marks + 2 :], "-n", "0", *failed)
    if status == 0:
        print("\nFAILED BESIDE OTHERS, passed alone:", *failed, sep="\n  ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
