"""The architectures that are found in the families' folders, for parametrised tests."""

from __future__ import annotations

from tests.fixtures.tiny import tinies
from tests.helpers.breadth import broad

OFTEN = tuple(name for name, tiny in tinies().items() if tiny.often)
SEEING = tuple(
    sorted((name for name, tiny in tinies().items() if tiny.sees), key=lambda n: n not in OFTEN)
)
EVERY = tuple(broad(SEEING, keep=OFTEN))
"""All that see images. What differs in the slow ones has quick tests of its own, in
`families/test_contract.py`.
"""
