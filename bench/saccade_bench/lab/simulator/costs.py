"""Constants that determine the costs in a simulation, for a machine and a model, with sources.

All are estimates. `saccade simulate RESULT --check` reports their error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from saccade.core.config import GIB, EmbeddingBudgets, PageTierConfig
from saccade.core.decoders import convert, json_decoder
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.families.kit.native_images import ImageRules, smart_resize
from saccade.sched.limits import SchedulerLimits
from saccade_bench.lab.options import MachineOptions, ProfileName
from saccade_bench.lab.qwen import qwen

MIB = 1 << 20
NO_TIERS = PageTierConfig()


Positive = Annotated[float, Meta(gt=0)]
Cost = Annotated[float, Meta(ge=0)]


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs in milliseconds, unless stated otherwise.

    An Mpx is a million pixels, a GB/s a million bytes per ms.
    """

    # the front end
    request: Cost
    """Per request: HTTP, template, tokenization, and messages to the engine and back."""
    seen: Cost
    """Per Mpx of the file of every image sent, cached or not: base64 and digest."""
    decode: Cost
    """Per Mpx of the file, to decode it."""
    resize: Cost
    """Per Mpx of the resized image."""
    # the language model
    step: Cost
    """Per step, for the fixed part."""
    token: Cost
    """Per prompt token."""
    pair: Cost
    """Per pair of a prompt token and a token that it attends to."""
    row: Cost
    """Per output token, in addition to its step."""
    context: Cost
    """Per output token, for each token before it."""
    # the tower
    encode: Cost
    """Per call of the vision encoder."""
    patch: Cost
    """Per patch in the vision encoder."""
    patch_pair: Cost
    """Per pair of a patch and a patch of its image that it attends to."""
    # copies and image workers
    host_gbs: Positive
    """Speed of copies between device and host memory, in GB/s."""
    disk_gbs: Positive
    """Speed of reads from disk to host memory or to KV pages, in GB/s."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Number of image workers."""

    def encode_ms(self, patches: Iterable[int]) -> float:
        """Return the milliseconds to encode images in one call, by their numbers of patches."""
        sizes = list(patches)
        return (
            self.encode + sum(n * (self.patch + n * self.patch_pair) for n in sizes)
            if sizes
            else 0.0
        )

    def prefill_ms(self, start: int, length: int) -> float:
        """Return the ms for prompt tokens `[start, start + length)`, without the step cost."""
        return length * (self.token + (start + length / 2) * self.pair)

    def decode_ms(self, pixels: int, resized: int) -> float:
        """Return the ms to decode and resize one image."""
        return (pixels * self.decode + resized * self.resize) / 1e6


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica: the model's sizes, and the engine's capacities. `kv_bytes` and `embedding_bytes`
    are per token.
    """

    rules: ImageRules
    kv_bytes: int
    embedding_bytes: int
    kv_tokens: int
    page_size: int
    limits: SchedulerLimits
    budgets: EmbeddingBudgets
    pages: PageTierConfig = NO_TIERS
    arena_bytes: int = 256 * MIB
    prefix_cache: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of a KV page."""
        return self.page_size * self.kv_bytes

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing."""
        return smart_resize(height, width, self.rules)


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine with a model, and the source of its constants."""

    costs: Costs
    machine: Machine
    source: str


QWEN3_RULES = ImageRules(16, 2, 65536, 16777216, (0.5,) * 3, (0.5,) * 3)
DEMO_RULES = ImageRules(16, 2, 4096, 3686400, (0.5,) * 3, (0.5,) * 3)

