"""The trial at load of a model by transformers' modules: what its own forward does with a prompt
with images is done here, or the model is refused by the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from saccade.core.errors import CheckpointError
from saccade.core.family import put_spaces
from saccade.core.types import Image, ImageKey
from saccade.families.registry import load_spec
from saccade.plugins.any_model import inspector, net, prompts, trial
from saccade.plugins.any_model.facts import NO_JOINTS, Joints, OwnProcessor, with_images
from saccade.plugins.any_model.handed import Handed, alike, find_difference
from saccade.plugins.any_model.inspector import Questions
from saccade.plugins.any_model.processor import ask_image, ask_text
from saccade.plugins.any_model.prompts import ProbePrompt
from saccade.plugins.any_model.refusals import Unservable
from saccade.plugins.any_model.spec import AnySpec
from saccade.plugins.any_model.tower import is_blank
from saccade.plugins.any_model.trial import OwnAnswer, learned_rows
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families.unlisted import judge
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.tiny_any import make_any
from tests.fixtures.unlisted import SEERS, reader

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AnySpec]:
    def made(name: str) -> AnySpec:
        set_threads()
        folder = tmp_path_factory.getbasetemp() / f"trial-{name}"
        if not folder.exists():
            make_any(folder, name)
        return cast(AnySpec, load_spec(folder))

    return made


def loaded(spec: AnySpec, **images: Any) -> Any:
    """With other facts of its images."""
    if images:
        assert spec.facts.images is not None
        facts = replace(spec.facts, images=replace(spec.facts.images, **images))
        spec = replace(spec, facts=facts)
    return load_net(spec, spec.folder, dtype=torch.float32, device=CPU)


def refused(spec: AnySpec, reason: str, **images: Any) -> None:
    words = f"{spec.facts.architecture} is not served: {reason}"
    with pytest.raises(CheckpointError, match=words):
        loaded(spec, **images)


def test_features_for_layers_are_not_left_out(checkpoint: Callable[[str], AnySpec]) -> None:
    names = "deepstack_visual_embeds, visual_pos_masks"
    reason = f"its decoder is called with {names}, which are not supported"
    refused(checkpoint("cohere_compass"), reason, deepstack=None)


def test_a_tower_that_makes_no_rows_is_refused_at_load(
    checkpoint: Callable[[str], AnySpec],
) -> None:
    refused(checkpoint("granite4_vision"), "Saccade fails on a prompt: TypeError", deepstack=None)


def test_learned_rows_are_not_left_out(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "marks", lambda _: frozenset())
    refused(checkpoint("ovis2"), "its decoder gets a different input at token 0 ")


def test_text_around_images_is_the_processor_s(checkpoint: Callable[[str], AnySpec]) -> None:
    spec = checkpoint("idefics2")
    assert spec.images.joints == Joints(spaced=True, shared=1)
    refused(spec, "its processor writes unknown tokens around images", joints=NO_JOINTS)


def test_a_processor_s_rule_that_is_not_known_is_refused(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = Questions(OwnProcessor(str(checkpoint("idefics2").folder)))
    assert questions.model().images is not None

    def louder(processor: Any, text: str, images: Any) -> Any:
        return (
            ask_image(processor, images[0])
            if text.endswith("1")
            else ask_text(processor, text, images)
        )

    monkeypatch.setattr(inspector, "ask_text", louder)
    with pytest.raises(Unservable, match=r"its processor joins text and images by an unknown rule"):
        questions.model()


def test_a_forward_that_raises_is_a_sentence(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise TypeError("'NoneType' object is not iterable")

    monkeypatch.setattr(LlavaMultiModalProjector, "forward", raises)
    words = "transformers' generate fails on a prompt with an image: TypeError: 'NoneType'"
    refused(checkpoint("llava"), words)


@pytest.mark.parametrize("changed", ["_embed", "logits"])
def test_what_comes_to_something_else_is_refused(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    own = getattr(net.AnyText, changed)
    monkeypatch.setattr(net.AnyText, changed, lambda *given: own(*given).flip(-1))
    reasons = {"_embed": "its decoder gets a different input", "logits": "its logits for a prompt"}
    refused(checkpoint("llava"), reasons[changed])


def test_images_that_look_at_each_other_are_refused(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlavaMultiModalProjector.forward

    def mixed(self: Any, features: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = own(self, features)
        return made + made.mean(dim=0)

    monkeypatch.setattr(LlavaMultiModalProjector, "forward", mixed)
    refused(checkpoint("llava"), "its decoder gets a different input")


def test_the_trial_shows_all_kinds_of_tokens_around_images(
    checkpoint: Callable[[str], AnySpec],
) -> None:
    spec = checkpoint("ovis2")
    sizes = prompts.telling_sizes(spec)
    shown = {token for size in sizes for token in spec.sizes.facts(size).tokens}
    assert shown == {token for each in spec.images.largest for token in each.tokens}
    assert 3 <= len(sizes) <= prompts.MAX_IMAGES + 1


def test_the_trial_shows_images_side_by_side_and_at_both_ends(
    checkpoint: Callable[[str], AnySpec],
) -> None:
    spec = checkpoint("llava")
    prompt = prompts.image_prompt(spec, prompts.telling_sizes(spec), torch.float32)
    first, second, *_, last = prompt.spans
    assert first.start == 0 and second.start == first.end
    assert last.end == len(prompt.tokens)


def test_a_trial_costs_few_forwards(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model's own: one token; a prompt and a decode step, of text and of an image; of
    several images only what the decoder is handed.
    """
    asked, ours = [], []
    ask, run = trial._ask, net.AnyText.run

    def counted(model: Any, prompt: ProbePrompt, *, stop: bool) -> OwnAnswer:
        asked.append(stop)
        return ask(model, prompt, stop=stop)

    def run_counted(self: Any, x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        ours.append(len(x))
        return run(self, x, *rest, **more)

    monkeypatch.setattr(trial, "_ask", counted)
    monkeypatch.setattr(net.AnyText, "run", run_counted)
    loaded(checkpoint("llava"))
    assert asked == [False, True, False]
    assert len(ours) == 6, "one token, three prompts, and two with a token behind"


@pytest.mark.parametrize(
    ("argument", "change", "reason"),
    [
        ("position_ids", lambda each: each + 1, "an unknown position after the prompt"),
        ("attention_mask", torch.zeros_like, "decoder gets its own mask after the prompt"),
        ("logits", lambda each: each.flip(0), "its logits for a decode step"),
    ],
)
def test_a_decode_step_that_differs_is_refused(
    checkpoint: Callable[[str], AnySpec],
    monkeypatch: pytest.MonkeyPatch,
    argument: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
) -> None:
    """The prompt is as ever."""
    ask = trial._ask

    def other(model: Any, prompt: ProbePrompt, *, stop: bool) -> OwnAnswer:
        found = ask(model, prompt, stop=stop)
        if found.step is None:
            return found
        step = found.step
        if argument == "logits":
            return replace(found, step=replace(step, logits=change(step.logits)))
        told = torch.full((1, 1), len(prompt.tokens))
        arguments = {**step.arguments, argument: change(step.arguments.get(argument, told))}
        return replace(found, step=replace(step, arguments=arguments))

    monkeypatch.setattr(trial, "_ask", other)
    refused(checkpoint("llava"), f"its .*{reason}".replace("its .*its", "its"))


def test_a_model_that_takes_no_images_side_by_side_is_tried_with_letters_between(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = trial._ask, []

    def picky(model: Any, prompt: ProbePrompt, *, stop: bool) -> OwnAnswer:
        asked.append(prompt.spans)
        if len(prompt.spans) > 1 and prompt.spans[0].end == prompt.spans[1].start:
            raise RuntimeError("no images side by side")
        return ask(model, prompt, stop=stop)

    monkeypatch.setattr(trial, "_ask", picky)
    loaded(checkpoint("llava"))
    assert len(asked) == 4 and asked[2][0].end < asked[2][1].start


def told(tokens: tuple[int, ...], rows: torch.Tensor) -> OwnAnswer:
    prompt = ProbePrompt(tokens, spec_positions(len(tokens)), len(tokens), {})
    return OwnAnswer(prompt, Handed({"inputs_embeds": rows[None]}, None), None)


def spec_positions(count: int) -> Any:
    return torch.arange(count)[None].numpy()


def test_rows_of_a_mark_are_learned_if_all_images_have_the_same() -> None:
    ours, theirs = torch.ones(4, 8), torch.ones(4, 8)
    theirs[1] = theirs[3] = 2.0
    found = learned_rows([(told((5, 7, 6, 7), theirs), ours)], frozenset({7}))
    assert list(found) == [7] and torch.equal(found[7], theirs[1])
    with pytest.raises(Unservable, match=r"a different input at token 1 \(id 7\)"):
        learned_rows([(told((5, 7, 6, 7), theirs), ours)], frozenset({6}))
    theirs[3] = 3.0
    with pytest.raises(Unservable, match="its own inputs instead of token 7"):
        learned_rows([(told((5, 7, 6, 7), theirs), ours)], frozenset({7}))
    theirs[3] = 1.0
    with pytest.raises(Unservable, match="two different inputs for token 7"):
        learned_rows([(told((5, 7, 6, 7), theirs), ours)], frozenset({7}))


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ({}, None),
        ({"position_ids": torch.tensor([[0, 1]])}, None),
        ({"position_ids": torch.tensor([[0, 2]])}, "unknown positions"),
        ({"attention_mask": torch.ones(1, 2)}, None),
        ({"attention_mask": torch.tensor([[1, 0]])}, "its own mask"),
        ({"attention_mask": {"full_attention": None}}, "its own mask"),
        ({"vision_states": torch.ones(1)}, "vision_states, which are not supported"),
        ({"inputs_embeds": torch.zeros(1, 2, 4)}, "unexpected inputs_embeds"),
    ],
    ids=str,
)
def test_each_argument_of_a_decoder_is_looked_at(theirs: Any, reason: str | None) -> None:
    ours = {"inputs_embeds": torch.ones(1, 2, 4), "position_ids": torch.tensor([[0, 1]])}
    found = find_difference(Handed(ours, None), Handed({**ours, **theirs}, None))
    assert found is None if reason is None else reason in (found or "")


