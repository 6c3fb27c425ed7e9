"""A tiny checkpoint in both worlds, asked about videos of given frames. Shared by tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from saccade.core.types import Image, ImageKey, Request, SamplingParams
from saccade.core.video import FrameTimes, VideoRules, images_of
from saccade.families.registry import load_spec
from saccade.media.content import name_pixels
from saccade.nn.protocol import FamilyNet
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families import transformers_video as theirs
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import Reference, make_checkpoint, picture, reference

NEW_TOKENS = 12
SIZE = {"qwen2_vl": (56, 84), "qwen2_5_vl": (84, 140), "internvl": (56, 56)}
Frames = Sequence[int]
"""Seeds of frames: equal ones are equal frames."""


@dataclass(frozen=True)
class VideoModel:
    """One checkpoint in both worlds."""

    net: FamilyNet
    tokenizer: Tokenizer
    reference: Reference

    @property
    def rules(self) -> VideoRules:
        assert self.net.spec.video is not None
        return self.net.spec.video

    def pixels(self, seed: int) -> np.ndarray:
        return picture(*SIZE.get(self.net.spec.family, (64, 96)), seed=seed)

    def times(self, frames: Frames, fps: float) -> FrameTimes:
        return FrameTimes(tuple(range(len(frames))), fps, fps)

    def prompt(self, frames: Frames, fps: float) -> list[int]:
        text = self.rules.text(self.times(frames, fps))
        mark = self.rules.marks[0]
        around = "" if mark != "<|video_pad|>" else "<|vision_start|>"
        asked = f"look:{around}{text}{around and '<|vision_end|>'} how many?"
        return list(self.tokenizer.encode(asked).ids)

    def ask(
        self, harness: Harness, id: str, frames: Frames, fps: float = 2.0, upload: str = ""
    ) -> Request:
        """Of a video of these frames. upload: the same pixels under other names."""
        times, spec, shown = self.times(frames, fps), self.net.spec, []
        for places in images_of(times, self.rules.frames):
            seeds = [frames[place] for place in places]
            one = self.pixels(seeds[0])
            still = len(set(seeds)) == 1
            pixels = one if still else np.concatenate([self.pixels(seed) for seed in seeds])
            grid = self.grid(one, still)
            name = repr(seeds[:1] if still else seeds) + upload
            key = ImageKey(name.encode().ljust(32, b"\0"), bytes(16))
            harness.pixels[key] = pixels
            tokens, patches = spec.num_tokens(grid), spec.num_patches(grid)
            image = Image(key, grid, tokens, patches, (len(pixels), pixels.shape[1]))
            count = 1 if still else len(seeds)
            harness.pixel_names[key] = name_pixels(memoryview(pixels.tobytes()), image, count)
            shown.append(image)
        expanded, spans = spec.expand_prompt(
            self.prompt(frames, fps), shown, self.rules.steps(times)
        )
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        return Request(id, expanded, spans, tuple(shown), sampling)

    def grid(self, frame: np.ndarray, still: bool) -> tuple[int, ...]:
        if self.rules.frames == 1:
            return (1,)
        patch = self.reference.processor.patch_size
        return (1 if still else 2, frame.shape[0] // patch, frame.shape[1] // patch)

    def inputs(self, frames: Frames, fps: float) -> dict[str, Any]:
        """What transformers' model is told of a video, beside tokens."""
        even = [*frames, *[frames[-1]] * (-len(frames) % self.rules.frames)]
        pixels = [self.pixels(seed) for seed in even]
        if self.rules.frames == 1:
            return {"pixel_values": self.reference.values(pixels)}
        processor = self.reference.processor
        mean, std = (
            torch.tensor(values) * 255.0 for values in (processor.image_mean, processor.image_std)
        )
        normal = ((torch.from_numpy(np.stack(pixels)).float() - mean) / std).permute(0, 3, 1, 2)
        patch = processor.patch_size
        height, width = pixels[0].shape[:2]
        grid = [[len(even) // 2, height // patch, width // patch]]
        more = {}
        if self.net.spec.family == "qwen2_5_vl":
            more = {"second_per_grid_ts": torch.tensor([2 / fps])}
        values = theirs.patches(normal, patch, 2)
        return {"pixel_values_videos": values, "video_grid_thw": torch.tensor(grid), **more}

    @property
    def pads(self) -> tuple[int, ...]:
        config = self.reference.model.config
        return (config.image_token_id, *([config.video_token_id] if self.rules.frames > 1 else []))

    @torch.inference_mode()
    def answer(self, request: Request, frames: Frames, fps: float = 2.0) -> list[int]:
        """transformers' greedy answer, the whole sequence computed for each token. Text after a
        video of Qwen2-VL and Qwen2.5-VL stands where these were trained to have it, which
        transformers 5 does not.
        """
        inputs, spec = self.inputs(frames, fps), self.net.spec
        model, tokens = self.reference.model, list(request.tokens)
        blocks = [spec.image_positions(image.grid) for image in request.images]
        for _ in range(NEW_TOKENS):
            ids = torch.tensor([tokens])
            more: dict[str, Any] = {}
            if self.rules.frames == 2:
                more["mm_token_type_ids"] = 2 * (ids == model.config.video_token_id).int()
            if spec.family in ("qwen2_vl", "qwen2_5_vl"):
                positions, _ = spec.positions(tokens, request.spans, blocks)
                more["position_ids"] = torch.from_numpy(positions)[:, None]
            model.model.rope_deltas = None
            logits = model(input_ids=ids, **inputs, **more).logits[0, -1]
            tokens.append(int(logits.argmax()))
            if tokens[-1] in self.pads:
                break  # the reference would look for another image
        return tokens[len(request.tokens) :]


def load(family: str, folder: Path) -> VideoModel:
    make_checkpoint(folder, family)
    net = load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return VideoModel(net, tokenizer, reference(folder))
