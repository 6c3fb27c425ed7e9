"""Defines the command `saccade size`."""

from __future__ import annotations

from typing import Literal

from cyclopts import App

from saccade.core.config import Dtype, KVDtype, QuantizationMode, TowerQuantization

app = App(
    name="size",
    help_epilogue="""\
Examples:

* `saccade size Qwen/Qwen3-VL-8B-Instruct --memory 24GiB --device cuda`
* `saccade size ./model --quantization int8 --tokens 32768`
* `saccade size model.gguf --memory 8GiB --json`""",
)


@app.default
def size(
    model: str = "demo",
    /,
    *,
    memory: str | None = None,
    tokens: int | None = None,
    json: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", Dtype] = "auto",
    quantization: QuantizationMode = "auto",
    quantization_tower: TowerQuantization = "none",
    kv_cache_dtype: KVDtype = "auto",
    context_length: int | None = None,
    max_running_requests: int | None = None,
    max_total_tokens: int | None = None,
    mem_fraction_static: float | None = None,
    embedding_cache_device_mb: int | None = None,
    revision: str | None = None,
    mmproj: str | None = None,
) -> int:
    """Show the memory that a model's server takes, and the context that fits.

    Only the model's JSON files and the headers of its weights are read, and downloaded if the model
    is on the Hub. The exit status is 0 if the model fits, and 1 if not.

    Parameters
    ----------
    model:
        A directory, a Hub ID, a *.gguf file, or "demo", as for saccade serve.
    memory:
        The memory of the machine, or of the GPU, such as 24GiB. Default: this machine's.
    tokens:
        The total length of the prompt and answer of one request, which includes an image of
        2560x1440 pixels. Default: 8192, or the model's context if that is shorter.
    json:
        Print JSON. All sizes are in bytes.
    device:
        auto: cuda if this machine has a GPU. If it has none, cuda assumes an H100.
    dtype:
        As for saccade serve, like all options below.
    """
    from saccade.plugins.size.report import SizeInput, answer

    asked = SizeInput(
        model,
        memory,
        tokens,
        device,
        dtype,
        (quantization, quantization_tower, kv_cache_dtype),
        (context_length, max_running_requests, max_total_tokens),
        mem_fraction_static,
        embedding_cache_device_mb,
        revision,
        mmproj,
    )
    return answer(asked, as_json=json)