def test_values_are_alike_within_rounding_alone() -> None:
    one = torch.ones(4)
    assert alike({1: [one]}, {1: [one * 1.0005]}) and not alike({1: [one]}, {1: [one * 1.01]})
    assert not alike([one], [one, one]) and not alike(one, None) and alike("a", "a")
    assert not alike(torch.tensor([1]), torch.tensor([2]))


def test_images_side_by_side_share_the_token_between_them() -> None:
    image = (8, 9, 9, 8)
    tokens, segments = with_images((1, 0, 0, 2, 0), 0, [image] * 3, 1)
    assert tokens == [1, 8, 9, 9, 8, 9, 9, 8, 2, 8, 9, 9, 8]
    assert segments == [(1, 5, 0), (5, 8, 1), (9, 13, 0)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a@b", "a@ b"),
        ("a@ b@\nc@", "a@ b@\nc@"),
        ("@<b>@1@.", "@<b>@ 1@ ."),
        ("@@x", "@@ x"),
        ("@\U000f0001b", "@ \U000f0001b"),
        ("@\U000f0001\n", "@\U000f0001\n"),
        ("@\U00100001", "@\U00100001"),
    ],
)
def test_a_space_follows_an_image_that_a_word_follows(text: str, wanted: str) -> None:
    text, wanted = (each.replace("@", "<image>") for each in (text, wanted))
    assert put_spaces(text, "<image>", "<\U00100001") == wanted


