"""Which frames of a video are looked at, at what size, and what the prompt says of them: as
transformers' processors, function by function, on random videos.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.types import Image, ImageKey, Span
from saccade.core.video import FrameTimes, VideoOptions, VideoRules
from saccade.families.registry import load_spec
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families import transformers_video as theirs
from tests.fixtures.tiny import picture

VIDEO_FAMILIES: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TIMES = (200, pytest.param(1000, marks=pytest.mark.slow))
POSITIONS = (20, pytest.param(1000, marks=pytest.mark.slow))
"""The model's own take a millisecond or more each."""


def rules_of(folder: Path) -> VideoRules:
    rules = load_spec(folder).video
    assert rules is not None
    return rules


@pytest.fixture(params=(*VIDEO_FAMILIES, "internvl"))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("times", TIMES)
def test_frames_are_sampled_as_transformers_samples_them(
    family: str, checkpoint: Callable[..., Path], times: int
) -> None:
    rules, rng, compared = rules_of(checkpoint(family)), random.Random(0), 0
    while compared < times:
        total, fps = rng.randint(4, 3000), rng.choice([1, 12.5, 23.976, 24, 25, 29.97, 30, 60])
        asked: dict[str, float] = {"fps": rng.choice([0.5, 1, 2, 2.5, 4, 241, 9999])}
        if rng.random() < 0.3:
            asked = {"num_frames": rng.randint(2, min(total, 700))}
        try:
            wanted = theirs.sample(family, total, fps, **asked)
        except (ValueError, RuntimeError, ZeroDivisionError):
            continue  # too short, or more than there are
        if not wanted or len(wanted) > 768:
            continue
        found = rules.sample(total, fps, VideoOptions(**asked))  # type: ignore[arg-type]
        # The reference may run one frame over the end of the video.
        assert list(found) == [index for index in wanted if index < total], (total, fps, asked)
        compared += 1


@pytest.mark.parametrize("times", TIMES)
def test_frames_are_resized_as_transformers_resizes_them(
    checkpoint: Callable[..., Path], tmp_path: Path, times: int
) -> None:
    for name in VIDEO_FAMILIES:
        third, rng = name == "qwen3_vl", random.Random(1)
        factor = 32 if third else 28
        least, most = (4096, 25_165_824) if third else (128 * 28**2, 768 * 28**2)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file in checkpoint(name).iterdir():
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file)
        size = {"size": {"shortest_edge": least, "longest_edge": most}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(size))
        rules = rules_of(folder)
        for _ in range(times):
            count = rng.randint(1, 384) * 2
            height, width = (int(np.exp(rng.uniform(2.5, 8.5))) for _ in range(2))
            try:
                wanted = theirs.size(name, count, height, width, least, most, factor)
            except ValueError:
                with pytest.raises(ImageError):
                    rules.recipe(count, height, width, VideoOptions())
                continue
            assert rules.recipe(count, height, width, VideoOptions()).canvas == wanted


def test_without_a_configuration_a_frame_has_at_most_768_tokens(
    checkpoint: Callable[..., Path],
) -> None:
    for name in VIDEO_FAMILIES:
        factor = 32 if name == "qwen3_vl" else 28
        for count in (2, 30, 700):
            height, width = (
                rules_of(checkpoint(name)).recipe(count, 2160, 3840, VideoOptions()).canvas
            )
            assert height * width <= 768 * factor**2


def test_a_size_that_max_pixels_freezes_does_not_change_as_a_video_grows(
    checkpoint: Callable[..., Path],
) -> None:
    for name in VIDEO_FAMILIES:
        rules, frozen = rules_of(checkpoint(name)), VideoOptions(max_pixels=200_000)
        sizes = {rules.recipe(count, 720, 1280, frozen).canvas for count in range(2, 768, 7)}
        assert len(sizes) == 1


@pytest.mark.parametrize("times", TIMES)
def test_timestamps_are_written_as_transformers_writes_them(
    checkpoint: Callable[..., Path], times: int
) -> None:
    rules, rng = rules_of(checkpoint("qwen3_vl")), random.Random(2)
    for _ in range(times):
        fps = rng.choice([1, 12.5, 23.976, 24, 25, 29.97, 30])
        indices = sorted(rng.sample(range(5000), rng.randint(1, 60)))
        told = rules.text(FrameTimes(tuple(indices), fps, 2.0))
        assert told == theirs.timestamps(indices, fps)


