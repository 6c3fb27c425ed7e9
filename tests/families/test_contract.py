"""What every family promises, for each that is found: it computes what transformers computes on the
same checkpoint, however the work is cut up, and refuses what no model has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from saccade.core.config import EncoderConfig, EncoderMode
from saccade.core.errors import CheckpointError, ConfigError, InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.options import EngineOptions
from saccade.engine.sizing import pick_chunk
from saccade.families.registry import load_spec
from saccade.kernels.reference import linear
from saccade.nn.mlp import MLP, GatedMLP
from saccade.parallel import Shard
from saccade.plugins.gpu.cuda.pack_graphs import CapturedPacks
from saccade.plugins.models.gemma4.embedder import ImageEmbedder
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.text.prompt.special_tokens import Literals
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from saccade_bench.lab.qwen import grids
from tests.families.answers import CASES, NEW_TOKENS, Model, check, check_rank_group
from tests.families.every import EVERY, OFTEN, SEEING
from tests.families.forwarding import CPU, LOGITS, Session, encode, images_of, load, pixels, prompt
from tests.families.image_files import check_pixels
from tests.families.text_alone import check_text_alone, cut_out
from tests.fixtures.harness import Harness
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import Reference, Tiny, picture, tinies
from tests.fixtures.tiny import reference as load_reference
from tests.helpers.breadth import broad

Answered = Callable[[str], Model]
References = Callable[..., Reference]
TALKING = tuple(name for name, tiny in tinies().items() if not tiny.sees)
CUT_OUT = tuple(name for name, tiny in tinies().items() if tiny.text_architecture)
SHARED = tuple(name for name in SEEING if hasattr(transformers, tinies()[name].architecture))
"""Whose whole model is transformers'."""


def variants(*names: str) -> list[Any]:
    """Each with the options of each variant, of which the first is in the default run."""
    found = []
    for name in names:
        tiny = tinies()[name]
        for at, (variant, options) in enumerate(tiny.variants.items()):
            marks = () if at == 0 else (pytest.mark.more,)
            found.append(pytest.param(name, options, id=f"{name}, {variant}", marks=marks))
    return found


@pytest.fixture
def spec(family: str, checkpoint: Callable[..., Path]) -> FamilySpec:
    return load_spec(checkpoint(family))


def shown(theirs: Reference, count: int) -> list[np.ndarray]:
    return theirs.shown([picture(90, 130 + 80 * at, seed=at) for at in range(count)])


# ---- images and prompts


@pytest.mark.more
@pytest.mark.parametrize("family", SEEING)
def test_pixels_are_the_references(family: str, spec: FamilySpec, reference: References) -> None:
    assert tinies()[family].grids <= check_pixels(spec, reference(family))


@pytest.mark.whole
@pytest.mark.parametrize("family", SEEING)
def test_prompts_are_expanded_as_the_reference_does_it(
    family: str, spec: FamilySpec, reference: References
) -> None:
    """What stands for a part of a prompt stands for it in the whole, too."""
    theirs = reference(family)
    pictures, mark = shown(theirs, 3), theirs.placeholder
    words = f"one {mark}\ntwo {mark}{mark} three?"
    tokenizer = Tokenizer.load(theirs.folder)
    tokens, images = tokenizer.encode(words), images_of(spec, pictures)
    expanded, spans = spec.expand_prompt(tokens, images)
    assert list(expanded) == list(tokenizer.encode(theirs.expand(words, pictures)))
    for number, image in enumerate(images):
        mine = [span for span in spans if span.image == number]
        assert sum(span.length for span in mine) == image.num_tokens
        assert [span.offset for span in mine] == [
            sum(span.length for span in mine[:at]) for at in range(len(mine))
        ]
    shows = {token for span in spans for token in expanded[span.start : span.end]}
    assert len(shows) == 1, "one token stands for all parts of all images"
    for at in range(len(tokens) + 1):
        count = tokens[:at].count(theirs.mark)
        part, _ = spec.expand_prompt(tokens[:at], images[:count])
        assert part == expanded[: spec.widened(at, spans, images)]
    for wrong in (images[:2], [*images, images[0]], []):
        with pytest.raises(InvalidRequest, match=f"3 image placeholders for {len(wrong)} images"):
            spec.expand_prompt(tokens, wrong)