def test_an_error_of_a_tower_ends_its_request_alone(
    checkpoint: Callable[[str], AnySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = loaded(checkpoint("llava"))
    harness = Harness(served)

    def raises(**_: Any) -> Any:
        raise TypeError("'NoneType' object is not iterable")

    spec, recipe = served.spec, served.spec.sample
    key = ImageKey(b"a" * 32, spec.settings(recipe))
    harness.pixels[key] = np.zeros((*recipe.canvas, 3), np.uint8)
    image = Image(key, recipe.grid, recipe.grid[0], recipe.grid[3], recipe.canvas)
    ids = [5, spec.images.placeholder, 6]
    monkeypatch.setattr(served.vision, "features", raises)
    asked = harness.request("it", ids, [image], max_tokens=3)
    assert "TypeError: 'NoneType'" in (harness.run([asked])["it"].error or "")
    assert harness.run([harness.request("text", [5, 6, 7], max_tokens=3)])["text"].error is None


def test_an_architecture_of_no_list_is_right_or_refused(tmp_path: Path) -> None:
    """More of them: `python -m tests.families.unlisted`."""
    verdict = judge(SEERS["vipllava"], tmp_path / "vipllava")
    assert verdict.ending == "right", verdict.why
    assert load_spec(tmp_path / "vipllava").unproven == "VipLlavaForConditionalGeneration"
    for model_type, name, ending in (
        ("afmoe", "AfmoeForCausalLM", "right"),
        ("gpt2", "GPT2LMHeadModel", "right"),
        ("mamba", "MambaForCausalLM", "refused"),
        ("stablelm", "StableLmForCausalLM", "refused"),
    ):
        kind = reader(model_type, name)
        assert kind is not None
        verdict = judge(kind, tmp_path / model_type)
        assert (verdict.ending, f"{name} is not served: " in verdict.why) == (
            ending,
            ending == "refused",
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "granite4_vision"])
def test_rounding_in_half_formats_is_no_difference(
    checkpoint: Callable[[str], AnySpec], name: str, dtype: torch.dtype
) -> None:
    spec = checkpoint(name)
    assert load_net(spec, spec.folder, dtype=dtype, device=CPU)


def test_memory_that_is_not_there_is_no_verdict(checkpoint: Callable[[str], AnySpec]) -> None:
    spec = checkpoint("llava")
    with pytest.raises(MemoryError), trial.refusing(spec, trial.TEXT):
        raise MemoryError


def test_an_image_without_tiles_is_not_blank() -> None:
    """DeepSeek-OCR2 counts an image's tiles besides the whole image: 0 for a small one."""
    pixels, tiles = torch.full((1, 3, 2, 2), -1.0), torch.tensor([0])
    assert not is_blank({"pixel_values": pixels, "num_local_patches": tiles})
    assert is_blank({"pixel_values": torch.zeros_like(pixels), "num_local_patches": tiles})
    assert not is_blank({"pixel_values": torch.zeros_like(pixels)})
