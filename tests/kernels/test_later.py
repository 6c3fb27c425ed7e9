"""Operations that few models ask for are imported when a layer first asks."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from saccade.kernels.reference.ops import Ops

module, name = "saccade.kernels.reference." + sys.argv[1], sys.argv[2]
before = module in sys.modules
first, second = getattr(Ops(), sys.argv[3]), getattr(Ops, sys.argv[3])
print(before, first is second is getattr(sys.modules[module], name))
"""


@pytest.mark.parametrize(
    ("module", "name", "operation"),
    [
        ("delta", "softplus", "softplus"),
        ("int8", "quantise_matrix", "quantise_int8"),
        ("fp8", "whole_linear", "few_fp8_linear"),
        ("moe", "route", "route"),
    ],
)
def test_an_operation_is_imported_when_first_asked_for(
    module: str, name: str, operation: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, module, name, operation]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