@pytest.mark.whole
@pytest.mark.parametrize("family", SEEING)
def test_a_chat_becomes_the_tokens_of_the_references_processor(
    family: str, spec: FamilySpec, reference: References
) -> None:
    """A token's name in the client's text is text."""
    theirs = reference(family)
    tokenizer = Tokenizer.load(theirs.folder)
    template = ChatTemplate.load(theirs.folder, tokenizer, None, spec.templates)
    pictures, literals = shown(theirs, 2), Literals(tokenizer)
    name = tokenizer.decode([theirs.mark])
    image, ask = {"type": "image"}, {"type": "text", "text": "what?\n"}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a circle"},
        {"role": "user", "content": "which colour?"},
    ]
    text = template.render([{"role": "user", "content": [image, ask, image]}, *turns])
    expanded, _ = spec.expand_prompt(tokenizer.encode(text), images_of(spec, pictures))
    assert list(expanded) == list(tokenizer.encode(theirs.expand(text, pictures)))
    named = {"type": "text", "text": f"how many {name} are there?"}
    chat = [{"role": "user", "content": [image, ask, image, named]}, *turns]
    written = literals.encode(literals.render(template, chat))
    assert written.count(theirs.mark) == 2
    assert named["text"] in tokenizer.decode(written)


@pytest.mark.whole
@pytest.mark.parametrize("family", SEEING)
def test_a_step_takes_a_whole_image_whose_tokens_see_each_other(spec: FamilySpec) -> None:
    most = spec.largest_image.tokens
    short = EngineOptions(chunked_prefill_size=most - 1)
    if spec.kv_spec().whole_images:
        words = f"--chunked-prefill-size {most - 1}: .* set at least {most}$"
        with pytest.raises(ConfigError, match=words):
            pick_chunk(short, spec, cuda=False)
    else:
        assert pick_chunk(short, spec, cuda=False) == most - 1
    assert pick_chunk(EngineOptions(chunked_prefill_size=most), spec, cuda=False) == most


# ---- the network


@pytest.mark.whole
@pytest.mark.parametrize(("family", "options"), variants(*SEEING))
def test_embeddings_and_logits_equal_the_reference(
    family: str, options: dict[str, Any], reference: References
) -> None:
    theirs = reference(family, **options)
    net, images = load(theirs.folder), pixels(theirs, 3)
    tensors = [torch.from_numpy(image) for image in images]
    for ours, wanted in zip(encode(net, tensors), theirs.embeddings(images), strict=True):
        assert ours.shape == (len(wanted), net.spec.embedding_width)
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0.0)
    for count, page, chunk in ((0, None, None), (1, None, None), (3, None, None), (3, 16, 7)):
        few = images[:count]
        session = Session(net, prompt(theirs, count), few, page)
        wanted = theirs.logits(session.tokens, few)
        # A head that is the embedding has twice as large rows as one of its own.
        atol = (3 if options.get("tie") else 1) * LOGITS["atol"]
        torch.testing.assert_close(session.prefill(chunk), wanted, atol=atol, rtol=0.0)


@pytest.mark.sparse
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("family", EVERY)
def test_chunks_and_decode_equal_one_prefill(
    family: str, reference: References, chunk: int, page_size: int | None
) -> None:
    theirs = reference(family)
    images = pixels(theirs, 3)
    session = Session(load(theirs.folder), prompt(theirs, 3), images, page_size)
    answer = [41, 42, 43]
    logits = torch.cat(
        [session.prefill(chunk), torch.stack([session.decode(token) for token in answer])]
    )
    torch.testing.assert_close(logits, theirs.logits([*session.tokens, *answer], images), **LOGITS)


@pytest.mark.first
@pytest.mark.parametrize("family", EVERY)
def test_bfloat16_agrees_on_the_first_token(family: str, reference: References) -> None:
    theirs = reference(family)
    net = load_net(load_spec(theirs.folder), theirs.folder, dtype=torch.bfloat16, device=CPU)
    images = pixels(theirs, 1)
    session = Session(net, prompt(theirs, 1), images, 16, torch.bfloat16)
    assert session.prefill()[-1].argmax() == theirs.logits(session.tokens, images)[-1].argmax()


@pytest.mark.first
@pytest.mark.parametrize("family", SEEING)
def test_images_are_encoded_alike_alone_in_company_and_in_graphs(
    family: str, reference: References
) -> None:
    theirs = reference(family)
    net, unit = load(theirs.folder), load_spec(theirs.folder).patch_unit
    sizes = (60, 60), (100, 230), (60, 60), (300, 90)
    images = [torch.from_numpy(theirs.resize(picture(*size, seed=size[0]))) for size in sizes]
    positions = PositionCache(net.spec, net.vision, Metrics())
    config = EncoderConfig(graph_sizes=(64 * unit, 256 * unit))
    like = torch.empty(0)
    graphs = PackedEncoder(net, positions, config, like, CapturedPacks(net, config, like))
    together = encode(net, images), graphs.encode(images, grids(net.spec, images))
    for at, image in enumerate(images):
        alone = encode(net, [image])[0]
        assert len(alone) == net.spec.num_tokens(grids(net.spec, [image])[0])
        for each in together:
            torch.testing.assert_close(each[at], alone, atol=1e-5, rtol=0.0)
        own = together[0][at]
        assert own.untyped_storage().nbytes() == own.nbytes, "an embedding owns its storage"


