"""Run pytest, and run failed tests again on their own, because some are sensitive to the load of
other tests.

    python scripts/run_tests.py [arguments of pytest]

The exit status is the last run's. If more than a few tests fail, or if collection fails or a
process crashes, this is not a matter of load, and tests are not run again.
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
    """Return the number of failures and errors in a report, including tests that crashed once."""
    suite = ElementTree.parse(report).getroot()[0]
    return int(suite.attrib["failures"]) + int(suite.attrib["errors"])


def main(arguments: list[str]) -> int:
    LAST_FAILED.unlink(missing_ok=True)
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = run(*arguments, f"--junitxml={report}")
        if status != TESTS_FAILED or "-x" in arguments:  # -x skips the remaining tests
            return status
        count = counted(report)
    failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) == count <= MAX_FAILURES:
        return status
    print("\nonce more, alone:", *failed, sep="\n  ", flush=True)
    # Without -m: some markers are added depending on which tests are collected.
    marks = arguments.index("-m") if "-m" in arguments else len(arguments)
    status = run(*arguments[:marks], *arguments[marks + 2 :], "-n", "0", *failed)
    if status == 0:
        print("\nFAILED BESIDE OTHERS, passed alone:", *failed, sep="\n  ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
