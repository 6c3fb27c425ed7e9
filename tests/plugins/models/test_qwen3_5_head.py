"""Qwen3.5's head that drafts: its guesses are those of the published head on transformers' layers,
and change no answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from saccade.core.errors import ConfigError
from saccade.core.plan import HeadDrafts, StepResult
from saccade.core.types import Delta
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.plugins.drafts.drafter import HEAD_TOKENS
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families.conftest import Changed
from tests.families.forwarding import pixels, prompt
from tests.fixtures.certain_head import make_certain
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import Reference, make_checkpoint, reference
from tests.helpers.processor import INT8

OPTION = ("mtp=on",)
ANSWER = 24


class PublishedHead(nn.Module):
    """As published with Qwen3.5, of transformers' modules: `states` [T, hidden] are normed."""

    def __init__(self, theirs: Reference) -> None:
        super().__init__()
        self.text = theirs.model.model.language_model
        self.out = theirs.model.lm_head
        config = self.text.config
        full = config.layer_types.index("full_attention")
        layer = Qwen3_5DecoderLayer(config, full)
        norm = [Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        self.layers = nn.ModuleList([layer])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        stored = load_file(theirs.folder / "model.safetensors")
        own = {k.removeprefix("mtp."): v for k, v in stored.items() if k.startswith("mtp.")}
        missing, unexpected = self.load_state_dict(own, strict=False)
        assert not unexpected and all(name.startswith(("text.", "out.")) for name in missing)

    @torch.no_grad()
    def guess(self, tokens: list[int], count: int) -> tuple[int, ...]:
        """The tokens after `tokens`, of which the last was drawn and not yet computed."""
        ids = torch.tensor([tokens])
        states = self.text(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        found: list[int] = []
        for _ in range(count):
            embedded = self.pre_fc_norm_embedding(self.text.embed_tokens(ids[:, 1:]))
            x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(states)), -1))
            length = x.shape[1]
            places = torch.arange(length).view(1, 1, -1).expand(3, 1, -1)
            turned = self.text.rotary_emb(x, places)
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            after = self.norm(self.layers[0](x, position_embeddings=turned, attention_mask=mask))
            token = int(self.out(after[0, -1]).argmax())
            found.append(token)
            ids = torch.cat((ids, torch.tensor([[token]])), 1)
            states = torch.cat((states, after[:, -1:]), 1)
        return tuple(found)


def load(folder: Path, *options: str, **dials: Any) -> FamilyNet:
    spec = load_spec(folder, options)
    given = {"dtype": torch.float32, "device": torch.device("cpu"), **dials}
    return load_net(spec, folder, **given)


def listen(harness: Harness) -> list[HeadDrafts]:
    """All guesses that the harness's head makes from now on."""
    heard: list[HeadDrafts] = []
    apply = harness.scheduler.apply

    def note(result: StepResult) -> list[Delta]:
        heard.extend(result.head_drafts)
        return apply(result)

    harness.scheduler.apply = note  # type: ignore[method-assign]
    return heard


@pytest.mark.parametrize("limits", [{}, {"chunk_tokens": 7}, {"page_size": 2}], ids=str)
def test_guesses_are_those_of_the_published_head(
    checkpoint: Callable[..., Path], limits: dict[str, Any]
) -> None:
    theirs = reference(checkpoint("qwen3_5"))
    harness = Harness(load(theirs.folder, *OPTION), drafts=3, **limits)
    heard = listen(harness)
    request = harness.request("a", prompt(theirs, 0), max_tokens=ANSWER)
    (outcome,) = harness.run([request]).values()
    published = PublishedHead(theirs)
    told = [*request.tokens, *outcome.tokens]
    longest = 0
    for guesses in heard:
        longest = max(longest, len(guesses.tokens))
        assert guesses.tokens == published.guess(told[: guesses.place], len(guesses.tokens))
    assert len(heard) >= 2 and longest > 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 3}, {"frequency_penalty": 0.5}], ids=str
)
@pytest.mark.parametrize("quantization", [None, INT8])
def test_answers_are_those_without_a_head(
    checkpoint: Callable[..., Path],
    sampling: dict[str, Any],
    depth: int,
    quantization: str | None,
) -> None:
    """With images, side by side, from prefixes in the cache."""
    theirs = reference(checkpoint("qwen3_5"))
    shown = pixels(theirs, 2)
    found, steps = [], []
    dials: dict[str, Any] = {"quantization": quantization} if quantization else {}
    for options, drafts in (((), 0), (OPTION, 3)):
        harness = Harness(load(theirs.folder, *options, **dials), drafts=drafts)
        images = [harness.image(each, str(at)) for at, each in enumerate(shown)]
        prompts = {"text": (prompt(theirs, 0), []), "images": (prompt(theirs, 2), images)}
        requests = [
            harness.request(f"{name}{turn}", *asked, max_tokens=ANSWER, **sampling)
            for turn in range(2)
            for name, asked in prompts.items()
        ]
        outcomes = {**harness.run(requests[:1], depth=depth)}
        outcomes |= harness.run(requests[1:], depth=depth)
        found.append({name: (each.tokens, each.finish) for name, each in outcomes.items()})
        steps.append(harness.scheduler.counts.steps)
    assert found[0] == found[1]
    assert harness.drafter.proposed["head"] > 0


def test_right_guesses_save_steps(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_5")
    net = load(make_certain(tmp_path), *OPTION)
    harness, plain = Harness(net, drafts=3), Harness(load(tmp_path))
    tokens = list(range(20, 30))
    heard = listen(harness)
    answers = []
    for each in (plain, harness):
        request = each.request("a", tokens, max_tokens=41, temperature=0.0)
        (outcome,) = each.run([request]).values()
        answers.append(outcome.tokens)
    assert answers[0] == answers[1]
    assert all(
        guesses.tokens == (*answers[1], *guesses.tokens)[at : at + len(guesses.tokens)]
        for guesses in heard
        if (at := guesses.place - len(tokens)) + len(guesses.tokens) <= 41
    )
    right = harness.drafter.accepted
    assert right["head"] + right["text"] >= 24
    assert 2 * harness.scheduler.counts.steps < plain.scheduler.counts.steps
    assert max(len(guesses.tokens) for guesses in heard) == HEAD_TOKENS


def test_a_head_is_loaded_only_if_asked_for(checkpoint: Callable[..., Path]) -> None:
    spec = load_spec(checkpoint("qwen3_5"))
    assert load(checkpoint("qwen3_5")).head is None
    asked = load_spec(checkpoint("qwen3_5"), OPTION)
    assert len(asked.kv_spec().layers) == len(spec.kv_spec().layers) + 1
    assert asked.kv_spec().drafts and not spec.kv_spec().drafts
    assert load_spec(checkpoint("qwen3_5"), ("mtp=off",)) == spec


def test_a_head_that_is_not_there_is_refused(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="mtp, which is on or off"):
        load_spec(checkpoint("qwen3_5"), ("mtp=yes",))
    folder = changed("qwen3_5", "config.json")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["mtp_num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers"):
        load_spec(folder, OPTION)