@pytest.mark.parametrize("family", SEEING)
def test_families_say_whether_their_towers_see_tiles_apart(family: str, spec: FamilySpec) -> None:
    assert tinies()[family].tiled == (spec.tiles is not None)


@pytest.mark.parametrize("family", [name for name in SEEING if tinies()[name].tiled])
def test_tiles_encoded_alone_are_an_image_together(family: str, reference: References) -> None:
    """Each is an image of its own grid, and has its rows in the image's embedding."""
    theirs = reference(family)
    net = load(theirs.folder)
    layout = net.spec.tiles
    assert layout is not None
    positions = PositionCache(net.spec, net.vision, Metrics())
    encoder = PackedEncoder(net, positions, EncoderConfig(), torch.empty(0))
    sizes = (60, 60), (100, 230), (300, 90), (240, 320)
    for image in (torch.from_numpy(theirs.resize(picture(*size, seed=4))) for size in sizes):
        (grid,) = grids(net.spec, [image])
        (whole,) = encode(net, [image])
        tiles = layout.tiles(grid)
        assert len(tiles) != 1
        assert sum(net.spec.num_patches(tile.grid) for tile in tiles) in (
            0,
            net.spec.num_patches(grid),
        )
        canvases = [image[tile.window.slices].contiguous() for tile in tiles]
        rows = encoder.encode(canvases, [tile.grid for tile in tiles]) if tiles else []
        for tile, own in zip(tiles, rows):
            found = torch.cat([whole[run.start : run.stop] for run in tile.rows])
            torch.testing.assert_close(own, found, atol=1e-5, rtol=0.0)
        if tiles:
            joined = encoder.split(torch.cat(rows), grid)
            torch.testing.assert_close(joined, whole, atol=1e-5, rtol=0.0)
            assert joined.untyped_storage().nbytes() == joined.nbytes


