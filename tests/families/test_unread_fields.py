"""No field that transformers reads is ignored in silence: a family reads it, or one table says for
which values it may stay unread, and all others are refused by name.
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from saccade.core.errors import CheckpointError
from saccade.core.video import VideoOptions
from saccade.families.checkpoint import Section, read_checkpoint
from saccade.families.registry import find_family, load_spec
from saccade.families.unread_fields import GENERATION, PIXELS, SECTIONS, TOP, VIDEOS, Unread
from saccade.front.answer_defaults import load_answer_defaults
from saccade_bench.lab.qwen import qwen
from tests.families.conftest import Changed, Refused
from tests.fixtures.tiny import tinies
from tests.fixtures.tiny_any import make_any

ROOT = Path(transformers.__file__).parent
KNOWN = [name for name, tiny in tinies().items() if hasattr(transformers, tiny.architecture)]
"""Whose classes are transformers' own."""
SEEING = [name for name in KNOWN if tinies()[name].sees]
QWEN = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"]
IMAGES_BY = dict.fromkeys(QWEN, "qwen2_vl") | {
    "qwen3_5_moe": "qwen2_vl",
    "internvl": "got_ocr2",
    "qianfan_ocr": "got_ocr2",
    "glm_ocr": "glm46v",
    "minicpmv4_7": "minicpmv4_6",
    "gemma4_unified": "gemma4",
}
"""Folders of transformers with a family's image processor, where named otherwise."""
VIDEOS_BY = {
    **dict.fromkeys(("qwen2_5_vl",), "qwen2_vl"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl"),
    "qianfan_ocr": "internvl",
    "minicpmv4_7": "minicpmv4_6",
}
IMAGES_FILE = "preprocessor_config.json"
BASES = {"ImagesKwargs", "VideosKwargs"}


def annotated(path: Path) -> Mapping[str, tuple[list[str], set[str]]]:
    """The classes of arguments in a source file: their bases, and the names that they declare."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Kwargs"):
            names = {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            found[node.name] = [each.id for each in node.bases if isinstance(each, ast.Name)], names
    return found


def processor_fields(kind: str, model: str) -> set[str]:
    """The fields of a processor's class, from its source: importing it takes torchvision."""
    fields: set[str] = set()
    for path in (ROOT / "models" / model).glob(f"{kind}_processing_*.py"):
        for bases, own in annotated(path).values():
            if BASES & set(bases):
                fields |= own
    assert fields, f"transformers has no {kind} processor in models/{model}"
    return fields | annotated(ROOT / "processing_utils.py")[f"{kind.title()}sKwargs"][1]


def config_fields(config: Any) -> Iterator[str]:
    """The fields that a configuration's class declares, beyond what all have."""
    for each in type(config).__mro__:
        if each is transformers.PreTrainedConfig:
            return
        for name in inspect.get_annotations(each):
            plain = not name.startswith(("_", "base_model_"))
            if plain and not isinstance(vars(config).get(name), transformers.PreTrainedConfig):
                yield name


CLASS_FACTS = {
    *("sub_configs", "attribute_map", "model_type", "base_config_key"),
    *("keys_to_ignore_at_inference", "sub_configs_defaults"),
}


def unnamed(section: Section, fields: set[str], table: Mapping[str, Unread]) -> set[str]:
    """The fields that nothing has looked up, and no line names."""
    return {name for name in fields - table.keys() if not section.looked_up(name)}


@pytest.mark.parametrize("family", KNOWN)
def test_every_field_of_transformers_is_read_or_named(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    read = read_checkpoint(checkpoint(family))
    resolve_name(find_family(read.architecture()).spec)(read)
    if family in SEEING:
        images = processor_fields("image", IMAGES_BY.get(family, family))
        assert not unnamed(read.processor, images, PIXELS)
    if read.video.used:
        videos = processor_fields("video", VIDEOS_BY.get(family, family))
        assert not unnamed(read.video, videos, VIDEOS)
    config = getattr(transformers, tinies()[family].architecture).config_class.from_pretrained(
        read.folder
    )
    assert not unnamed(read.config, set(config_fields(config)) - CLASS_FACTS, TOP)
    for name, table in SECTIONS.items():
        if (inner := getattr(config, name, None)) is not None and read.config.looked_up(name):
            section, other = read.config.section(name), type(inner).attribute_map
            fields = set(config_fields(inner)) - CLASS_FACTS
            fields -= {real for alias, real in other.items() if section.looked_up(alias)}
            assert not unnamed(section, fields, table)


def test_a_new_field_would_be_found(checkpoint: Callable[..., Path]) -> None:
    read = read_checkpoint(checkpoint("qwen3_vl"))
    assert unnamed(read.processor, {"do_sharpen", "do_pad"}, PIXELS) == {"do_sharpen"}


# ---- generation_config.json


def test_every_field_of_a_generation_config_is_read_or_named(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    spec = load_spec(checkpoint("qwen3_vl"))
    fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert len(fields) > 50
    for name in sorted(fields - GENERATION.keys() - {"eos_token_id"}):
        (tmp_path / "generation_config.json").write_text(json.dumps({name: {"no": "value"}}))
        with pytest.raises(CheckpointError):  # it is read
            load_answer_defaults(tmp_path, spec)


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("num_beams", 4, 1),
        ("diversity_penalty", 0.5, 0.0),
        ("begin_suppress_tokens", [5], None),
        ("forced_bos_token_id", 5, None),
        ("forced_eos_token_id", [5, 6], None),
        ("min_length", 3, 0),
        ("encoder_no_repeat_ngram_size", 3, 0),
        ("encoder_repetition_penalty", 1.2, 1.0),
        ("exponential_decay_length_penalty", [15, 1.6], None),
        ("sequence_bias", [[[5, 6], -10.0]], None),
        ("guidance_scale", 1.5, 1.0),
        ("typical_p", 0.9, 1.0),
        ("epsilon_cutoff", 3e-4, 0.0),
        ("eta_cutoff", 3e-4, 0.0),
        ("top_h", 0.4, None),
        ("penalty_alpha", 0.6, 0.0),
        ("token_healing", True, False),
        ("watermarking_config", {"bias": 2.0}, None),
        ("num_return_sequences", 2, 1),
        ("force_words_ids", [[5]], None),
    ],
)
def test_what_would_change_answers_is_refused_by_name(
    name: str, value: Any, neutral: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_vl"), folder)
    file = folder / "generation_config.json"
    own = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**own, name: neutral}))
    load_spec(folder)
    file.write_text(json.dumps({**own, name: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} "):
        load_spec(folder)


def test_it_is_refused_for_models_with_transformers_modules_too(tmp_path: Path) -> None:
    make_any(tmp_path, "llama")
    load_spec(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "num_beams": 4}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: num_beams 4 "):
        load_spec(tmp_path)


# ---- image processors


CHANGES: Mapping[str, Any] = {
    "do_resize": False,
    "do_rescale": False,
    "do_normalize": False,
    "rescale_factor": 1 / 127.5,
    "do_center_crop": True,
    "pad_size": {"height": 64, "width": 64},
    "resample": 0,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("family", SEEING)
def test_other_pixels_are_refused_by_name_in_every_family(
    family: str, name: str, refused: Refused
) -> None:
    if (family, name) == ("hunyuan_vl", "resample"):
        pytest.skip("transformers' class does not use the field")
    value = True if family.startswith("gemma4") and name == "do_normalize" else CHANGES[name]
    refused(family, IMAGES_FILE, rf"{IMAGES_FILE}.*{name}", **{name: value})


@pytest.mark.parametrize("family", SEEING)
def test_neutral_and_unknown_fields_change_nothing(
    family: str, checkpoint: Callable[..., Path], changed: Changed
) -> None:
    fields: dict[str, Any] = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 0.00392156862745098,
        "do_center_crop": None,
        "crop_size": {"height": 9, "width": 9},
        "do_convert_rgb": True,
        "data_format": "channels_first",
        "something_new": 7,
    }
    assert load_spec(changed(family, IMAGES_FILE, **fields)) == load_spec(checkpoint(family))


@pytest.mark.parametrize(
    "size", [{"height": 9, "width": 9}, {"max_height": 9}, {"longest_edge": 1.5}]
)
@pytest.mark.parametrize("family", QWEN)
def test_words_of_a_size_that_qwen_does_not_have_are_refused(
    family: str, size: dict[str, Any], refused: Refused
) -> None:
    refused(family, IMAGES_FILE, f"size.*{next(iter(size))}", size=size)


def grid_of_transformers(folder: Path) -> Any:
    noise = np.random.default_rng(0).integers(0, 255, (300, 260, 3), dtype=np.uint8)
    made = transformers.AutoImageProcessor.from_pretrained(folder)(
        images=[Image.fromarray(noise)], return_tensors="pt"
    )
    return tuple(made["image_grid_thw"][0].tolist())


SIZES = {"shortest_edge": 4096, "longest_edge": 40000}


@pytest.mark.parametrize(
    "fields",
    [
        {"processor_config.json": {"image_processor": {"size": SIZES}}},
        {"processor_config.json": {"image_processor": {"image_mean": [0.1, 0.2, 0.3]}}},
        {"processor_config.json": {"image_processor": None}},
        {"processor_config.json": {"image_seq_length": 5}},
        {IMAGES_FILE: {"resample": 2}},
        {IMAGES_FILE: {"resample": 1}},
        {IMAGES_FILE: {"image_mean": None}},
        {IMAGES_FILE: {"image_std": None, "size": None}},
        {IMAGES_FILE: {"size": None, "min_pixels": 4096, "max_pixels": 40000}},
        {IMAGES_FILE: {"size": None}},
    ],
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_both_files_are_read_as_transformers_reads_them(
    family: str, changed: Changed, fields: Mapping[str, Mapping[str, Any]]
) -> None:
    folder = changed(family, IMAGES_FILE)
    told = json.loads((folder / IMAGES_FILE).read_text())
    for file, values in fields.items():
        data = {**(told if file == IMAGES_FILE else {}), **values}
        data = {
            name: value for name, value in data.items() if value is not None or file != IMAGES_FILE
        }
        if data.get("image_processor") is not None:
            data["image_processor"] = {**told, **data["image_processor"]}
        (folder / file).write_text(json.dumps(data))
    spec = load_spec(folder)
    grid = grid_of_transformers(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    recipe, images = spec.recipe(300, 260, spec.pixel_bounds), qwen(spec).images
    assert recipe.grid == grid
    assert {"lanczos": 1, "bilinear": 2, "bicubic": 3}[recipe.resample] == processor.resample
    assert images.mean == tuple(processor.image_mean)
    assert images.std == tuple(processor.image_std)
    size = processor.size
    assert (images.min_pixels, images.max_pixels) == (size["shortest_edge"], size["longest_edge"])


def test_processor_config_comes_first_for_videos_too(changed: Changed) -> None:
    folder = changed("qwen3_vl", IMAGES_FILE)
    older = {"size": {"shortest_edge": 4096, "longest_edge": 10**6}, "fps": 3}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(older))
    assert load_spec(folder).video.fps == 3.0  # type: ignore[union-attr]
    newer = {"video_processor": {**older, "fps": 1, "resample": 2}}
    (folder / "processor_config.json").write_text(json.dumps(newer))
    rules = load_spec(folder).video
    assert rules is not None
    assert rules.fps == 1.0
    assert rules.recipe(4, 90, 90, VideoOptions()).resample == "bilinear"


@pytest.mark.parametrize("name", ["do_normalize", "do_rescale", "do_resize"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl"])
def test_other_pixels_of_videos_are_refused(family: str, name: str, changed: Changed) -> None:
    folder = changed(family, IMAGES_FILE)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({name: False}))
    with pytest.raises(CheckpointError, match=f"video_preprocessor_config.*{name} false"):
        load_spec(folder)


@pytest.mark.parametrize("name", ["patch_size", "merge_size"])
def test_videos_of_other_patches_than_images_are_refused(name: str, changed: Changed) -> None:
    folder = changed("qwen3_vl", IMAGES_FILE)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({name: 7}))
    with pytest.raises(CheckpointError, match=f"video_preprocessor_config.*{name} is 7"):
        load_spec(folder)


# ---- config.json


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("qwen2_vl", {"text_config": {"layer_types": ["sliding_attention"] * 3}}, "layer_types"),
        ("internvl", {"text_config": {"layer_types": ["sliding_attention"] * 3}}, "layer_types"),
        ("qwen3_vl", {"vision_config": {"in_channels": 4}}, "in_channels 4"),
        ("qwen3_vl", {"text_config": {"use_sliding_window": True}}, "use_sliding_window"),
        ("internvl", {"vision_config": {"num_channels": 1}}, "num_channels 1"),
    ],
)
def test_fields_of_config_that_would_change_answers_are_refused(
    family: str, fields: dict[str, Any], words: str, refused: Refused
) -> None:
    refused(family, "config.json", words, **fields)


def test_fields_that_change_nothing_may_have_any_value(
    checkpoint: Callable[..., Path], changed: Changed
) -> None:
    text = {"attention_dropout": 0.5, "sliding_window": 4096, "max_window_layers": 2}
    vision = {"initializer_range": 9.0, "in_channels": 3}
    folder = changed("qwen2_vl", "config.json", text_config=text, vision_config=vision)
    assert load_spec(folder) == load_spec(checkpoint("qwen2_vl"))


def test_every_line_of_the_table_has_a_reason() -> None:
    for table in (PIXELS, VIDEOS, TOP, *SECTIONS.values()):
        assert all(len(line.why.split()) > 1 for line in table.values())


@pytest.mark.parametrize("family", [family for family in KNOWN if not family.startswith("gemma4")])
def test_an_old_rotary_embedding_beside_a_new_one_is_read_as_transformers_does(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(family), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    new = text.pop("rope_parameters", None) or text.pop("rope_scaling", {})
    nested = any(isinstance(each, dict) for each in new.values())
    flat = {"rope_type": "default", "rope_theta": 1e4} | ({} if nested else new)
    text["rope_parameters"] = new or flat
    text["rope_scaling"] = flat | {"rope_theta": 54321.0}
    path.write_text(json.dumps(config))
    spec = load_spec(folder)
    whole = transformers.AutoConfig.from_pretrained(folder).to_dict()
    path.write_text(json.dumps(whole | {"architectures": config["architectures"]}))
    told = json.loads(path.read_text())
    (told.get("text_config") or told).pop("rope_scaling", None)
    path.write_text(json.dumps(told))
    assert load_spec(folder) == spec


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_an_old_rotary_embedding_that_names_no_layers_is_refused(
    family: str, refused: Refused
) -> None:
    old = {"rope_type": "default", "rope_theta": 54321.0}
    refused(
        family, "config.json", "rope_scaling is not supported", text_config={"rope_scaling": old}
    )
