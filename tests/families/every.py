"""The architectures in turn, for parametrised tests."""

from __future__ import annotations

import pytest

from saccade_bench.fixtures.tiny import FAMILIES

QWEN = (
    *FAMILIES,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    ),
)
SLOW = ("internvl", "idefics3", "smolvlm", "gemma3", "gemma4", "minicpmv4_6")
EVERY = (
    *QWEN,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
)
"""For parametrised tests: what differs in the last ones has quick tests of its own
(`families/test_moe.py`, `engine/test_states.py`, `families/test_internvl.py`,
`families/test_smolvlm.py`, `families/test_gemma3.py`, `families/test_gemma4.py`,
`families/test_minicpm.py`).
"""
