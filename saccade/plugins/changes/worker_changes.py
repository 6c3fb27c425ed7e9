"""Changes a worker's model between two steps, on all ranks or on none.

It keeps track of released memory, and of the checkpoint whose weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from saccade.core.plan import Change, Changed, Memory
from saccade.nn.family_model import without_weights
from saccade.plugins.changes.adapters import AdapterTable, open_table
from saccade.plugins.changes.agreement import UNDERSTOOD, agree
from saccade.plugins.changes.given_back import GivenBack, let_go
from saccade.plugins.changes.renewal import Renewal
from saccade.runtime.worker import Worker


class WorkerChanges:
    """Changes the model of one worker. Implements `runtime.changes.ModelChanges`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._like = worker.images.like
        states = [] if worker.states is None else [worker.states.lines]
        self._memory = GivenBack([*worker.caches, *states])
        source = worker.source
        self._renewal = Renewal(*source, worker.config, worker.everyone) if source else None

    @property
    def _adapters(self) -> AdapterTable | None:
        table = self._worker.adapters
        assert table is None or isinstance(table, AdapterTable)
        return table

    def make(self, change: Change) -> Changed:
        """Make the change on all ranks, or on none."""
        match change.kind:
            case "weights":
                made = self._renew(Path(change.folder))
            case "may sleep":
                return replace(self._sleep(change, trial=True), asleep=self._memory.asleep)
            case "sleep":
                made = self._sleep(change)
            case "wake":
                made = self._wake(change.memory)
            case _ if "weights" in self._memory.asleep:
                made = Changed("the model is asleep: wake it first (POST /wake_up)")
            case _:
                made = self._adapt(change)
        if "adapter" not in change.kind:
            let_go(self._like)
        self._worker.record_again()
        return replace(made, asleep=self._memory.asleep)

    def _adapt(self, change: Change) -> Changed:
        table = self._adapters
        if table is None:
            table = open_table(self._worker.net, self._like, self._worker.everyone)
            self._worker.adapters = table
        return table.make(change)

    def _renew(self, folder: Path | None = None) -> Changed:
        """Load the weights in `folder`. By default, load the current checkpoint again."""
        if self._renewal is None:
            return Changed("this server's weights cannot be changed")
        if why := self._keeps_weights():
            return Changed(why)
        folder = folder or self._renewal.folder
        made = self._renewal.load_network(folder, self._worker.net, self._like)
        if made.net is None:
            return Changed(made.error)
        self._renewal = replace(self._renewal, folder=folder, digest=made.digest)
        self._worker.use(made.net)
        self._memory.take_back("weights")
        return Changed(tower=made.tower)

    def _keeps_weights(self) -> str:
        """Return the reason why the weights cannot be released or replaced, or "" if they can."""
        if self._renewal is None:
            return "this server's weights cannot be changed"
        graphs = self._worker.captures or self._worker.images.encoder.captures
        adapters = self._adapters is not None and not self._adapters.empty
        return self._renewal.refuses(graphs=graphs, adapters=adapters)

    def _sleep(self, change: Change, trial: bool = False) -> Changed:
        on_device = self._like.is_cuda
        memory = [
            each for each in change.memory if each == "kv_cache" or on_device or not change.lightly
        ]
        if "weights" in memory and (why := self._keeps_weights()):
            return Changed(why)
        if self._worker.captures:
            return Changed("CUDA graphs reference KV pages: start with --disable-cuda-graph")
        if trial:
            return Changed()
        if on_device:
            torch.cuda.synchronize()  # wait for copies that run in parallel with steps
        for each in memory:
            if each == "weights":
                self._worker.use(without_weights(self._worker.net.spec, self._worker.net.ops))
            self._memory.give_back(each)
        return Changed()

    def _wake(self, memory: Sequence[Memory]) -> Changed:
        made, wanted = Changed(), set(memory) & set(self._memory.asleep)
        if "weights" in wanted:
            made = self._renew()
        if made.error or "kv_cache" not in wanted:
            return made
        error = ""
        try:
            self._memory.take_back("kv_cache")
        except (RuntimeError, MemoryError) as refused:  # torch has no specific class on a CPU
            error = f"not enough memory for the KV cache: {str(refused)[:200]}"
        if not agree("" if error else UNDERSTOOD, self._like, self._worker.everyone):
            self._memory.give_back("kv_cache")
            error = error or "not enough memory for another rank's KV cache"
        return replace(made, error=error)