@pytest.mark.sparse
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", broad(SHARED, keep=OFTEN))
def test_slices_padded_to_whole_units_change_no_answer(
    family: str, reference: References, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """As on a GPU, whose products want that. Experts are cut by their width and never padded."""
    theirs = reference(family)
    folder = theirs.folder
    plain = load(folder)
    monkeypatch.setattr(linear, "PADDED", ("cpu",))
    shard = Shard(0, ranks)
    padded: Any = load_net(load_spec(folder), folder, dtype=torch.float32, device=CPU, shard=shard)
    blocks = () if isinstance(padded.vision, ImageEmbedder) else padded.vision.layers
    layers = (*padded.text.layers, *blocks)
    mlps: list[Any] = [each.mlp for each in layers if isinstance(each.mlp, MLP | GatedMLP)]
    assert {mlp.down.weight.values.shape[1] % linear.UNIT for mlp in mlps} == {0}
    if ranks > 1:
        return
    assert any(mlp.down.weight.values.shape[1] > 96 for mlp in mlps), (
        "the checkpoint's is 96 or less"
    )
    images, tokens = pixels(theirs, 1), prompt(theirs, 1)
    expected, found = (Session(net, tokens, images, 4).prefill() for net in (plain, padded))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.whole
@pytest.mark.parametrize(("family", "options"), variants(*TALKING))
def test_a_language_model_alone_answers_as_the_reference(
    family: str, options: dict[str, Any], reference: References
) -> None:
    theirs = reference(family, **options)
    theirs.go_on()
    check_text_alone(load(theirs.folder), theirs.logits, theirs.generate)


@pytest.mark.first
@pytest.mark.parametrize("family", CUT_OUT)
def test_a_checkpoint_without_its_tower_answers_as_transformers(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = cut_out(checkpoint(family), tmp_path / "text")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == tinies()[family].text_architecture
    theirs = Reference(folder, model.eval(), None)
    theirs.go_on()
    net = load(folder)
    assert not net.spec.kv_spec().whole_images
    check_text_alone(net, theirs.logits, theirs.generate)


# ---- the engine


@pytest.fixture(scope="module", params=SEEING)
def model(request: pytest.FixtureRequest, answered: Answered) -> Model:
    return answered(request.param)


@pytest.mark.first
@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize(("chunk", "page"), [(16, 1), (9, 4), (64, 16), (2048, 1), (2048, 16)])
def test_eight_requests_at_once_answer_as_transformers(
    model: Model, chunk: int, page: int, prefix_cache: bool
) -> None:
    harness = Harness(
        model.net,
        chunk_tokens=chunk,
        page_size=page,
        prefix_cache=prefix_cache,
        kv_pages=8192 // page,
    )
    check(model, harness.run([model.request(harness, name) for name in CASES]))
    cold = len(harness.decoded), len(harness.encoded)
    check(model, harness.run([model.request(harness, name) for name in CASES]))
    assert (len(harness.decoded), len(harness.encoded)) == cold, "a seen image costs nothing"
    assert len(harness.encoded) == len(set(harness.encoded))


@pytest.mark.first
@pytest.mark.sparse(pairs=True)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
def test_answers_survive_preemption(model: Model, prefix_cache: bool) -> None:
    """With pages for little more than the longest request."""
    longest = max(len(model.request(Harness(model.net), name).tokens) for name in CASES)
    pages = (longest + NEW_TOKENS) // 2 + 6
    harness = Harness(
        model.net, chunk_tokens=16, page_size=2, kv_pages=pages, prefix_cache=prefix_cache
    )
    check(model, harness.run([model.request(harness, name) for name in CASES]))
    assert harness.scheduler.counts.preemptions > 0
    assert len(harness.encoded) == len(set(harness.encoded)), (
        "whatever was interrupted, in the middle of an image too"
    )


@pytest.mark.more
@pytest.mark.parametrize("encoder", ["weights", "data"])
def test_two_ranks_answer_as_transformers(model: Model, encoder: EncoderMode) -> None:
    check_rank_group(model, ThreadRankGroup(model.reference.folder, 2, encoder))


# ---- files


@pytest.mark.whole
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=() if type(tinies()[name]).hub_tensors != Tiny.hub_tensors else pytest.mark.more,
        )
        for name in SHARED
    ],
)
def test_a_checkpoint_that_transformers_saved_answers_as_transformers(
    family: str, reference: References, tmp_path: Path
) -> None:
    """Its tensors have other names or shapes than the hub's, in some families."""
    hub, folder = reference(family), tmp_path / "saved"
    shutil.copytree(hub.folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    hub.model.save_pretrained(folder)
    theirs = load_reference(folder)
    theirs.go_on()
    images = pixels(theirs, 1)
    session = Session(load(folder), prompt(theirs, 1), images, page_size=16)
    row = session.prefill()
    torch.testing.assert_close(row, theirs.logits(session.tokens, images), **LOGITS)
    found = [int(row[-1].argmax())]
    while len(found) < 12:
        found.append(int(session.decode(found[-1]).argmax()))
    assert found == theirs.generate(session.tokens, images, 12)


@pytest.mark.whole
@pytest.mark.parametrize("family", SHARED)
def test_fields_that_a_file_leaves_out_are_those_of_transformers(
    family: str, spec: FamilySpec, reference: References, tmp_path: Path
) -> None:
    """A file with all that transformers does not assume says the same as one with everything."""
    theirs, folder = reference(family), tmp_path / "short"
    shutil.copytree(theirs.folder, folder)
    whole = json.loads((folder / "config.json").read_text())
    short = theirs.model.config.to_diff_dict() | {"architectures": whole["architectures"]}
    if heads := whole["text_config"].get("mtp_num_hidden_layers"):  # not transformers'
        short["text_config"]["mtp_num_hidden_layers"] = heads
    for section in (short, *(each for each in short.values() if isinstance(each, dict))):
        section.pop("dtype", None)  # that which the reference was loaded in
    assert len(json.dumps(short)) < 0.8 * len(json.dumps(whole))
    (folder / "config.json").write_text(json.dumps(short))
    assert load_spec(folder) == spec


SIZES = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim"),
    *("num_key_value_heads", "num_heads", "depth", "width", "heads", "layers", "mm_embed_dim"),
)
"""As the language models' and the towers' configurations call them."""
HUGE = 10**400
"""A number in JSON, and none of Python's floats."""


@pytest.mark.whole
@pytest.mark.parametrize("family", tinies())
def test_sizes_that_no_model_has_are_refused_by_name(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / "m")
    data = json.loads((folder / "config.json").read_text())

    def refuse(section: dict[str, Any], name: str, value: Any) -> None:
        usual, section[name] = section[name], value
        (folder / "config.json").write_text(json.dumps(data))
        with pytest.raises(CheckpointError, match=rf"config.json.*{name}"):
            load_spec(folder)
        section[name] = usual

    text = next((data[each] for each in ("text_config", "language_config") if each in data), data)
    sections = [text, data["vision_config"]] if tinies()[family].sees else [text]
    refused = [(section, name) for section in sections for name in SIZES if name in section]
    assert len(refused) >= 4 * len(sections) - 1
    for section, name in refused:
        for value in (0, -1):
            refuse(section, name, value)
    refuse(text, "num_hidden_layers", 10**9)
    text.setdefault("rms_norm_eps", 1e-6)
    for endless in (HUGE, float("nan"), float("inf")):
        refuse(text, "rms_norm_eps", endless)


@pytest.mark.whole
@pytest.mark.parametrize("family", SEEING)
def test_options_of_other_families_are_refused(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=r"no_such=1: \w+ has (no options|\w+)"):
        load_spec(checkpoint(family), ["no_such=1"])
