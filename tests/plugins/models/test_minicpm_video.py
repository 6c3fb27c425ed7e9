"""MiniCPM-V's videos: frames are chosen, resized and written in the prompt as transformers does it,
and its greedy answers to them are ours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import MiniCPMV4_6Processor, MiniCPMV4_7Processor

from saccade.core.errors import ImageError, InvalidRequest
from saccade.core.types import Image, ImageKey, Request, SamplingParams
from saccade.core.video import FrameTimes, VideoOptions
from saccade.families.registry import load_spec
from saccade.media.content import encode_array
from saccade.media.formats.decode import decode_into
from saccade.plugins.models.minicpm.spec import MiniCPMSpec
from saccade.plugins.models.minicpm.video import VIDEO, FrameRules
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.lab.qwen import tell_grid
from tests.families.conftest import Changed
from tests.families.transformers_video import SLICES
from tests.fixtures.families.minicpm import IMAGE, TOKENS, SliceReference
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import picture, reference

SIBLINGS = ("minicpmv4_6", "minicpmv4_7")
PROCESSORS = {"minicpmv4_6": MiniCPMV4_6Processor, "minicpmv4_7": MiniCPMV4_7Processor}
FILE = "video_preprocessor_config.json"
NEW_TOKENS = 12
SIZES = ((60, 60), (100, 230), (20, 31), (300, 90))
"""With slices and without."""


@pytest.fixture(params=SIBLINGS)
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(request.param)


def read(folder: Path) -> tuple[MiniCPMSpec, FrameRules]:
    spec = load_spec(folder)
    assert isinstance(spec, MiniCPMSpec) and isinstance(spec.video, FrameRules)
    return spec, spec.video


def theirs(rules: FrameRules, **fields: Any) -> Any:
    """transformers' video processor, without torchvision. It resizes as torch does."""
    own: Any = object.__new__(SLICES.MiniCPMV4_6VideoProcessor)
    slices = rules.slices
    vars(own).update(
        max_num_frames=rules.max_frames,
        stack_frames=1,
        max_slice_nums=slices.most,
        scale_resolution=slices.scale,
        patch_size=slices.patch,
        **fields,
    )
    own.resize = lambda video, size, **_: torch.nn.functional.interpolate(
        video.flatten(0, 1),
        (size.height, size.width),
        mode="bicubic",
        antialias=True,
    ).unflatten(0, video.shape[:2])
    return own


def test_frames_are_chosen_as_transformers_chooses_them(folder: Path) -> None:
    _, rules = read(folder)
    assert rules.max_frames == 128
    chance = random.Random(0)
    for _ in range(300):
        total, fps = chance.randint(1, 9000), chance.choice([1, 12.5, 23.976, 24, 29.97, 60])
        most = chance.choice([128, 7, 1, 500])
        told = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
        wanted = theirs(rules).sample_frames(told, max_num_frames=most)
        if most > rules.max_frames:
            continue
        found = rules.sample(total, fps, VideoOptions(max_frames=most))
        assert list(found) == sorted({*wanted}), (total, fps, most)


def test_a_request_may_ask_for_other_frames(folder: Path) -> None:
    _, rules = read(folder)
    assert rules.sample(100, 10.0, VideoOptions(fps=2.0)) == tuple(range(0, 100, 5))
    # A rate far above the file's takes neither time nor memory.
    assert len(rules.sample(10**9, 10.0, VideoOptions(fps=1e4))) <= rules.max_frames
    assert rules.sample(100, 10.0, VideoOptions(num_frames=3)) == (0, 49, 99)
    with pytest.raises(InvalidRequest, match="40 frames were requested, but the video has 12"):
        rules.sample(12, 24, VideoOptions(num_frames=40))


@pytest.mark.parametrize("size", SIZES)
def test_a_frames_pixels_are_the_references(folder: Path, size: tuple[int, int]) -> None:
    spec, rules = read(folder)
    shown = picture(*size, seed=3)
    (made,), (grids,), _ = theirs(rules).resize_and_split_patches(
        torch.from_numpy(shown).permute(2, 0, 1)[None, None],
        resample=3,
        slice_mode=True,
        max_slice_nums=rules.slices.most,
        scale_resolution=rules.slices.scale,
        patch_size=rules.slices.patch,
    )
    canvas, grid = drawn(spec, size, 3)
    assert tuple(grids[0]) == (grid[2:4] or (0, 0))
    whole, *slices = (each[0].permute(1, 2, 0).numpy() for each in made)
    height, width = whole.shape[:2]
    assert np.array_equal(canvas[:height, :width], whole)
    for number, each in enumerate(slices):
        tall, wide = each.shape[:2]
        row, column = divmod(number, grid[3])
        cut = canvas[height + row * tall :, column * wide :][:tall, :wide]
        assert np.array_equal(cut, each)


