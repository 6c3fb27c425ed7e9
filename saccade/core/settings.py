"""Options that plugins define and that shared code also reads.

Each class has all options of one plugin, or the base class with those that other code reads. If the
plugin is not installed, the defaults are used. As in `core/options.py`, the string below a field is
its help.
"""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from saccade.core.config import AllReduce, KVDtype, QuantizationMode, Role, TowerQuantization
from saccade.core.errors import ConfigError
from saccade.core.given_paths import check_given
from saccade.core.private_folder import cache_folder
from saccade.core.tuning import above, at_least, basic, named, tuned

LogFormat = Literal["text", "json"]
Parity = Literal["auto", "unproven", "generate"]
Pooling = Literal["auto", "last", "embed", "rank", "none"]
Speculative = Literal["auto", "always", "off"]

_SIZED = re.compile(r"(.*):([-+]?\d[^/:]*)", re.DOTALL)
_SIZE = re.compile(r"(\d{1,12})(\w+)", re.ASCII)
_UNITS = {"M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30, "T": 1 << 40, "TiB": 1 << 40}


class SharedOptions:
    """Base class of plugin options that also affect shared code."""

    __slots__ = ()
    needs_server: ClassVar[bool] = False
    """False if `LLM` accepts these options, too."""

    def read_environment(self) -> Self:
        """Return a copy of the options, with unset values read from environment variables."""
        return self


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """A directory, and the maximum number of bytes to store there (None: the server chooses it)."""

    path: str
    nbytes: int | None = None

    @classmethod
    def parse(cls, option: str, given: str) -> Self:
        """Parse FOLDER or FOLDER:SIZE, such as /var/cache/images:64GiB. Raises ConfigError."""
        if (found := _SIZED.fullmatch(given)) is None:
            return cls(given)
        folder, text = found.groups()
        size = _SIZE.fullmatch(text)
        if size is None or size[2] not in _UNITS:
            raise ConfigError(
                f"{option} {given!r}: the size must be in MiB, GiB or TiB, as in {folder}:64GiB "
                f"(if this is the name of a directory, write {given}/)"
            )
        return cls(folder, int(size[1]) * _UNITS[size[2]])


# ---- the front end's


@dataclass(frozen=True, slots=True)
class CheckpointSettings(SharedOptions):
    """Options for models in GGUF files."""

    mmproj: str | None = None
    """The *.gguf file with the vision encoder of a language model in another *.gguf file. Default:
    the file with mmproj in its name in the same folder or repository.
    """


@dataclass(frozen=True, slots=True)
class ParitySettings(SharedOptions):
    """Whether answers must be verified against transformers."""

    parity: Parity = "auto"
    """How answers must be verified against transformers. auto: only serve architectures that tests
    compare. unproven: also serve others. generate: also compare a few answers with transformers'
    generate at start-up.
    """


@dataclass(frozen=True, slots=True)
class PoolingSettings(SharedOptions):
    """Options for embeddings and reranking."""

    pooling: Pooling = "auto"
    """How embeddings and ranks are computed. auto: by the checkpoint's files. embed, rank: even if
    the files do not define it. last: embed by the last state of a chat model, not calibrated. none:
    disable both.
    """


@dataclass(frozen=True, slots=True)
class AdapterSettings(SharedOptions):
    """Options for LoRA adapters, which requests can select by name."""

    lora: tuple[str, ...] = ()
    """A LoRA adapter in PEFT's format, NAME=FOLDER. Repeat the option for several. Requests
    select one by the field model. POST /v1/load_lora_adapter loads more.
    """
    max_loras: int = tuned(16, "Maximum loaded adapters. 0 disables loading.")

    def __post_init__(self) -> None:
        at_least(0, self, "max_loras")
        named(self, "lora")

    @property
    def folders(self) -> dict[str, str]:
        """Absolute paths of the adapters by name. Raises ConfigError."""
        found: dict[str, str] = {}
        for each in self.lora:
            name, sign, folder = each.partition("=")
            if not (sign and name and folder):
                raise ConfigError(f"--lora {each!r}: expected NAME=PATH")
            if name in found:
                raise ConfigError(f"--lora {each!r}: the name {name!r} is used twice")
            found[name] = str(Path(folder).absolute())
        return found


@dataclass(frozen=True, slots=True)
class FetchSettings(SharedOptions):
    """Timeouts for data that is fetched from other servers."""

    fetch_timeout: float = tuned(
        10.0,
        "Maximum seconds to fetch one image by URL, including redirects, or its embedding from an "
        "encoder. This server encodes what an encoder does not send in time.",
    )


@dataclass(frozen=True, slots=True)
class FileSettings(SharedOptions):
    """Where files uploaded with /v1/files are stored."""

    files_dir: str | None = None
    """Folder for files uploaded with /v1/files, as FOLDER, FOLDER:SIZE or :SIZE. Beyond the size,
    uploads are rejected. Default: saccade/files in the user's cache folder, and 4GiB.
    """

    @property
    def disk(self) -> DiskFolder:
        """The directory and its size limit. Raises ConfigError if the size is invalid."""
        return DiskFolder.parse("--files-dir", self.files_dir or "")

    @property
    def folder(self) -> Path:
        return Path(self.disk.path).expanduser() if self.disk.path else cache_folder("files")

    @property
    def nbytes(self) -> int:
        """Maximum total size of the files, in bytes."""
        nbytes = self.disk.nbytes
        return 4 << 30 if nbytes is None else nbytes


@dataclass(frozen=True, slots=True)
class LogSettings(SharedOptions):
    """The format of log lines."""

    log_format: LogFormat = "text"
    """Format of log lines on stderr. json: an object per line, with time, level, logger and
    message.
    """


@dataclass(frozen=True, slots=True)
class KeySettings(SharedOptions):
    """Options for several API keys, which are in a file."""

    needs_server: ClassVar[bool] = True
    api_keys_file: str | None = None
    """Require one of the keys in this file, which has a line name:key for each. The file is
    reloaded within a second of a change. Each key has its own files and cache.
    """
    share_cache: bool = False
    """Let several keys share cached images and prompts. Each key still has its own files."""

    def __post_init__(self) -> None:
        if self.api_keys_file is not None:
            check_given("--api-keys-file", self.api_keys_file)


@dataclass(frozen=True, slots=True)
class RoleSettings(SharedOptions):
    """Which part of the model this server runs, and the servers that run the rest."""

    role: Role = "all"
    """all: serve everything. encode: only encode images, for servers of role language, and load no
    language model. language: have images encoded by --encoders, or by this server if they fail.
    """
    encoders: tuple[str, ...] = ()
    """The servers of role encode, as http://HOST:PORT,..., or a file of such lines, which is
    reloaded while the server runs. Every server of role language must use the same list.
    """
    encoder_key: str | None = field(default=None, repr=False)
    """The encoders' --api-key. SACCADE_ENCODER_KEY has the same meaning and keeps the key out of
    process lists.
    """

    @property
    def files(self) -> tuple[str, ...]:
        """The entries of `encoders` that are paths of files with a list of encoders."""
        return tuple(each for each in self.encoders if "://" not in each)

    @property
    def file(self) -> Path | None:
        return Path(self.files[0]) if self.files else None

    @property
    def urls(self) -> tuple[str, ...]:
        given = (each for each in self.encoders if "://" in each)
        return tuple(part for each in given for part in each.split(",") if part)

    @property
    def key(self) -> str:
        """The API key that the encoders require, or "" if they require none."""
        return self.encoder_key or os.environ.get("SACCADE_ENCODER_KEY") or ""

    def read_environment(self) -> Self:
        return replace(self, encoder_key=self.key or None)


# ---- the engine's


@dataclass(frozen=True, slots=True)
class ParallelSettings(SharedOptions):
    """Options for splitting one model over several processes."""

    tp_size: int = basic(1)
    """Tensor parallelism: processes (on cuda: GPUs) that share one model."""
    ep_size: int = 1
    """Expert parallelism: processes that each hold complete experts, instead of a slice of every
    expert. One of --ep-size and --tp-size is a multiple of the other.
    """
    all_reduce: Literal["auto", AllReduce] = tuned(
        "auto",
        "How processes add up results: nccl or symm-mem on cuda, shm or gloo on cpu. auto: nccl on "
        "cuda, shm on x86, else gloo.",
    )
    step_timeout: float | None = tuned(
        None, "Seconds until a step counts as stuck and the server exits (cuda 120, cpu 1200)."
    )

    def __post_init__(self) -> None:
        at_least(1, self, "tp_size", "ep_size")
        if max(self.tp_size, self.ep_size) % min(self.tp_size, self.ep_size):
            raise ConfigError(
                f"--ep-size {self.ep_size}: with --tp-size {self.tp_size}, one must be a multiple "
                "of the other"
            )
        above(0, self, "step_timeout")

    @property
    def ranks(self) -> int:
        """The number of worker processes."""
        return max(self.tp_size, self.ep_size)


@dataclass(frozen=True, slots=True)
class TierSettings(SharedOptions):
    """The sizes and directories of cache tiers for image embeddings and KV: host memory, disk, and
    a directory that servers share.
    """

    embedding_cache_host_mb: int | None = tuned(
        None,
        "MiB of host memory for image embeddings evicted from the device. Default: a quarter of "
        "free memory on cuda, at most 8192. On a cpu it is 0.",
    )
    embedding_cache_dir: str | None = basic(None)
    """Folder for image embeddings on disk, which survive a restart, as FOLDER or FOLDER:SIZE
    (/var/cache/images:64GiB). Default: embeddings stay in memory.
    """
    embedding_cache_shared: bool = False
    """Share --embedding-cache-dir with other servers of the same model, so that each image is
    encoded once for all of them. Set the same FOLDER:SIZE on each server.
    """
    kv_cache_dir: str | None = basic(None)
    """Folder for KV that is evicted from memory, or in memory at shutdown, as FOLDER or
    FOLDER:SIZE. It contains users' prompts in the form of KV (mode 0700). Default: KV stays in
    memory.
    """
    kv_cache_host_mb: int | None = tuned(
        None,
        "MiB of each rank's host memory for KV evicted from the device. Default: a tenth of free "
        "memory on a GPU. On a CPU it is 0, because KV is already in host memory.",
    )

    @property
    def embedding_disk(self) -> DiskFolder | None:
        """The directory for embeddings and its size limit, or None. Raises ConfigError if the size
        is invalid.
        """
        return _disk("--embedding-cache-dir", self.embedding_cache_dir)

    @property
    def kv_disk(self) -> DiskFolder | None:
        """The directory for KV and its size limit, or None. Raises ConfigError if the size is
        invalid.
        """
        return _disk("--kv-cache-dir", self.kv_cache_dir)


def _disk(option: str, given: str | None) -> DiskFolder | None:
    return None if given is None else DiskFolder.parse(option, given)


@dataclass(frozen=True, slots=True)
class DraftSettings(SharedOptions):
    """Options for speculative decoding."""

    speculative: Speculative = "auto"
    """Speculative decoding, with draft tokens from the prompt and from answers. auto: only if
    drafts cannot change answers. always: also if the last bits may differ, and for models with
    recurrent states (not on cuda).
    """


@dataclass(frozen=True, slots=True)
class CudaSettings(SharedOptions):
    """Options for CUDA graphs, and for attention in the vision encoder."""

    mm_attention_backend: str = tuned(
        "auto",
        "Attention in the vision encoder: triton, flash, fa3, fa4 (on cuda) or sdpa. auto "
        "chooses by the GPU's architecture.",
    )
    disable_cuda_graph: bool = False
    """Disable CUDA graphs, in the language model and in the vision encoder."""


@dataclass(frozen=True, slots=True)
class QuantizationSettings(SharedOptions):
    """How weights, keys and values are quantized."""

    quantization: QuantizationMode = basic("auto")
    """Bits of the language model's matrices. auto: the checkpoint's own bits if the device supports
    them. int8, int4 (on a cpu): quantize the matrices at load. none: keep everything in the data
    type of --dtype.
    """
    quantization_tower: TowerQuantization = "none"
    """Bits of the vision encoder's matrices (on a cpu). int8: quantize them at load and round
    activations to 8 bits. That takes half the bytes and costs a little accuracy.
    """

    kv_cache_dtype: KVDtype = "auto"
    """Data type of keys and values. auto: that of --dtype. fp8_e4m3: 8 bits, so twice as many
    tokens fit as with 16, for a little accuracy. On a cpu this is slower.
    """


@dataclass(frozen=True, slots=True)
class SwitchSettings(SharedOptions):
    """Optimizations that benchmarks can disable to measure their effect."""

    position_cache: bool = tuned(
        True, "For benchmarks. false: compute positions anew for each image, not once per size."
    )
    vit_graphs: bool = tuned(
        True, "For benchmarks. false: run the vision encoder without CUDA graphs (on cuda)."
    )
    rotary_kernel: bool = tuned(
        True, "For benchmarks. false: rotate heads in the vision encoder with PyTorch's operations."
    )
    chunk_aware: bool = tuned(
        True,
        "For benchmarks. false: encode all images of a prompt before any part of it is computed, "
        "also those whose KV is cached.",
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All options of plugins that the engine reads."""

    parallel: ParallelSettings = ParallelSettings()
    tiers: TierSettings = TierSettings()
    drafts: DraftSettings = DraftSettings()
    cuda: CudaSettings = CudaSettings()
    quantization: QuantizationSettings = QuantizationSettings()
    switches: SwitchSettings = SwitchSettings()
