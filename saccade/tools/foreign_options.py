"""Options of vLLM, SGLang and llama.cpp that `saccade serve` accepts, for users of these servers.

An option with an equivalent is translated. An option that has no effect here is ignored with a
note. For all others, an error names the replacement. `docs/coming-from.md` has the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Foreign:
    """How to handle an option of another server. At most one of the first three fields is set."""

    ours: tuple[str, ...] = ()  # the equivalent arguments, repeated for each value {}
    unneeded: str = ""  # why it is not needed
    instead: str = ""  # what to use if there is no equivalent
    takes: Literal["value", "values", "nothing"] = "value"
    read: Callable[[str], str] | None = None  # converts a value


def same(*ours: str) -> Foreign:
    return Foreign(ours)


def tune(setting: str) -> Foreign:
    return Foreign(("--tune", setting), takes="value" if "{}" in setting else "nothing")


def setting(why: str) -> Foreign:
    return Foreign(unneeded=why)


def flag(why: str) -> Foreign:
    return Foreign(unneeded=why, takes="nothing")


def instead(what: str) -> Foreign:
    return Foreign(instead=what)


def _image_limit(value: str) -> str:
    """Return the number of images in a value of vLLM's --limit-mm-per-prompt, which is JSON or
    image=8.
    """
    try:
        limits = json.loads(value) if value.startswith("{") else dict([value.split("=", 1)])
    except ValueError:
        limits = {}
    if (images := limits.get("image")) is None:
        raise ConfigError(
            f"--limit-mm-per-prompt {value}: only images can be limited, as in image=8"
        )
    return str(images["count"] if isinstance(images, dict) else images)


_TASKS = {"embedding": "embed", "generate": "auto", "score": "rank"}
_REPLICAS = instead(
    "a server for each replica, and `saccade route --workers URL` with their addresses"
)
_DRAFTS = instead("--speculative auto, always or off: drafts come from the text, without a model")
_TLS = instead("a reverse proxy for TLS, such as nginx")
_CONFIG = instead("an edited config.json in a copy of the model's folder")
_TOKENIZER = instead("a folder that holds the model and this tokenizer")
_LIBRARY = setting("structured output always uses llguidance")
_SEED = setting("each request has its own seed")
_CACHED = flag("usage always reports cached tokens")

OPTIONS: Mapping[str, Foreign] = {
    # vLLM and SGLang
    "--allowed-media-domains": Foreign(("--allowed-media-domains", "{}"), takes="values"),
    "--base-gpu-id": instead("CUDA_VISIBLE_DEVICES={} saccade serve MODEL"),
    "--block-size": tune("page_size={}"),
    "--cpu-offload-gb": instead("a smaller model in memory: --quantization int8, or --tp-size N"),
    "--cuda-graph-bs": Foreign(
        unneeded="graphs are captured for up to --max-running-requests sequences", takes="values"
    ),
    "--cuda-graph-max-bs": setting(
        "graphs are captured for up to --max-running-requests sequences"
    ),
    "--data-parallel-size": _REPLICAS,
    "--disable-custom-all-reduce": flag("all-reduce is chosen by --tune all_reduce=NAME"),
    "--disable-log-requests": flag("requests are not logged by default"),
    "--disable-log-stats": flag("statistics are at /metrics, not in the log"),
    "--disable-radix-cache": tune("disable_radix_cache=true"),
    "--disaggregation-mode": instead("--role encode and --role language, to split the encoder off"),
    "--download-dir": instead("HF_HUB_CACHE={} saccade serve MODEL"),
    "--dp": _REPLICAS,
    "--dp-size": _REPLICAS,
    "--enable-auto-tool-choice": flag("the format of tool calls is detected by default"),
    "--enable-cache-report": _CACHED,
    "--enable-chunked-prefill": flag("prefill is always chunked"),
    "--enable-expert-parallel": Foreign(instead="--ep-size N", takes="nothing"),
    "--enable-log-requests": tune("log_requests=true"),
    "--enable-lora": flag("adapters need no switch: --lora NAME=FOLDER"),
    "--enable-metrics": flag("/metrics is always on"),
    "--enable-mixed-chunk": flag("prefill and decode always share a step"),
    "--enable-multimodal": flag("images are always on"),
    "--enable-prefix-caching": flag("prefix caching is on by default"),
    "--enable-prompt-tokens-details": _CACHED,
    "--enable-torch-compile": flag("kernels are compiled and CUDA graphs captured by default"),
    "--enable-torch-symm-mem": tune("all_reduce=symm-mem"),
    "--enforce-eager": Foreign(("--disable-cuda-graph",), takes="nothing"),
    "--expert-parallel-size": same("--ep-size", "{}"),
    "--gpu-memory-utilization": same("--mem-fraction-static", "{}"),
    "--grammar-backend": _LIBRARY,
    "--guided-decoding-backend": _LIBRARY,
    "--hf-overrides": _CONFIG,
    "--is-embedding": Foreign(("--pooling", "embed"), takes="nothing"),
    "--json-model-override-args": _CONFIG,
    "--kv-events-config": instead(
        "--kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic with its values"
    ),
    "--limit-mm-per-prompt": Foreign(("--max-images-per-request", "{}"), read=_image_limit),
    "--load-format": tune("load_format={}"),
    "--log-level": setting("the log has warnings and decisions; see --tune log_requests=true"),
    "--log-requests": tune("log_requests=true"),
    "--lora-modules": Foreign(("--lora", "{}"), takes="values"),
    "--lora-paths": Foreign(("--lora", "{}"), takes="values"),
    "--max-loras": tune("max_loras={}"),
    "--max-loras-per-batch": tune("max_loras={}"),
    "--max-model-len": same("--context-length", "{}"),
    "--max-num-batched-tokens": same("--chunked-prefill-size", "{}"),
    "--max-num-seqs": same("--max-running-requests", "{}"),
    "--max-prefill-tokens": instead("--chunked-prefill-size {}, the tokens of one step"),
    "--mm-attention-backend": tune("mm_attention_backend={}"),
    "--mm-encoder-attn-backend": tune("mm_attention_backend={}"),
    "--mm-processor-cache-gb": instead(
        "--embedding-cache-device-mb MIB and --tune embedding_cache_host_mb=MIB"
    ),
    "--mm-processor-kwargs": instead("max_pixels or detail of the image in each request"),
    "--model": same("{}"),
    "--model-path": same("{}"),
    "--nnodes": instead("--tp-size N on one machine: a model cannot span machines"),
    "--no-enable-prefix-caching": tune("disable_radix_cache=true"),
    "--override-generation-config": instead("an edited generation_config.json"),
    "--page-size": tune("page_size={}"),
    "--piecewise-cuda-graph-compiler": setting("graphs of prefill need no compiler"),
    "--piecewise-cuda-graph-max-tokens": setting(
        "graphs are captured for up to 4096 prompt tokens"
    ),
    "--enable-piecewise-cuda-graph": flag("graphs of prefill are on by default"),
    "--pipeline-parallel-size": instead("--tp-size N"),
    "--pp-size": instead("--tp-size N"),
    "--random-seed": _SEED,
    "--root-path": instead("a reverse proxy that removes the prefix {}"),
    "--schedule-conservativeness": setting("admission follows the free KV cache"),
    "--schedule-policy": setting("cached prefixes are always looked up"),
    "--seed": _SEED,
    "--served-model-name": Foreign(("--served-model-name", "{}"), takes="values"),
    "--skip-server-warmup": flag("the server sends itself no warm-up request"),
    "--speculative-algorithm": _DRAFTS,
    "--speculative-config": _DRAFTS,
    "--speculative-draft-model-path": _DRAFTS,
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--stream-interval": setting("each token is sent when it is sampled"),
    "--structured-outputs-config": _LIBRARY,
    "--swap-space": instead("--tune kv_cache_host_mb=MIB"),
    "--task": Foreign(("--pooling", "{}"), read=lambda task: _TASKS.get(task, task)),
    "--tensor-parallel-size": same("--tp-size", "{}"),
    "--tokenizer": _TOKENIZER,
    "--tokenizer-mode": setting("the checkpoint's tokenizer is used"),
    "--tokenizer-path": _TOKENIZER,
    "--tool-call-parser": setting("the format of tool calls is detected; see --tool-parser"),
    "--tp": same("--tp-size", "{}"),
    "--trust-remote-code": flag("code in a checkpoint is never run"),
    "--uvicorn-log-level": setting("there is no access log; see --tune log_requests=true"),
    "--watchdog-timeout": tune("step_timeout={}"),
    "-tp": same("--tp-size", "{}"),
    # llama.cpp
    "--cont-batching": flag("batching is always continuous"),
    "--ctx-size": same("--context-length", "{}"),
    "--flash-attn": setting("attention is chosen by the hardware; see --attention-backend"),
    "--hf-repo": same("{}"),
    "--jinja": flag("the checkpoint's chat template is used by default"),
    "--n-gpu-layers": setting("the whole model is on one device; see --device"),
    "--parallel": same("--max-running-requests", "{}"),
    "-c": same("--context-length", "{}"),
    "-fa": setting("attention is chosen by the hardware; see --attention-backend"),
    "-hf": same("{}"),
    "-m": same("{}"),
    "-ngl": setting("the whole model is on one device; see --device"),
    "-np": same("--max-running-requests", "{}"),
    "-t": same("--threads", "{}"),
}

VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": {"bf16": "bfloat16", "float": "float32", "fp16": "float16", "half": "float16"},
    "--kv-cache-dtype": {"bf16": "auto", "bfloat16": "auto", "fp8": "fp8_e4m3"},
    "--quantization": dict.fromkeys(
        ("awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin"), "auto"
    ),
    "--reasoning-parser": dict.fromkeys(
        ("deepseek-r1", "deepseek_r1", "glm45", "qwen3", "qwen3-thinking", "step3"), "think"
    ),
}
"""Other servers' names for values of options that Saccade also has."""

ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_MM_FEATURE_CACHE_MB": "--tune arena_mb=MIB bounds decoded images",
    "SGLANG_MM_PRECOMPUTE_HASH": "images are always hashed before they are decoded",
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "pixels always travel through shared memory",
    "SGLANG_VIT_ENABLE_CUDA_GRAPH": "graphs are on for a GPU; --tune vit_graphs=false is without",
    "SGLANG_VLM_CACHE_SIZE_MB": "use --embedding-cache-device-mb MIB",
    "VLLM_API_KEY": "use SACCADE_API_KEY",
    "VLLM_ATTENTION_BACKEND": "use --attention-backend",
    "VLLM_CPU_KVCACHE_SPACE": "use --mem-fraction-static or --max-total-tokens",
    "VLLM_CPU_OMP_THREADS_BIND": "use --threads",
    "VLLM_MEDIA_LOADING_THREAD_COUNT": "use --media-workers",
}
"""Environment variables of other servers that Saccade does not read, with what to use instead."""


