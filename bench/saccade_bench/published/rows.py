"""Published benchmark results of other servers, with the commands that measured them.

Commands are as published, except for paths and addresses. If a custom script was used, the command
here sends the same requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SGLANG = "python3 -m sglang.bench_serving --backend sglang-oai-chat --apply-chat-template "
CHAT = (
    "saccade bench serve --dataset-name multiturn-image --rounds 8 --num-prompts 1 "
    "--max-concurrency 1 --random-output-len 32 --image-resolution "
)
NEW_IMAGES = (
    "saccade bench serve --dataset-name image --random-input-len 100 --random-output-len 32 "
)
BEFORE, AFTER = "before", "after"
NO_IMAGE_CACHE = ("--embedding-cache-device-mb", "0", "--tune", "embedding_cache_host_mb=0")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A command and its published results.

    figures: results by metric (see `run.READERS`), then by publisher, or "before" and "after".
    off: options of `saccade serve` that disable the measured mechanism.
    data: the data set that the command needs, if any.
    """

    name: str
    source: str
    setting: str
    command: str
    figures: Mapping[str, Mapping[str, float]]
    off: tuple[str, ...] = ()
    data: str = ""

    def published(self, metric: str) -> str:
        """Return a metric's published results as text."""
        by = self.figures[metric]
        if BEFORE in by:
            return " -> ".join(f"{value:g}" for value in by.values())
        return ", ".join(f"{who} {value:g}" for who, value in by.items())


def _change(before: float, after: float) -> dict[str, float]:
    return {BEFORE: before, AFTER: after}


def _chat(size: str, *rounds: tuple[float, float]) -> PublishedRow:
    return PublishedRow(
        f"chat-{size}",
        "sglang#22038",
        "Qwen3-VL-8B, one H200",
        f"{CHAT}{size}",
        {
            f"TTFT of round {number} (ms)": _change(*pair)
            for number, pair in zip((2, 5, 8), rounds, strict=True)
        },
        ("--tune", "chunk_aware=false", *NO_IMAGE_CACHE),
    )


def _probe(size: str, most: tuple[int, int], count: int, ttft: tuple[float, float]) -> PublishedRow:
    return PublishedRow(
        f"probe-{size}",
        "sglang#22038",
        "Qwen3.5-27B, one H200",
        f"saccade probe --resolutions {size} --max-images 64 --timeout 120",
        {
            "images in one request": _change(*most),
            f"TTFT of {count} images (ms)": _change(*ttft),
        },
        ("--tune", "chunk_aware=false", *NO_IMAGE_CACHE),
    )


