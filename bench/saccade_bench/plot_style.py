"""Style of the benchmarks' plots: colours, sizes, PNG files. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import importlib
import io
from typing import Any

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install

COLOURS = ("#2f6fde", "#e4572e", "#2a9d6f", "#8f5bd0", "#c99a1b", "#4c5a67")
INK, MUTED, GRID = "#1d2733", "#5d6b7a", "#e3e8ee"


def figure(width: float = 7.2, height: float = 4.0, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure of a size in inches and its axes, without opening a display.

    Raises ConfigError if matplotlib is missing.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError(f"plots need matplotlib: {how_to_install('./bench')}") from None
    made = figures.Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    made.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    axes = made.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        dress(axis)
    return made, (axes[0] if columns == 1 else axes)


def dress(axis: Any) -> None:
    """Remove the box around the plot, and add a light horizontal grid."""
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(MUTED)
    axis.grid(axis="y", color=GRID, linewidth=1)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, labelsize=9, length=0)


def label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=10)
    axis.set_xlabel(x, fontsize=9, color=MUTED)
    axis.set_ylabel(y, fontsize=9, color=MUTED)


def legend(axis: Any, **where: Any) -> None:
    axis.legend(frameon=False, fontsize=9, labelcolor=INK, **where)


def png(made: Any) -> bytes:
    buffer = io.BytesIO()
    made.savefig(buffer, format="png")
    return buffer.getvalue()
