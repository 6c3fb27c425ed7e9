"""Start-up decides everything: no dial stays open, what cannot work is refused by the option's
name.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

from saccade import LLM
from saccade.commands import GROUPS, HEADINGS, SERVE_OPTIONS, app, check_spelling
from saccade.core.config import (
    GIB,
    MIB,
    EncoderConfig,
    EngineConfig,
    Hardware,
    KVConfig,
    ParallelConfig,
    StepGraphSizes,
)
from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.family import FamilySpec
from saccade.core.model_folder import DEMO
from saccade.core.options import (
    CacheOptions,
    ConnectionOptions,
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ServerOptions,
)
from saccade.core.settings import DiskFolder, ParallelSettings
from saccade.core.store import SHARED
from saccade.core.tuning import Tuning, tuning_values
from saccade.engine import ranks
from saccade.engine.memory_estimate import scoring_bytes, step_graph_bytes, workspace_bytes
from saccade.engine.ranks import resolve_parallel
from saccade.engine.schedulers import limits_of
from saccade.engine.sizing import VIT_GRAPH_SIZES, kv_page_bytes, resolve
from saccade.engine.startup_report import LoadInfo, describe
from saccade.families.checkpoint import Section
from saccade.families.registry import load_spec
from saccade.front.assemble import arena_bytes, describe_media_limits
from saccade.ipc.environment import engine_environment
from saccade.plugins.fetch.options import FetchOptions
from saccade.plugins.files.options import FileOptions
from saccade.plugins.tiers.options import TierOptions
from saccade_bench.lab.qwen import qwen
from tests.helpers.options import serve_options

MACHINE = Hardware("cpu", "2 threads", 24 * GIB, 20 * GIB)


@pytest.fixture(scope="module")
def spec() -> FamilySpec:
    return load_spec(Path(DEMO))


def decide(spec: FamilySpec, hardware: Hardware = MACHINE, **options: Any) -> EngineConfig:
    told = serve_options(**options)
    settings = told.engine_settings
    return resolve(told.model, told.engine, spec, "bfloat16", hardware, 1, told.caches, settings)


MAX_CORE_OPTIONS = 30
MAX_CORE_TUNING = 14


def test_the_core_has_few_options_and_plugins_the_others() -> None:
    core = [kind for name, kind, _ in GROUPS if name in HEADINGS]
    names = [field.name for kind in core for field in fields(kind)]
    tuning = tuning_values(core)
    assert len(names) - len(tuning) <= MAX_CORE_OPTIONS
    assert len(tuning) <= MAX_CORE_TUNING
    every = [field.name for kind in SERVE_OPTIONS for field in fields(kind)]
    assert len(every) == len({*every}) > len(names)


def test_nothing_is_left_open(spec: FamilySpec) -> None:
    config = decide(spec)
    assert all(getattr(config, field.name) is not None for field in fields(config))
    assert config.context_length == spec.context_length
    assert config.prefix_cache


def test_the_kv_cache_fits_the_share_of_memory_it_may_take(spec: FamilySpec) -> None:
    config = decide(spec, mem_fraction_static=0.2, max_running_requests=1000)
    page = kv_page_bytes(spec, config.page_size, "bfloat16")
    assert 0.2 * MACHINE.free_bytes - page < config.kv_pages * page <= 0.2 * MACHINE.free_bytes


def test_scores_of_a_prompt_find_memory_that_pages_do_not_take(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 8 * GIB, 4 * GIB)
    more = {"mem_fraction_static": 0.98, "max_running_requests": 1000}
    config = decide(spec, gpu, chunked_prefill_size=1 << 14, **more)
    kv = config.kv_pages * kv_page_bytes(spec, config.page_size, "bfloat16")
    assert gpu.free_bytes - kv >= scoring_bytes(spec, 1 << 14) > 0


def test_a_gpu_counts_what_the_weights_took(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 4 * GIB, 3 * GIB)
    config = decide(spec, gpu, mem_fraction_static=0.5, max_running_requests=1000)
    page = kv_page_bytes(spec, config.page_size, "bfloat16")
    assert 1 * GIB - page < config.kv_pages * page <= 1 * GIB


def test_the_kv_cache_is_no_larger_than_asked(spec: FamilySpec) -> None:
    config = decide(spec, max_total_tokens=1000, page_size=16)
    assert config.kv_tokens == 1008
    assert config.context_length == 1008, "a request cannot be longer than the cache"


def test_a_cache_of_eight_bits_holds_twice_the_tokens(spec: FamilySpec) -> None:
    more: dict[str, Any] = {"mem_fraction_static": 0.2, "max_running_requests": 1000}
    plain = decide(spec, **more)
    eight = decide(spec, kv_cache_dtype="fp8_e4m3", **more)
    assert eight.kv_pages - 2 * plain.kv_pages in (0, 1)
    kept = kv_page_bytes(spec, 16, "bfloat16", kept="fp8_e4m3")
    assert 2 * kept == kv_page_bytes(spec, 16, "bfloat16")
    facts = LoadInfo((), "", 0)
    alone = ParallelConfig(1, "weights", "shm", 1.0)
    for config, said in ((plain, "MiB"), (eight, "MiB in fp8_e4m3, scales 1.0")):
        assert dict(describe(config, alone, spec, MACHINE, facts))["KV cache"].endswith(said)


def test_a_gpu_without_fp8_cannot_keep_eight_bits(spec: FamilySpec) -> None:
    old = Hardware("cuda", "A100", 80 * GIB, 60 * GIB, arch=80)
    assert decide(spec, old).kv == KVConfig()
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3: A100 has no FP8 .* auto"):
        decide(spec, old, kv_cache_dtype="fp8_e4m3")


def test_a_context_may_be_shortened(spec: FamilySpec) -> None:
    assert decide(spec, context_length=512).context_length == 512


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"context_length": 10**9}, "--context-length"),
        (
            {"kv_cache_dir": "/tmp/saccade-none", "disable_radix_cache": True},
            "--kv-cache-dir /tmp/saccade-none: disable_radix_cache is set",
        ),
        ({"mm_attention_backend": "flash"}, "--tune mm_attention_backend=flash.*--device cuda"),
        ({"mm_attention_backend": "triton"}, "--tune mm_attention_backend=triton.*--device cuda"),
        ({"mm_attention_backend": "fa3"}, "--tune mm_attention_backend=fa3.*--device cuda"),
        ({"mm_attention_backend": "fa4"}, "--tune mm_attention_backend=fa4.*--device cuda"),
        ({"mm_attention_backend": "sdap"}, "=sdap: not available on cpu; use auto, sdpa"),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(
    spec: FamilySpec, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        decide(spec, **options)


@pytest.mark.parametrize(
    ("options", "field", "value", "allowed"),
    [
        (ModelOptions, "context_length", 0, "at least 1"),
        (EngineOptions, "page_size", 0, "at least 1"),
        (EngineOptions, "chunked_prefill_size", -4, "at least 1"),
        (EngineOptions, "max_running_requests", -1, "at least 1"),
        (EngineOptions, "max_encode_patches", 0, "at least 1"),
        (CacheOptions, "embedding_cache_device_mb", -1, "at least 0"),
        (EngineOptions, "mem_fraction_static", 0.0, "above 0"),
        (EngineOptions, "mem_fraction_static", 1.5, "at most 0.98"),
        (ParallelSettings, "tp_size", 0, "at least 1"),
        (MediaOptions, "media_workers", 0, "at least 1"),
        (MediaOptions, "decode_timeout", 0.0, "above 0"),
        (ServerOptions, "port", 65536, "at most 65535"),
        (ServerOptions, "max_body_mb", 0, "at least 1"),
        (ConnectionOptions, "shutdown_grace", -1.0, "at least 0"),
        (EngineOptions, "max_running_requests", 10**9, "at most 65536"),
        (ConnectionOptions, "max_connections", 1, "at least 16"),
        (ConnectionOptions, "header_timeout", 0.0, "above 0"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_name(
    options: type, field: str, value: float, allowed: str
) -> None:
    told = f"--{field.replace('_', '-')} {value}"
    if field in tuning_values([options]):
        told = f"--tune {field}={value}"
    with pytest.raises(ConfigError, match=rf"^{re.escape(told)}: must be {allowed}$"):
        options(**{field: value})


def test_the_command_line_takes_these_options_as_its_help_shows_them() -> None:
    line = (
        "serve demo --served-model-name a --served-model-name b --tune max_encode_patches=128 "
        "--tune all_reduce=gloo"
    )
    _, bound, _ = app.parse_args(line.split(), exit_on_error=False, print_error=False)
    assert bound.args == ("demo",)
    tuning = Tuning(bound.arguments["tune"], SERVE_OPTIONS)
    assert tuning.of(EngineOptions(threads=3)) == EngineOptions(threads=3, max_encode_patches=128)
    assert tuning.of(ParallelSettings()).all_reduce == "gloo"
    assert bound.arguments["options"].server.served_model_name == ("a", "b")
    with pytest.raises(CycloptsError, match='"auto", "int8", "int4", "none"'):
        app.parse_args(["serve", "--quantization", "x"], exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("page_siz=8", r"^--tune page_siz=8: expected NAME=VALUE; the names are .*\bpage_size\b"),
        ("page_size", "^--tune page_size: expected NAME=VALUE"),
        ("page_size=x", "^--tune page_size=x: Expected `int`"),
        ("all_reduce=mpi", "^--tune all_reduce=mpi: Invalid enum value 'mpi'"),
        ("port=1", "^--tune port=1: .*names are"),
        (
            "max_responses=9",
            "^--tune max_responses was removed: at most 10,000 responses are stored",
        ),
        (
            "vit_graph_buckets=128,256",
            "^--tune vit_graph_buckets was removed: graphs are captured for",
        ),
        (
            "encoder_timeout=3",
            "^--tune encoder_timeout was removed: .*--tune fetch_timeout=SECONDS",
        ),
    ],
)
def test_a_tuning_value_that_is_none_is_refused(told: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tuning((told,), SERVE_OPTIONS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--page-size 32", "--page-size is a tuning value now: --tune page_size=32"),
        ("--port 1 --arena-mb=9", "--arena-mb is a tuning value now: --tune arena_mb=9"),
        ("--step-timeout --port 1", "now: --tune step_timeout=VALUE"),
        ("--disable-vit-graph", "--disable-vit-graph was removed: use --tune vit_graphs=false"),
        ("--encoders-file x", "--encoders-file was removed: use --encoders FILE"),
        ("--gguf-file=Q8_0", "--gguf-file was removed: put the file after the model"),
        ("--files-mb 8", "--files-mb was removed: use --files-dir FOLDER:SIZE"),
        ("--kv-cache-disk-mb 8", "--kv-cache-disk-mb was removed: use --kv-cache-dir FOLDER:SIZE"),
        ("--embedding-cache-disk-mb=8", "was removed: use --embedding-cache-dir FOLDER:SIZE"),
        ("--allow-unproven", "--allow-unproven was removed: use --parity unproven"),
        ("--check-parity", "--check-parity was removed: use --parity generate"),
        (
            "--speculative-tokens 3",
            "--speculative-tokens was removed: at most 7 draft tokens per step",
        ),
        ("--embedding-cache-shared d", "--embedding-cache-dir d --embedding-cache-shared"),
    ],
)
def test_an_option_of_an_earlier_version_is_told_how_it_is_said_now(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_spelling(line.split())


def test_python_is_told_how_an_earlier_option_is_said_now() -> None:
    with pytest.raises(
        ConfigError, match=r"^LLM has no option 'gguf_file': put the file after the model"
    ):
        LLM(gguf_file="Q8_0")
    with pytest.raises(ConfigError, match=r"^LLM has no option 'cuda_graph_max_bs': graphs are"):
        LLM(cuda_graph_max_bs=8)


def test_options_of_today_are_spelled_right() -> None:
    shared = ("--embedding-cache-dir", "d", "--embedding-cache-shared")
    check_spelling(("model", *shared, "--tune", "page_size=32", "--port", "1"))


def test_prompts_are_paced_on_a_gpu_unless_a_chunk_is_given(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 64 * GIB, 60 * GIB)
    assert decide(spec, gpu).prompt_pause == 0.025
    assert decide(spec, gpu, chunked_prefill_size=8192).prompt_pause == 0
    assert decide(spec).prompt_pause == 0, "on a CPU"


def test_serve_has_few_options() -> None:
    every = sum(len(fields(kind)) for kind in SERVE_OPTIONS) - len(tuning_values(SERVE_OPTIONS))
    assert every + len(("--tune",)) <= 62
    assert (
        len(tuning_values(SERVE_OPTIONS)) <= 33
    )  # four are for benchmarks alone, and early_decode until a GPU has run it


WHOLE = tuple(size for size in VIT_GRAPH_SIZES if size <= 2048)
"""Larger packs run in parts."""


def test_a_gpu_that_torch_cannot_use_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = tmp_path / "nvidiactl"
    monkeypatch.setattr(ranks, "NVIDIA", control)
    assert ranks.pick_device("auto", 0, 1) == "cpu" and not caplog.records
    control.touch()
    assert ranks.pick_device("cpu", 0, 1) == "cpu" and not caplog.records
    assert ranks.pick_device("auto", 1, 1) == "cuda" and not caplog.records
    assert ranks.pick_device("auto", 0, 1) == "cpu"
    assert "torch cannot use it" in caplog.text


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu"])
def test_without_a_gpu_it_says_what_lacks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, build: str
) -> None:
    monkeypatch.setattr(ranks, "NVIDIA", tmp_path / "nvidiactl")
    monkeypatch.setattr(ranks, "version", {"torch": build}.get)
    if driver:
        (tmp_path / "nvidiactl").touch()
    with pytest.raises(ConfigError) as refused:
        ranks.pick_device("cuda", 0, 1)
    told = str(refused.value)
    assert ("no NVIDIA driver" in told) is not driver
    assert ("install a CUDA build" in told or "and a CUDA build" in told) is (
        driver or build.endswith("+cpu")
    )
    assert told.endswith("or use --device cpu")


def test_the_host_tier_is_bounded_unless_told(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 64 * GIB, 60 * GIB, 120 * GIB)
    assert decide(spec, gpu).embeddings.host_bytes == 8 * GIB
    assert decide(spec, replace(gpu, host_free_bytes=12 * GIB)).embeddings.host_bytes == 3 * GIB
    assert decide(spec, gpu, embedding_cache_host_mb=20_480).embeddings.host_bytes == 20 * GIB
    two = resolve(ModelOptions(), EngineOptions(), spec, "bfloat16", gpu, 2)
    assert two.embeddings.host_bytes == 4 * GIB, "of both ranks"


def test_the_tower_comes_in_parts_on_a_gpu_however_many_ranks(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 64 * GIB, 60 * GIB)
    one = decide(spec, gpu)
    assert 0 < one.tower_budget < decide(spec).tower_budget
    assert limits_of(decide(spec), spec, 1).tower_shares
    assert not limits_of(one, spec, 1).tower_shares
    two = resolve(ModelOptions(), EngineOptions(), spec, "bfloat16", gpu, 2)
    assert two.tower_budget == one.tower_budget


def test_workspaces_of_attention_by_other_packages_are_claimed(spec: FamilySpec) -> None:
    pytest.importorskip("triton")
    from saccade.plugins.gpu.libraries.flashinfer import WORKSPACE_BYTES

    gpu = Hardware("cuda", "", 3 * GIB, 3 * GIB, 60 * GIB)
    page = spec.kv_spec().token_bytes("bfloat16") * 16

    def left(attention: str) -> int:
        config = decide(
            spec, gpu, attention_backend=attention, page_size=16, disable_cuda_graph=True
        )
        return config.kv_pages * page + config.embeddings.device_bytes

    claimed = left("triton") - left("flashinfer")
    assert abs(claimed - workspace_bytes("flashinfer")) <= page
    assert claimed > WORKSPACE_BYTES


def test_the_vision_tower_runs_as_told(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 64 * GIB, 60 * GIB, 60 * GIB)
    derived = decide(spec, gpu)
    assert derived.encoder == EncoderConfig("flash", WHOLE) and derived.encode_patches == 16384
    assert decide(spec, gpu, disable_cuda_graph=True).encoder == EncoderConfig("flash")
    hopper = replace(gpu, arch=90)
    assert decide(spec, hopper).encoder == EncoderConfig("triton", WHOLE)
    assert decide(spec, replace(gpu, arch=80)).encoder == EncoderConfig("flash", WHOLE)
    with pytest.raises(ConfigError, match=r"mm_attention_backend=fa4: .*not installed"):
        decide(spec, hopper, mm_attention_backend="fa4")
    assert decide(spec, gpu, mm_attention_backend="sdpa").encoder == EncoderConfig("sdpa")
    assert decide(spec, disable_cuda_graph=True, max_encode_patches=64).encode_patches == 64


def test_the_language_model_has_graphs_on_a_gpu(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 64 * GIB, 60 * GIB, 60 * GIB)
    assert decide(spec).graphs == StepGraphSizes()
    assert decide(spec, gpu, max_running_requests=20).graphs.rows == (1, 2, 4, 8, 16, 20)
    assert decide(spec, gpu).graphs.rows[-3:] == (240, 248, 256)
    few = decide(spec, gpu, max_running_requests=3)
    assert few.graphs.rows == (1, 2, 3)
    none = decide(spec, gpu, disable_cuda_graph=True)
    assert none.graphs == StepGraphSizes()
    derived = decide(spec, gpu).graphs
    assert derived.mixed_rows == (0, 4, 16, 64, 256) and derived.mixed_tokens[-2:] == (3072, 4096)
    told = decide(spec, gpu, max_running_requests=5).graphs
    assert told.mixed_rows == (0, 4, 5) and told.mixed_tokens[-3:] == (2048, 3072, 4096)
    full = Hardware("cuda", "", 64 * GIB, 4 * GIB)
    fewer = decide(spec, full, mem_fraction_static=0.98).graphs.mixed_tokens
    assert 0 < len(fewer) < len(derived.mixed_tokens), "memory is short"
    short = decide(spec, gpu, chunked_prefill_size=100).graphs
    assert short.mixed_tokens == (32, 64, 100), "no step has more tokens of prompts"


def test_graphs_memory_is_not_given_to_pages(spec: FamilySpec) -> None:
    gpu = Hardware("cuda", "", 8 * GIB, 3 * GIB)
    config = decide(spec, gpu, mem_fraction_static=0.98, max_total_tokens=10**9)
    kv = config.kv_pages * kv_page_bytes(spec, config.page_size, "bfloat16")
    graphs = step_graph_bytes(config.graphs, spec, "bfloat16")
    assert graphs and gpu.free_bytes - kv >= graphs


def test_the_arena_holds_the_models_largest_picture(spec: FamilySpec) -> None:
    nbytes = 3 * qwen(spec).images.max_pixels
    least = -(-nbytes // MIB)
    assert arena_bytes(MediaOptions(arena_mb=least), spec) == least * MIB
    for few in (least - 1, 0, -1):
        with pytest.raises(
            ConfigError,
            match=rf"--tune arena_mb={few}: .* takes {nbytes / MIB:.1f} MiB .*; set it to {least} "
            r"or more",
        ):
            arena_bytes(MediaOptions(arena_mb=few), spec)


@pytest.mark.parametrize(
    ("given", "path", "nbytes"),
    [
        ("/a/b", "/a/b", None),
        ("/a/b:64MiB", "/a/b", 64 * MIB),
        ("a:2G", "a", 2 * GIB),
        ("a:1TiB", "a", 1024 * GIB),
        ("a:0M", "a", 0),
        (":8M", "", 8 * MIB),
        ("/a:1/b", "/a:1/b", None),
        ("/a:64/", "/a:64/", None),
        ("a:b", "a:b", None),
    ],
)
def test_a_folder_may_have_a_size(given: str, path: str, nbytes: int | None) -> None:
    assert DiskFolder.parse("--kv-cache-dir", given) == DiskFolder(path, nbytes)


@pytest.mark.parametrize(
    "size",
    [
        "64",
        "64MB",
        "64 GiB",
        pytest.param("9" * 5000 + "M", id="huge"),
        "1.5GiB",
        "-1GiB",
        "1,5G",
        "64gib",
        "1KiB",
    ],
)
@pytest.mark.parametrize("option", ["--embedding-cache-dir", "--kv-cache-dir", "--files-dir"])
def test_a_size_that_cannot_be_read_is_no_part_of_a_folders_name(
    option: str, size: str, tmp_path: Path
) -> None:
    kind: Any = FileOptions if option == "--files-dir" else TierOptions
    field = option.removeprefix("--").replace("-", "_")
    with pytest.raises(ConfigError, match=f"^{option} .*the size must be in MiB, GiB or TiB"):
        kind(**{field: f"{tmp_path}:{size}"})
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}:*"))


def test_space_on_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"^--embedding-cache-dir: set a directory$"):
        TierOptions(embedding_cache_dir=":5GiB")
    with pytest.raises(ConfigError, match=r"^--kv-cache-dir /kv:0GiB: raise its size"):
        TierOptions(kv_cache_dir="/kv:0GiB")
    with pytest.raises(ConfigError, match="requires --embedding-cache-dir"):
        TierOptions(embedding_cache_shared=True)


def test_uploaded_files_may_have_a_size_in_the_usual_folder() -> None:
    usual, small = FileOptions(), FileOptions(files_dir=":8MiB")
    assert small.folder == usual.folder
    assert (usual.nbytes, small.nbytes) == (4096 * MIB, 8 * MIB)


def test_start_up_says_what_it_decided(spec: FamilySpec, tmp_path: Path) -> None:
    config = decide(
        spec,
        max_encode_patches=1,
        max_running_requests=1,
        embedding_cache_dir=f"{tmp_path}:5MiB",
    )
    parallel = resolve_parallel(ParallelSettings(), spec, "cpu")
    facts = LoadInfo(("patch_embed=folded",), "6 matrices", 1)
    told = dict(describe(config, parallel, spec, MACHINE, facts))
    assert told["quantised"] == "6 matrices"
    assert "quantised" not in dict(
        describe(config, parallel, spec, MACHINE, replace(facts, quantised=""))
    )
    assert told["vision encoder"] == "sdpa attention, 1 patch per step"
    assert told["family options"] == "patch_embed=folded"
    assert told["batch"] == "1 request, 2048 tokens per step"
    for guesses, said in (
        ({"drafts": 7}, "up to 7 tokens"),
        ({"no_drafts_reason": "why"}, "off: why"),
    ):
        changed = replace(facts, **guesses)
        assert dict(describe(config, parallel, spec, MACHINE, changed))["speculation"] == said
    assert told["embedding cache"].endswith(f"5 MiB in {tmp_path} (1 image found there)")
    changed = replace(facts, prepared="kept from last start", pixels=64 * MIB)
    told = dict(describe(config, parallel, spec, MACHINE, changed))
    assert told["start-up"] == "kept from last start"
    caches = config.kv_tokens * kv_page_bytes(spec, 1, config.dtype) / MIB
    caches += config.embeddings.device_bytes / MIB
    assert told["memory"].startswith(f"grows by at most {caches + 64:.0f} MiB as the caches fill: ")
    assert told["memory"].endswith(" + 64 of pixels (--tune arena_mb)")
    assert describe_media_limits(MediaOptions(media_workers=2)) == (
        ("sent images", "178956970 pixels at most, decoded by 2 processes"),
    )


def test_the_folder_for_embeddings_is_a_folder(spec: FamilySpec, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"^--embedding-cache-dir .*/file is not a directory$"):
        decide(spec, embedding_cache_dir=str(file))
    with pytest.raises(ConfigError, match=r"^--embedding-cache-dir: set a directory$"):
        TierOptions(embedding_cache_dir="")


def test_what_is_saved_already_counts_to_the_space_that_a_quarter_is_taken_of(
    spec: FamilySpec, tmp_path: Path
) -> None:
    def budget(size: str = "") -> int:
        config = decide(spec, embedding_cache_dir=f"{tmp_path}{size}")
        return config.embeddings.disk_bytes

    (tmp_path / SHARED.marker).touch()
    for model in ("model", "0" * 32):  # the first is somebody else's
        (tmp_path / model).mkdir()
        (tmp_path / model / ("0" * 40 + ".safetensors")).write_bytes(bytes(64 * MIB))
    free = shutil.disk_usage(tmp_path).free  # others may write meanwhile
    assert abs(budget() - (free + 64 * MIB) // 4) < 8 * MIB
    assert budget(":5MiB") == 5 * MIB


def test_no_space_on_disk_is_no_tier_on_disk(spec: FamilySpec, tmp_path: Path) -> None:
    config = decide(spec, embedding_cache_dir=f"{tmp_path / 'new'}:0M")
    assert config.embeddings.folder is None and not (tmp_path / "new").exists()


def test_no_room_for_a_kv_cache_says_what_to_do(spec: FamilySpec) -> None:
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        decide(spec, Hardware("cuda", "", 24 * GIB, 3 * GIB))


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (ServerOptions, "api_key", ""),
        (ServerOptions, "served_model_name", ("demo", "")),
        (ServerOptions, "cors_origins", ("",)),
        (FetchOptions, "allowed_media_domains", ("",)),
        (FetchOptions, "allowed_local_media_path", ""),
        (FetchOptions, "allowed_local_media_path", "/not/there"),
        (FileOptions, "files_dir", ""),
        (FileOptions, "files_dir", __file__),
        (FileOptions, "files_dir", f"{__file__}/below"),
    ],
)
def test_what_an_unset_variable_or_a_wrong_path_leaves_is_refused(
    options: type, field: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"^--{field.replace('_', '-')}"):
        options(**{field: value})


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_API_KEY", "")
    with pytest.raises(ConfigError, match="SACCADE_API_KEY is empty"):
        _ = ServerOptions().key
    monkeypatch.setenv("SACCADE_API_KEY", "k")
    assert ServerOptions().key == "k"


def test_an_arena_beyond_memory_is_refused(spec: FamilySpec) -> None:
    with pytest.raises(ConfigError, match=r"^--tune arena_mb=1000000000: .* MiB of memory$"):
        arena_bytes(MediaOptions(arena_mb=10**9), spec)


def test_a_figure_of_a_checkpoint_has_a_limit() -> None:
    with pytest.raises(CheckpointError, match="vocab_size must be at most"):
        Section("config.json", {"vocab_size": 10**12}).integer("vocab_size")


def test_memory_of_a_gpu_grows_in_place_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert engine_environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert "PYTORCH_ALLOC_CONF" not in engine_environment()
