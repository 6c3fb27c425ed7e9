"""Finds the installed FlashAttention packages, and loads their functions on demand.

Detection does not import a package, since that would import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FA3_PACKAGES = ("flash_attn_interface", "sgl_kernel", "kernels")
"""Packages that provide FlashAttention-3, in order of preference: its own (the directory hopper of
flash-attention's repository), sglang-kernel's, and Hugging Face's `kernels`.
"""
FA3_INSTALL = (
    "python scripts/install.py kernels: it fetches a build once; sglang-kernel carries one, and so "
    "does the folder hopper of flash-attention's repository"
)
HUB_BUILD, HUB_VERSION = "kernels-community/flash-attn3", 1
"""The repository and version that `kernels` downloads from the Hugging Face Hub."""


def find_fa3() -> str | None:
    """Return the name of the package that provides FlashAttention-3, or `None` if none is
    installed.
    """
    for package in FA3_PACKAGES:
        if package == "sgl_kernel" and not _has_module(package, "flash_attn"):
            continue
        if find_spec(package) is not None:
            return package
    return None


@cache
def load_fa3(function: str) -> Callable[..., Any]:
    """Return the FlashAttention-3 function with this name, which has the same interface in all
    packages.

    Raises ImportError if the library is missing, and any exception from importing a broken package.
    """
    package = find_fa3()
    if package is None:
        raise ImportError(f"FlashAttention-3 is not installed: {FA3_INSTALL}")
    if package == "kernels":
        module = import_module(package).get_kernel(HUB_BUILD, version=HUB_VERSION)
    else:
        inner = {"sgl_kernel": "sgl_kernel.flash_attn"}.get(package, package)
        module = import_module(inner)
    found: Callable[..., Any] = vars(module)[function]
    return found


def has_fa4() -> bool:
    """Return True if FlashAttention-4 is installed."""
    return _has_module("flash_attn", "cute")


def _has_module(package: str, module: str) -> bool:
    found = find_spec(package)
    places = (found and found.submodule_search_locations) or ()
    inner = [Path(place) / module for place in places]
    return any(each.is_dir() or each.with_suffix(".py").is_file() for each in inner)