def drawn(spec: MiniCPMSpec, size: tuple[int, int], seed: int) -> tuple[np.ndarray, Any]:
    """A frame's canvas, as an image worker makes it, and its grid."""
    assert spec.video is not None
    recipe = spec.video.recipe(4, *size, VideoOptions())
    canvas = np.empty((*recipe.canvas, 3), np.uint8)
    raw = memoryview(encode_array(picture(*size, seed=seed)))
    decode_into([(canvas, recipe)], raw, size, 1)
    return tell_grid(canvas, recipe.grid), recipe.grid


def test_bounds_of_a_frame_count_slices(folder: Path) -> None:
    _, rules = read(folder)
    area = rules.slices.scale**2
    grids = [
        rules.recipe(4, 300, 300, VideoOptions(**options)).grid[2:4]
        for options in ({}, {"max_pixels": 2 * area}, {"total_pixels": 8 * area})
    ]
    assert grids == [(2, 3), (2, 1), (2, 1)]
    with pytest.raises(ImageError, match=f"a frame of this model has {area} to"):
        rules.recipe(4, 300, 300, VideoOptions(max_pixels=area - 1))


class Asked:
    """A prompt of images and videos in both worlds."""

    def __init__(self, spec: MiniCPMSpec, folder: Path, text: str, shown: Sequence[Any]) -> None:
        """text: has a mark for each that is shown. shown: (size, how many frames), or a size."""
        self.spec, self.folder, self.text = spec, folder, text
        self.shown = shown
        self.seeds = count(1)
        self.images: list[np.ndarray] = []
        self.frames: list[np.ndarray] = []
        self.units: list[tuple[np.ndarray, Any]] = []
        self.times: list[int | None] = []
        self.texts: list[str] = []
        rules, videos = spec.video, count()
        assert rules is not None
        for each in shown:
            if isinstance(each[0], int):
                canvas, grid = self.still(each)
                self.images.append(canvas)
                self.units.append((canvas, grid))
                self.times.append(None)
                self.texts.append(IMAGE)
                continue
            size, frames = each
            times = FrameTimes(tuple(range(frames)), 1.0, 1.0)
            for _ in range(frames):
                canvas, grid = drawn(spec, size, next(self.seeds))
                self.frames.append(canvas)
                self.units.append((canvas, grid))
            self.times += rules.steps(times)
            self.texts.append(rules.begin(next(videos)) + rules.text(times))

    def still(self, size: tuple[int, int]) -> tuple[np.ndarray, Any]:
        recipe = self.spec.recipe(*size, self.spec.pixel_bounds)
        canvas = np.empty((*recipe.canvas, 3), np.uint8)
        raw = memoryview(encode_array(picture(*size, seed=next(self.seeds))))
        decode_into([(canvas, recipe)], raw, size, 1)
        return tell_grid(canvas, recipe.grid), recipe.grid

    def request(self, harness: Harness) -> Request:
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokens = tokenizer.encode(self.text.format(*self.texts)).ids
        images = []
        for number, (canvas, grid) in enumerate(self.units):
            key = ImageKey(str(number).encode().ljust(32, b"\0"), bytes(16))
            harness.pixels[key] = canvas
            size = (canvas.shape[0], canvas.shape[1])
            found = self.spec.num_tokens(grid), self.spec.num_patches(grid)
            images.append(Image(key, grid, *found, size))
        expanded, spans = self.spec.expand_prompt(tokens, images, self.times)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        return Request("x", expanded, spans, tuple(images), sampling)

    def prompt(self, made: SliceReference) -> list[int]:
        """The reference's processor's tokens."""
        own: Any = SimpleNamespace(slice_mode=True, video_slice_mode=True, **TOKENS)
        kind: Any = PROCESSORS[self.spec.family]
        own.video_token = VIDEO
        divisor = self.spec.images.merge**2
        told = self.replacements(made, own, kind, divisor)
        texts = [next(told[isinstance(each[0], int)]) for each in self.shown]
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        ids: list[int] = tokenizer.encode(self.text.format(*texts)).ids
        return ids

    def replacements(self, made: SliceReference, own: Any, kind: Any, divisor: int) -> Any:
        def sizes(canvases: Sequence[np.ndarray]) -> Any:
            return made.patches(canvases)[1].numpy() if canvases else np.zeros((0, 2), int)

        def grids(canvases: Sequence[np.ndarray]) -> np.ndarray:
            views = [next(g for c, g in self.units if c is each) for each in canvases]
            return np.array([grid[2:4] if len(grid) > 2 else (0, 0) for grid in views])

        stills = {
            "grids": grids(self.images),
            "num_patches_per_image": [len(made.views(each)) for each in self.images],
            "target_sizes": sizes(self.images),
        }
        clips = {
            "grids_videos": grids(self.frames),
            "num_frames_per_video": [
                each[1] for each in self.shown if not isinstance(each[0], int)
            ],
            "target_sizes_videos": sizes(self.frames),
        }
        images = [
            kind.replace_image_token(own, stills, k, image_token_divisor=divisor)
            for k in range(len(self.images))
        ]
        videos = [
            kind.replace_video_token(own, clips, k, video_token_divisor=divisor)
            for k in range(len(clips["num_frames_per_video"]))
        ]
        if images:
            images = kind._prepend_local_ids(own, [IMAGE * len(images)], images, IMAGE)
        if videos:
            videos = kind._prepend_local_ids(own, [VIDEO * len(videos)], videos, VIDEO)
        return {True: iter(images), False: iter(videos)}

    def inputs(self, made: SliceReference, ids: torch.Tensor) -> dict[str, Any]:
        """What transformers' model is told beside tokens."""
        found: dict[str, Any] = {}
        for name, canvases in (("", self.images), ("_videos", self.frames)):
            if canvases:
                values, sizes = made.patches(canvases)
                found |= {f"pixel_values{name}": values, f"target_sizes{name}": sizes}
        if made.types:
            marks = (made.token_id(IMAGE), made.token_id(VIDEO))
            found[made.types] = (ids == marks[0]).int() + 2 * (ids == marks[1]).int()
        return found


