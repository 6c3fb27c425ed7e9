"""What the encoder of plans reports of the pictures it has encoded."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from lab.checkpoint import make_checkpoint
from saccade.core.arena import Arena
from saccade.core.config import EncoderConfig
from saccade.core.metrics import Metrics
from saccade.core.plan import Encode, PixelSlot
from saccade.core.types import ImageKey
from saccade.families.registry import load_spec
from saccade.parallel import WHOLE
from saccade.runtime.encoder import PackedEncoder
from saccade.runtime.positions import PositionCache
from saccade.runtime.vision import VisionEncoder
from saccade.runtime.weights import load_net

CPU = torch.device("cpu")


def test_the_end_it_tells_is_that_of_encoding_whatever_the_step_goes_on_to_do(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint("tiny-qwen3-vl", tmp_path)
    net = load_net(load_spec(folder), folder, dtype=torch.float32, device=CPU, progress=False)
    like, arena = torch.empty(0), Arena.create(1 << 20)
    encoder = PackedEncoder(
        net, PositionCache(net.spec, net.vision, Metrics()), EncoderConfig(), like
    )
    vision = VisionEncoder(net.spec, encoder, arena, like, WHOLE, "weights")
    side = 4 * net.spec.image_rules.factor
    offset = 0
    key = ImageKey(bytes(32), bytes(16))
    begun = time.monotonic()
    (encoded,) = vision.encode(
        [Encode(key, net.spec.grid(side, side), PixelSlot(offset, side, side))]
    )
    ended = time.monotonic()
    assert len(encoded.rows) == 16
    while time.monotonic() == ended:  # the step goes on
        pass
    ((name, ms, at),) = vision.finish()
    assert name == key and ms > 0 and begun <= at <= ended
    assert vision.finish() == ()