ROWS = (
    PublishedRow(
        "position-cache",
        "sglang#14292",
        "Qwen3-VL-8B, TP 2",
        f"{SGLANG}--dataset-name image --num-prompts 500 --random-output-len 1 "
        "--random-input-len 100 --image-resolution 1120x700 --image-format jpeg --image-count 1 "
        "--image-content random --random-range-ratio 1 --port 8188 --max-concurrency 20",
        {"requests (1/s)": _change(10.08, 10.21), "mean TTFT (ms)": _change(1951, 1927)},
        ("--tune", "position_cache=false"),
    ),
    PublishedRow(
        "vit-graphs",
        "sglang#15320",
        "Qwen3-VL-8B, 8 x H20, TP 4",
        f"{SGLANG}--dataset-name image --num-prompts 256 --random-input-len 128 "
        "--random-output-len 1 --image-resolution 560x560 --image-format jpeg --image-count 1 "
        "--image-content random --random-range-ratio 0.1 --port 30000 --max-concurrency 32",
        {"requests (1/s)": _change(22.6, 27.6), "mean TTFT (ms)": _change(1384.5, 1120.7)},
        ("--tune", "vit_graphs=false"),
    ),
    PublishedRow(
        "rotary-kernel",
        "sglang#10527",
        "Qwen2.5-VL-7B; vLLM 11,095",
        f"{SGLANG}--dataset-name mmmu --num-prompts 505 --random-output-len 1024 --port 30000",
        {"total tokens (1/s)": _change(10_242, 12_450)},
        ("--tune", "rotary_kernel=false"),
        "mmmu",
    ),
    PublishedRow(
        "hash-off-scheduler",
        "sglang#14354",
        "Qwen3-VL-4B-FP8",
        "vllm bench serve --port 30260 --backend openai-chat "
        "--model Qwen/Qwen3-VL-4B-Instruct-FP8 --trust-remote-code "
        "--percentile-metrics ttft,tpot,itl,e2el --num-prompts 1024 --dataset-name random-mm "
        "--random-mm-base-items-per-request 1 --random-mm-num-mm-items-range-ratio 0 "
        '--random-mm-limit-mm-per-prompt \'{"image":1,"video":0}\' '
        "--random-mm-bucket-config '{(720, 1280, 1): 1.0}' --random-prefix-len 500 "
        "--random-input-len 600 --random-output-len 230 --max-concurrency 128 "
        "--endpoint /v1/chat/completions",
        {"requests (1/s)": _change(5.80, 6.72), "mean TTFT (ms)": _change(9802, 7355)},
    ),
    _chat("720p", (230, 184), (436, 355), (685, 516)),
    _chat("1080p", (474, 392), (1062, 806), (1555, 1223)),
    _chat("1440p", (923, 686), (1933, 1460), (2993, 2172)),
    _probe("720p", (64, 64), 64, (15_500, 10_200)),
    _probe("1080p", (32, 64), 32, (21_500, 13_100)),
    _probe("1440p", (20, 51), 20, (29_300, 15_000)),
    *(
        PublishedRow(
            f"load-{size}",
            "sgl-bench",
            "Qwen3-VL-8B, one H200",
            f"{NEW_IMAGES}--image-resolution {size} --num-prompts 64 --max-concurrency 16",
            {"requests (1/s)": {"vLLM": vllm, "SGLang": sglang}},
        )
        for size, sglang, vllm in (("720p", 14.2, 15.8), ("1080p", 6.8, 7.1))
    ),
    *(
        PublishedRow(
            f"new-images-{size}-{count}",
            "sgl-bench",
            "Qwen3-VL-8B, one H200",
            f"{NEW_IMAGES}--image-resolution {size} --image-count {count} --num-prompts 3 "
            "--max-concurrency 1",
            {"mean TTFT (ms)": {"vLLM": vllm, "SGLang": sglang}},
        )
        for size, count, sglang, vllm in (
            ("720p", 1, 108, 109),
            ("720p", 8, 785, 938),
            ("720p", 64, 7289, 9132),
            ("1080p", 1, 244, 254),
            ("1080p", 8, 1945, 2389),
            ("1080p", 64, 23_166, 26_465),
        )
    ),
    PublishedRow(
        "accuracy-mmmu",
        "sglang#10527",
        "Qwen2.5-VL-7B",
        "saccade eval mmmu",
        {"score": _change(0.519, 0.516)},
        ("--tune", "rotary_kernel=false"),
        "mmmu",
    ),
    PublishedRow(
        "accuracy-ocrbench",
        "sglang#22038",
        "one H200",
        "saccade eval ocrbench --concurrency 10 --max-tokens 8192",
        {"score": _change(0.836, 0.845)},
        ("--tune", "chunk_aware=false", *NO_IMAGE_CACHE),
        "ocrbench",
    ),
)

QUICK_PROMPTS = 3
QUICK = {
    "--max-concurrency": "2",
    "--random-input-len": "16",
    "--random-prefix-len": "64",
    "--random-output-len": "4",
    "--image-resolution": "128x96",
    "--resolutions": "128x96",
    "--max-images": "3",
    "--image-count": "2",
    "--random-mm-bucket-config": "{(96, 128, 1): 1.0}",
    "--max-tokens": "8",
}
"""Replacements for option values, so that a CPU can run a command in seconds."""