def translate(arguments: Sequence[str], note: Callable[[str], None]) -> list[str]:
    """Return arguments for `saccade serve`, in which options of other servers are translated.

    note: called with a line of text for each option that is ignored.

    Raises ConfigError for an option without an equivalent.
    """
    translated: list[str] = []
    for option, name, values in _grouped(arguments):
        if foreign := OPTIONS.get(name):
            count = {"nothing": 0, "value": 1, "values": len(values)}[foreign.takes]
            for value in values[:count] or [""]:
                translated += _ours(name, foreign, value, note)
            values = values[count:]
        elif names := VALUES.get(name):
            translated += [name, *(names.get(value, value) for value in values[:1])]
            values = values[1:]
        elif option:
            translated.append(option)
        translated += values
    return translated


def unread(environment: Mapping[str, str]) -> list[str]:
    """Return a line of text for each variable in `ENVIRONMENT` that is set."""
    return [
        f"{name} is not read: {instead}"
        for name, instead in ENVIRONMENT.items()
        if name in environment
    ]


def _grouped(arguments: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Split arguments into options with their values.

    Yields the argument as typed, the name of the option, and the arguments up to the next option.
    The first is "" for arguments before the first option, and for a value after "=".
    """
    groups: list[tuple[str, str, list[str]]] = [("", "", [])]
    words = iter(arguments)
    for word in words:
        if word == "--":
            groups.append((word, "", [*words]))
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if not word.startswith("-"):
            groups[-1][2].append(word)
        elif equals and (name in OPTIONS or name in VALUES):
            groups += [("", name, [value]), ("", "", [])]
        else:
            groups.append((word, name, []))
    yield from groups


def _ours(name: str, foreign: Foreign, value: str, note: Callable[[str], None]) -> Iterator[str]:
    if foreign.unneeded:
        note(f"{name} is not needed: {foreign.unneeded}")
        return
    if foreign.read is not None:
        value = foreign.read(value)
    if foreign.instead:
        raise ConfigError(f"{name}: use {foreign.instead.replace('{}', value or 'VALUE')}")
    if not value and foreign.takes != "nothing":
        raise ConfigError(f"{name} requires a value")
    yield from (each.replace("{}", value) for each in foreign.ours)
