"""Published results of these workloads, and the sizes with which they were measured."""

from __future__ import annotations

from dataclasses import dataclass

from saccade_bench.workloads.conversations import WorkloadSize


@dataclass(frozen=True)
class Published:
    """A published workload: its size, and a sentence with the results and their source."""

    size: WorkloadSize
    told: str


_CHAT = "SGLang 0.5.10.post2, Qwen3-VL-8B, one H200, 720p: "
PUBLISHED = {
    "window": Published(
        WorkloadSize(30, 8, (5,), (2400, 1080), 8000, 1024),
        "Dynamo docs, Qwen3.6-35B-A3B-FP8, one H100: vllm serve 0.719 req/s, mean TTFT 18,173 ms; "
        "with frontend decoding and embedding cache 0.933 req/s, 6,101 ms",
    ),
    "identical": Published(
        WorkloadSize(1, 2, (8,), (1280, 720), 256, 32),
        f"{_CHAT}836 to 865 ms TTFT, and 67 to 89 when sent again (SGLang#21899)",
    ),
    "same-images": Published(
        WorkloadSize(1, 2, (8,), (1280, 720), 256, 32),
        f"{_CHAT}337 ms TTFT, then 209 to 218, with 99.3 % of tokens cached (SGLang#21899)",
    ),
    "half-seen": Published(
        WorkloadSize(1, 2, (4,), (1280, 720), 256, 32),
        "SGLang, Qwen3-VL-8B, one H200, 4 seen and 4 new: 798 ms TTFT, then 619 to 647 (sgl-bench)",
    ),
    "growing-chat": Published(
        WorkloadSize(1, 8, (1,), (1280, 720), 256, 32),
        f"{_CHAT}TTFT of rounds 1 to 8: 111 179 232 294 355 412 478 512 ms, 57 a seen image; "
        "1440p: 248 a seen image (sgl-bench)",
    ),
    "trimming": Published(
        WorkloadSize(1, 30, (1,), (1280, 720), 0, 64),
        "hermes-agent#113517: 62 % of cache writes came from keeping the last 3 images",
    ),
}