H200 = Profile(
    Costs(
        request=3.0,  # assumed: a few ms of CPU work in the front end
        # `saccade bench media` at 1920x1080, a photograph as JPEG: CPU time on a core of decision
        # 009's small machine. The host of an H200 is assumed to be as fast.
        seen=0.15,
        decode=2.7,
        resize=2.4,  # including the transfer to the engine
        step=4.3,  # 16.4 GB of weights in bf16 at 80 % of 4.8 TB/s (NVIDIA's data sheet)
        # 15.2 GFLOP per token (7.6 G parameters without embeddings) at 55 % of 989 TFLOPS (same
        # source)
        token=0.028,
        # 590 kFLOP per pair (36 layers, 32 heads of 128, 4 per value) at half of that peak
        pair=1.2e-6,
        row=0.01,  # assumed: sampling and similar work
        context=3.8e-5,  # 147 kB of keys and values at 80 % of 4.8 TB/s
        # These three are an exact fit to the published 17 / 39 / 88 ms for 3520 / 8160 /
        # 14400 patches (github.com/sgl-project/sglang/pull/22038).
        encode=8.52,
        patch=1.402e-3,
        patch_pair=2.859e-7,
        host_gbs=50.0,  # PCIe 5.0 x16 has 63
        disk_gbs=3.0,  # one NVMe drive, assumed
        workers=8,  # half of the cores that are typical per GPU
    ),
    Machine(
        rules=QWEN3_RULES,
        kv_bytes=36
        * 2
        * 8
        * 128
        * 2,  # Qwen3-VL-8B: layers, keys and values, heads, head size, bf16
        embedding_bytes=4096 * 4 * 2,  # hidden size, three deepstack levels and the last, bf16
        kv_tokens=700_000,  # 0.85 of 141 GB less the weights
        page_size=16,
        limits=SchedulerLimits(256, 8192, 262144, 65536),
        budgets=EmbeddingBudgets(2 * GIB, 32 * GIB),
    ),
    "Qwen3-VL-8B on one H200: published figures (SGLang's pull request 22038) and the data sheet; "
    "not measured",
)

CPU = Profile(
    Costs(
        # Fitted to four chats of eight rounds on an otherwise idle machine. See decision 021.
        request=15.4,
        seen=0.15,
        decode=2.63,
        resize=2.35,
        step=1.37,
        token=0.0363,
        pair=2.86e-5,
        row=0.19,
        context=6.18e-4,
        encode=1.75,
        patch=9.81e-3,
        patch_pair=1.93e-5,
        host_gbs=5.0,  # assumed
        disk_gbs=1.0,  # assumed
    ),
    Machine(
        rules=DEMO_RULES,
        kv_bytes=4 * 2 * 2 * 64 * 2,
        embedding_bytes=192 * 3 * 2,
        kv_tokens=262_144,
        page_size=16,
        limits=SchedulerLimits(32, 2048, 32768, 16384),
        budgets=EmbeddingBudgets(GIB),
    ),
    "the demo model on two CPU cores",
)

PROFILES: dict[ProfileName, Profile] = {"cpu": CPU, "h200": H200}


def load_profile(options: MachineOptions, spec: FamilySpec | None) -> Profile:
    """Return the chosen profile with the user's overrides, and the sizes of `spec` if given.

    Raises ConfigError.
    """
    profile = PROFILES[options.profile]
    machine = profile.machine if spec is None else _of_model(profile.machine, spec)
    budgets = EmbeddingBudgets(
        machine.budgets.device_bytes
        if options.embedding_cache_device_mb is None
        else options.embedding_cache_device_mb * MIB,
        machine.budgets.host_bytes
        if options.embedding_cache_host_mb is None
        else options.embedding_cache_host_mb * MIB,
        options.embedding_cache_disk_mb * MIB,
    )
    limits = replace(
        machine.limits, chunk_tokens=options.chunked_prefill_size or machine.limits.chunk_tokens
    )
    machine = replace(
        machine,
        kv_tokens=options.kv_tokens or machine.kv_tokens,
        page_size=options.page_size,
        limits=limits,
        budgets=budgets,
        pages=PageTierConfig(
            disk_bytes=options.kv_cache_disk_mb * MIB, host_bytes=options.kv_cache_host_mb * MIB
        ),
        prefix_cache=not options.disable_radix_cache,
    )
    if options.constants is None:
        return replace(profile, machine=machine)
    costs = read_costs(options.constants, profile.costs)
    return Profile(costs, machine, f"{profile.source}; constants of {options.constants.name}")


def _of_model(machine: Machine, spec: FamilySpec) -> Machine:
    """Replace the sizes by the sizes of a checkpoint with 16-bit KV and embeddings."""
    return replace(
        machine,
        rules=qwen(spec).images,
        kv_bytes=spec.kv_spec().token_bytes("bfloat16"),
        embedding_bytes=spec.embedding_width * 2,
        limits=replace(machine.limits, context_length=spec.context_length),
    )


def read_costs(path: Path, known: Costs) -> Costs:
    """Override `known` by a JSON object. Raises ConfigError with the field's name."""
    try:
        values = json_decoder(dict[str, Any]).decode(path.read_bytes())
        costs: Costs = convert(msgspec.structs.asdict(known) | values, Costs)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--constants {path}: {error}") from None
    return costs
