"""Costs fitted to a measured run: the simulation itself is the model, its constants are the
unknowns.

Least squares on the logarithms of every call's TTFT and TPOT, by Gauss-Newton. Constants that a run
cannot tell apart (one image of one size a round: are its milliseconds of decoding or of encoding?)
stay near the profile's own ratios, as moving a constant costs too. So fit to a run with images and
texts of many sizes, and check against a second run. Owns the fit only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade_bench.lab.costs import Costs, Machine
from saccade_bench.lab.stepwise import Stepwise
from saccade_bench.lab.trace import RequestTrace

FITTED = (
    "request",
    "seen",
    "decode",
    "resize",
    "step",
    "token",
    "pair",
    "row",
    "context",
    "encode",
    "patch",
    "patch_pair",
)
INERTIA = 0.03
"""What it costs to move a constant by a factor of e, beside the mean squared error of the times'
logarithms.
"""
TURNS = 8
STEP = 0.02
FURTHEST = 1.0  # of one turn, in logarithms

Vector = npt.NDArray[np.float64]


def calibrate(
    trace: RequestTrace, machine: Machine, costs: Costs, names: Sequence[str] = ("",)
) -> Costs:
    """Costs that bring the simulation nearest to measurements on servers of these `names`, behind a
    router with affinity if there are several.
    """
    fitted = [name for name in FITTED if getattr(costs, name) > 0]
    origin = np.log([getattr(costs, name) for name in fitted])
    here, best, least = origin.copy(), origin, float("inf")
    for _ in range(TURNS):
        errors = _errors(trace, machine, _with(costs, fitted, here), names)
        loss = float(np.mean(errors**2)) + INERTIA * float(np.mean((here - origin) ** 2))
        if loss < least:
            best, least = here.copy(), loss
        slopes = np.empty((len(errors), len(fitted)))
        for index in range(len(fitted)):
            moved = here.copy()
            moved[index] += STEP
            there = _errors(trace, machine, _with(costs, fitted, moved), names)
            slopes[:, index] = (there - errors) / STEP
        pull = np.sqrt(INERTIA * len(errors) / len(fitted)) * np.eye(len(fitted))
        left, right = np.vstack([slopes, pull]), np.concatenate([errors, pull @ (here - origin)])
        here = here - np.clip(np.linalg.lstsq(left, right, rcond=None)[0], -FURTHEST, FURTHEST)
    return _with(costs, fitted, best)


def _with(costs: Costs, names: list[str], logs: Vector) -> Costs:
    values: dict[str, Any] = {
        name: float(np.exp(log)) for name, log in zip(names, logs, strict=True)
    }
    return replace(costs, **values)


def _errors(trace: RequestTrace, machine: Machine, costs: Costs, names: Sequence[str]) -> Vector:
    """log(simulated / measured) of every call's TTFT and TPOT, in the order of chats and rounds."""
    found = []
    for served in sorted(
        Stepwise(trace, machine, costs, names, "affinity").run().served,
        key=lambda served: (served.session, served.round),
    ):
        measured = trace.call(served.session, served.round).measured
        assert measured is not None
        found.append(np.log(served.ttft / measured.ttft))
        if served.tpot and measured.tpot:
            found.append(np.log(served.tpot / measured.tpot))
    return np.array(found)
