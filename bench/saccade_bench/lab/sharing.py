"""The shared parts of simulated servers: a store of embeddings, or servers that encode for all.

Owns the arrival times of embeddings from either, and their counts. Times in ms. Knows nothing of
requests.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from saccade.cache.embeddings import EmbeddingCache, Worth
from saccade.core.types import ImageKey
from saccade.edge.rank import rank
from saccade_bench.lab.costs import Costs, Machine
from saccade_bench.lab.options import Sharing
from saccade_bench.lab.outcome import StepCounts
from saccade_bench.lab.trace import Shown


class SimulatedStore:
    """A folder of embeddings that all servers write and read; the least recently used go first.
    `twice`: embeddings computed by a server while another server's were on their way.
    """

    def __init__(self, budget: int, costs: Costs) -> None:
        self._budget = budget
        self._costs = costs
        self._files: OrderedDict[ImageKey, tuple[float, int]] = OrderedDict()
        self._used = 0
        self.twice = 0
        self.evictions = 0

    def whole(self, key: ImageKey, now: float) -> bool:
        """True if the embedding can be read now."""
        found = self._files.get(key)
        if found is None or found[0] > now:
            return False
        self._files.move_to_end(key)
        return True

    def put(self, key: ImageKey, nbytes: int, end: float) -> None:
        """A server has encoded the image, or will have, at `end`."""
        if key in self._files:
            self.twice += 1
            return
        self._files[key] = end + nbytes / self._costs.disk_gbs / 1e6, nbytes
        self._used += nbytes
        while self._used > self._budget:
            self._used -= self._files.popitem(last=False)[1][1]
            self.evictions += 1


class SimulatedEncoder:
    """A server of role encode: its cache, its image workers, one tower."""

    def __init__(self, machine: Machine, costs: Costs, worth: Worth) -> None:
        self.embeddings = EmbeddingCache(machine.budgets, machine.embedding_bytes, worth=worth)
        self.encoded = 0
        self.patches = 0
        self._costs = costs
        self._workers = [0.0] * costs.workers  # when each is free
        self._free = 0.0
        self._coming: dict[ImageKey, float] = {}

    def ask(self, shown: Shown, now: float) -> float:
        """The time at which an image's embedding is ready."""
        image, key, costs = shown.image, shown.image.key, self._costs
        place = self.embeddings.locate(key)
        self.embeddings.count_lookup(place)
        if place is None:
            decoded = max(now, self._workers[0]) + costs.decode_ms(shown.pixels, shown.resized)
            heapq.heapreplace(self._workers, decoded)
            end = max(self._free, decoded) + costs.step + costs.encode_ms([image.num_patches])
            self._free = self._coming[key] = end
            self.embeddings.admit(key, image.num_tokens)
            self.encoded += 1
            self.patches += image.num_patches
        elif place != "device":
            self.embeddings.to_device(key)
        self.embeddings.pin(key)
        self.embeddings.unpin(key)
        there = self._coming.get(key, now)
        if there <= now:
            self._coming.pop(key, None)
        return max(now, there)


class EncoderPool:
    """Servers of role encode. `rank` picks the server of an image."""

    def __init__(
        self, count: int, machine: Machine, costs: Costs, worth: Worth, network_gbs: float
    ) -> None:
        self.servers = {
            f"http://encoder-{number}:8000": SimulatedEncoder(machine, costs, worth)
            for number in range(count)
        }
        self.sent_bytes = 0
        self._names = tuple(self.servers)
        self._bytes = machine.embedding_bytes
        self._network_gbs = network_gbs

    def ask(self, shown: Shown, now: float) -> float:
        """The time at which an embedding reaches the server that asks now."""
        name = rank((shown.image.key.digest,), self._names, {})[0]
        nbytes = shown.image.num_tokens * self._bytes
        self.sent_bytes += nbytes
        return self.servers[name].ask(shown, now) + nbytes / self._network_gbs / 1e6


@dataclass(frozen=True, slots=True)
class Shared:
    """A store, encoders, or neither."""

    store: SimulatedStore | None = None
    encoders: EncoderPool | None = None

    @property
    def name(self) -> Sharing:
        return "store" if self.store else "encoders" if self.encoders else "none"

    @property
    def twice(self) -> int:
        """Images that two servers encoded at once."""
        return self.store.twice if self.store else 0

    def count(self, counts: StepCounts) -> None:
        """Add this object's counts."""
        for server in self.encoders.servers.values() if self.encoders else ():
            counts.images_encoded += server.encoded
            counts.images_decoded += server.encoded
            counts.patches_encoded += server.patches
        if self.encoders:
            counts.moved["encoders to servers"] = self.encoders.sent_bytes