PROMPTS: dict[str, tuple[str, Sequence[Any]]] = {
    "a video": ("how many {}\nfox?", [((60, 60), 3)]),
    "of slices": ("{} lazy dog", [((100, 230), 2)]),
    "two, and images": (
        "look {}\nand {}\n{} quick {}?",
        [(60, 60), ((20, 31), 2), ((100, 230), 1), (300, 90)],
    ),
    "side by side": ("{}{}{} over", [((60, 60), 2), ((60, 60), 1), (20, 31)]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_to_videos_are_the_references(folder: Path, name: str) -> None:
    spec, _ = read(folder)
    made = reference(folder)
    assert isinstance(made, SliceReference)
    net = load_net(spec, folder, dtype=torch.float32, device=torch.device("cpu"))
    asked = Asked(spec, folder, *PROMPTS[name])
    harness = Harness(net, chunk_tokens=48)
    request = asked.request(harness)
    assert list(request.tokens) == asked.prompt(made)
    ids = torch.tensor([request.tokens])
    made.go_on()
    made.model.model.rope_deltas = None
    with torch.inference_mode():
        wanted = made.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **asked.inputs(made, ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0, len(request.tokens) :].tolist()
    for cached in (0, 1):
        outcome = harness.run([request])["x"]
        assert outcome.error is None and outcome.tokens == wanted
        assert (outcome.cached_tokens > 0) == cached
    assert len(harness.encoded) == len(asked.units)


def test_places_behind_a_video_are_found_after_its_frames(folder: Path) -> None:
    """As the end of a message, which cache control marks."""
    spec, _ = read(folder)
    net = load_net(spec, folder, dtype=torch.float32, device=torch.device("cpu"))
    asked = Asked(spec, folder, *PROMPTS["two, and images"])
    request = asked.request(Harness(net))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(
        asked.text.format(*asked.texts)
    )
    for at, token in enumerate(tokens.ids):
        if token in spec.placeholder.marks:
            continue
        place = spec.widened(at, request.spans, request.images)
        assert request.tokens[place] == token, at


@pytest.mark.parametrize(
    "fields",
    [
        {"stack_frames": 2},
        {"downsample_mode": "4x"},
        {"image_mean": [0.1, 0.2, 0.3]},
        {"max_slice_nums": 99},
        {"resample": 2},
    ],
    ids=str,
)
def test_frames_made_otherwise_than_images_are_not_served(
    changed: Changed, fields: dict[str, Any]
) -> None:
    folder = changed("minicpmv4_6", "preprocessor_config.json")
    (folder / FILE).write_text(json.dumps(fields))
    assert load_spec(folder).video is None


def test_the_video_processors_file_says_how_large_frames_are(changed: Changed) -> None:
    folder = changed("minicpmv4_6", "preprocessor_config.json", use_image_id=False)
    fields = {"max_slice_nums": 1, "scale_resolution": 32, "max_num_frames": 5}
    (folder / FILE).write_text(json.dumps(fields))
    _, rules = read(folder)
    assert rules.recipe(4, 300, 300, VideoOptions()).canvas == (32, 32)
    assert len(rules.sample(900, 30.0, VideoOptions())) == 5
    assert rules.begin(3) == ""
