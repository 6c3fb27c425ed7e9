"""Checkpoints of a language model alone, and what is asked of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from saccade.nn.protocol import FamilyNet
from tests.families.forwarding import LOGITS, Session
from tests.fixtures.harness import Harness, set_threads

NEW_TOKENS = 24


def cut_out(whole: Path, folder: Path) -> Path:
    """Write the language model of a checkpoint as one of its own, as transformers saves it. The
    tensors of the tower stay in its file, which transformers passes over.
    """
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text((whole / name).read_text())
    config = json.loads((whole / "config.json").read_text())
    name = config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    text = config["text_config"] | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(text))
    tensors = {
        name.replace("model.language_model.", "model."): value
        for name, value in load_file(whole / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_text_alone(
    net: FamilyNet,
    logits: Callable[[Sequence[int]], torch.Tensor],
    generate: Callable[..., list[int]],
) -> None:
    """Compare logits; and answers of several prompts at once, preempted, in small chunks, without a
    prefix cache and with one: each twice.
    """
    set_threads()
    assert not net.spec.sees_images
    prompts = {str(size): list(range(20, 20 + size)) for size in (60, 21, 33)}
    session = Session(net, prompts["60"], [], page_size=16)
    torch.testing.assert_close(session.prefill(7), logits(session.tokens), **LOGITS)
    expected = {
        name: generate(tokens, max_new_tokens=NEW_TOKENS) for name, tokens in prompts.items()
    }
    tight = {"page_size": 2, "kv_pages": 1 + (60 + NEW_TOKENS) // 2 + 8}
    ways: list[dict[str, Any]] = [
        tight,
        {"chunk_tokens": 7, "page_size": 1, "kv_pages": 4096},
        {"chunk_tokens": 64, "prefix_cache": False},
        {},
    ]
    for way in ways:
        harness = Harness(net, **way)
        for _ in range(2):
            asked = [
                harness.request(name, tokens, max_tokens=NEW_TOKENS)
                for name, tokens in prompts.items()
            ]
            for name, outcome in harness.run(asked).items():
                assert outcome.tokens == expected[name], name
        assert (harness.scheduler.counts.preemptions > 0) == (way is tight)
