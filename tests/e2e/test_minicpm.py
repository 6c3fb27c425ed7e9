"""MiniCPM-V 4.6 over HTTP: a server chooses how many tokens an image has; an image is the same
wherever it stands; a request may ask for fewer slices.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import torch
from tokenizers import Tokenizer

from saccade.families.registry import load_spec
from saccade.plugins.models.minicpm.spec import MiniCPMSpec
from saccade_bench.fixtures.server import Server, serving
from tests.e2e.test_serve import COUNTS, OPTIONS, ask, reference_text
from tests.e2e.ways import KEY
from tests.fixtures.families.minicpm import SCALE, SliceReference
from tests.fixtures.tiny import picture, reference
from tests.helpers.images import image_part, png_url, text_part, user
from tests.plugins.models.test_minicpm_video import Asked

pytestmark = pytest.mark.more
OPTION = "downsample_mode=4x"


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serving(checkpoint("minicpmv4_6"), tmp_path_factory.mktemp("log"), *OPTIONS) as server:
        yield server


def test_four_times_the_tokens_by_an_option(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Answers are those of a checkpoint whose files say so."""
    folder = checkpoint("minicpmv4_6")
    fine = shutil.copytree(folder, tmp_path / "fine")
    for file in ("config.json", "preprocessor_config.json"):
        data = json.loads((fine / file).read_text())
        (fine / file).write_text(json.dumps(data | {"downsample_mode": "4x"}))
    judge, spec = reference(fine), load_spec(folder, [OPTION])
    assert isinstance(spec, MiniCPMSpec)
    shown = [picture(*size, seed=seed) for seed, size in enumerate([(64, 90), (130, 77), (90, 40)])]
    first, second, third = map(image_part, shown)
    with serving(folder, tmp_path, *OPTIONS, "--family-option", OPTION) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        before = [server.metric(name) for name in COUNTS]
        for parts, of in (
            ((first, text_part("what?"), second), shown[:2]),
            ((third, second, text_part("which?"), first), [shown[2], shown[1], shown[0]]),
        ):
            chat = [user(*parts)]
            answer = ask(client, chat)
            assert answer.choices[0].message.content == reference_text(fine, judge, chat, of)
        # The second chat has two seen images at other places, and a new one.
        assert [server.metric(name) for name in COUNTS] == [each + 3 for each in before]


def test_a_request_may_ask_for_fewer_slices(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)

    def tokens(**bounds: int) -> int:
        url = {"url": png_url(picture(300, 300)), **bounds}
        chat = [user({"type": "image_url", "image_url": url}, text_part("what?"))]
        return int(ask(client, chat, max_tokens=1).usage.prompt_tokens)

    area = SCALE**2
    whole, four, one = tokens(), tokens(max_pixels=4 * area), tokens(max_pixels=area)
    # 2 x 3 slices of 4 x 2 tokens, 2 x 2 of 3 x 3: each between two marks, lines apart.
    assert one - whole == -(6 * (4 * 2 + 2) + 1)
    assert one - four == -(4 * (3 * 3 + 2) + 1)
    assert tokens(max_pixels=6 * area) == whole
    for bounds, words in (
        ({"max_pixels": 7 * area}, f"max_pixels is {7 * area}; this model supports {area} to"),
        ({"max_pixels": area - 1}, f"max_pixels is {area - 1}; this model supports {area} to"),
        ({"min_pixels": 2 * area, "max_pixels": area}, f"min_pixels is {2 * area}"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            tokens(**bounds)
    broken = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="video"):
        ask(client, [user(broken)])


def test_a_video_of_frames_is_answered_as_transformers_answers(
    checkpoint: Callable[..., Path], server: Server
) -> None:
    folder, size = checkpoint("minicpmv4_6"), (100, 130)
    spec, judge = load_spec(folder), reference(folder)
    assert isinstance(spec, MiniCPMSpec) and isinstance(judge, SliceReference)
    shown = [((60, 60)), (size, 3)]
    prompt = (
        "<|im_start|>user\n{}\n{}\nwhat?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    asked = Asked(spec, folder, prompt, shown)
    tokens = asked.prompt(judge)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        made = judge.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **asked.inputs(judge, ids),
            max_new_tokens=12,
            do_sample=False,
        )
    words = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
        made[0, len(tokens) :].tolist()
    )
    clip = {"type": "video", "video": [png_url(picture(*size, seed=seed)) for seed in (2, 3, 4)]}
    chat = [user(image_part(picture(60, 60, seed=1)), clip, text_part("what?"))]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    before = [server.metric(name) for name in COUNTS]
    for _ in range(2):
        answer = ask(client, chat, max_tokens=12)
        assert answer.usage.prompt_tokens == len(tokens)
        assert answer.choices[0].message.content == words
    assert [server.metric(name) for name in COUNTS] == [each + 4 for each in before]
