"""`saccade serve` of GGUF files: the answers over HTTP are those of transformers with the weights
that the files hold, and start-up says what the files do not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from gguf import GGMLQuantizationType as Kind

from saccade_bench.fixtures.server import serving
from tests.e2e.test_serve import ask, reference_text
from tests.fixtures.gguf_files import write_files
from tests.fixtures.tiny import picture, reference
from tests.helpers.breadth import broad
from tests.helpers.images import image_part, text_part, user

pytestmark = pytest.mark.more


@pytest.mark.parametrize("family", broad(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), keep=["qwen3_vl"]))
def test_files_are_served_and_answer_as_transformers(
    family: str,
    gguf_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = write_files(gguf_checkpoint(family), tmp_path, Kind.Q8_0)
    judge = reference(files.rounded)
    a, b = picture(64, 90, seed=1), picture(130, 77, seed=2)
    named = ("--mmproj", str(files.mmproj), "--served-model-name", "tiny")
    exact = ("--dtype", "float32", "--quantization", "none")
    with serving(files.model, tmp_path, *named, *exact) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for messages, images in (
            ([user(text_part("how many red circles are thére?"))], []),
            ([user(image_part(a), text_part("what?"), image_part(b))], [a, b]),
        ):
            answer = ask(client, messages).choices[0].message.content
            assert answer == reference_text(files.rounded, judge, messages, images)
        assert "mmproj-model.gguf does not set" in server.log.read_text()