@pytest.mark.parametrize("times", POSITIONS)
def test_positions_are_the_models(
    reference: Callable[..., object], checkpoint: Callable[..., Path], times: int
) -> None:
    """Within a video as transformers 5 has them; text goes on behind the largest, as transformers 4
    and vLLM have it, where pairs share their positions.
    """
    for name in VIDEO_FAMILIES:
        spec, rng = load_spec(checkpoint(name)), random.Random(3)
        assert spec.video is not None
        model = reference(name).model.model  # type: ignore[attr-defined]
        image, video = (getattr(model.config, f"{kind}_token_id") for kind in ("image", "video"))
        for _ in range(times):
            pairs, rate = rng.randint(1, 12), rng.choice([0.5, 1, 2, 3, 8, 24])
            h, w = (2 * rng.randint(1, 6) for _ in range(2))
            times_of = FrameTimes(tuple(range(2 * pairs)), rate, rate)
            third = name == "qwen3_vl"
            tokens = [1, 2, 3, *(([video, 5] if third else [video]) * pairs), 7, image, 8, 9]
            images = [Image(ImageKey(bytes(32), bytes(16)), (2, h, w), h * w // 4, h * w, (1, 1))]
            images = [*images * pairs, Image(images[0].key, (1, 4, 6), 6, 24, (1, 1))]
            steps = [*spec.video.steps(times_of), None]
            expanded, spans = spec.expand_prompt(tokens, images, steps)
            blocks = [spec.image_positions(each.grid) for each in images]
            found, following = spec.positions(expanded, spans, blocks)
            ids = torch.tensor([expanded])
            types = (ids == image).int() + 2 * (ids == video).int()
            more = {"second_per_grid_ts": torch.tensor([2 / rate])} if name == "qwen2_5_vl" else {}
            wanted, _ = model.get_rope_index(
                ids,
                types,
                image_grid_thw=torch.tensor([[1, 4, 6]]),
                video_grid_thw=torch.tensor([[pairs, h, w]]),
                **more,
            )
            wanted = wanted[:, 0].numpy()
            if not third:
                end = spans[pairs - 1].end
                behind = wanted[:, :end].max() + 1 - wanted[0, end]
                wanted[:, end:] += behind
            assert following == wanted[0, -1] + 1
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("times", POSITIONS)
@pytest.mark.first
@pytest.mark.parametrize("name", [*VIDEO_FAMILIES, "qwen3_vl_moe", "qwen3_5", "internvl"])
def test_prompts_have_the_tokens_and_positions_of_transformers(
    name: str,
    reference: Callable[..., object],
    checkpoint: Callable[..., Path],
    times: int,
) -> None:
    """From the frames of a file to the last token, with what the processor writes of them."""
    spec, rng, compared = load_spec(checkpoint(name)), random.Random(4), 0
    tokenizer = Tokenizer.from_file(str(checkpoint(name) / "tokenizer.json"))
    rules = rules_of(checkpoint(name))
    while compared < times:
        total, fps = rng.randint(4, 400), rng.choice([1, 12.5, 23.976, 24, 29.97, 30, 60])
        asked = {"num_frames": rng.randint(2, min(total, 24))}
        options = VideoOptions(max_pixels=rng.choice([12_544, 50_176]), **asked)
        height, width = rng.randint(56, 400), rng.randint(56, 400)
        try:
            wanted = theirs.sample(name, total, fps, **asked)
        except (ValueError, RuntimeError, ZeroDivisionError):
            continue
        indices = [index for index in wanted if index < total]
        found = FrameTimes(rules.sample(total, fps, options), fps, 2.0)
        recipe = rules.recipe(len(found.indices), height, width, options)
        grid = rules.grid(recipe)
        one = Image(ImageKey(bytes(32), bytes(16)), grid, spec.num_tokens(grid), 4, (1, 1))
        steps = rules.steps(found)
        text, around = rules.text(found), ("<|vision_start|>", "<|vision_end|>")
        if name in ("qwen2_vl", "qwen2_5_vl"):
            text = text.join(around)
        tokens, spans = spec.expand_prompt(
            tokenizer.encode(f"look: {text} how many?").ids, [one] * len(steps), steps
        )
        whole = (len(steps), *grid[1:]) if rules.frames == 2 else (len(steps),)
        told = theirs.prompt(name, indices, fps, whole)
        assert list(tokens) == tokenizer.encode(f"look: {told} how many?").ids
        if rules.frames == 2:
            check_positions(name, spec, reference(name), tokens, spans, whole)
        compared += 1


def check_positions(
    name: str,
    spec: FamilySpec,
    model: Any,
    tokens: Sequence[int],
    spans: Sequence[Span],
    grid: tuple[int, ...],
) -> None:
    """As of the model, but for text behind a video where pairs share their positions (above)."""
    blocks = [spec.image_positions((2, *grid[1:])) for _ in spans]
    found, _ = spec.positions(tokens, spans, blocks)
    inner, ids = model.model.model, torch.tensor([tokens])
    types = 2 * (ids == inner.config.video_token_id).int()
    wanted, _ = inner.get_rope_index(
        ids,
        types,
        video_grid_thw=torch.tensor([grid]),
        **({"second_per_grid_ts": torch.tensor([1.0])} if name == "qwen2_5_vl" else {}),
    )
    wanted = wanted[:, 0].numpy()
    if name in ("qwen2_vl", "qwen2_5_vl"):
        end = spans[-1].end
        wanted[:, end:] += wanted[:, :end].max() + 1 - wanted[0, end]
    assert np.array_equal(found, wanted)


def test_more_frames_than_there_are_cannot_be_wanted(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequest, match="40 frames were requested, but the video has 12"):
        rules_of(checkpoint("qwen2_vl")).sample(12, 24, VideoOptions(num_frames=40))


@pytest.mark.parametrize("way", ["auto", "exact", "folded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pair_of_equal_frames_has_the_still_images_bits(
    checkpoint: Callable[..., Path], way: str, dtype: torch.dtype
) -> None:
    folder = checkpoint("qwen3_vl")
    spec = load_spec(folder, (f"patch_embed={way}",))
    net = load_net(spec, folder, dtype=dtype, device=torch.device("cpu"))
    frame = torch.from_numpy(picture(64, 96, seed=3))
    facts = [net.vision.grid_facts((count, 4, 6)) for count in (1, 2)]
    still = net.vision.embed(frame, facts[0])
    pair = net.vision.embed(torch.cat([frame, frame]), facts[1])
    assert torch.equal(still, pair)
    moved = net.vision.embed(torch.cat([frame, frame.flip(0)]), facts[1])
    assert not torch.equal(still, moved)
