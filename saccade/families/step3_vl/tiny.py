"""Tiny Step3-VL checkpoints, for tests and benchmarks.

transformers has no class for them. Their reference is its Qwen3 behind its tower of Step-3.7 and a
linear layer. Crops are those of the published patcher, written anew from its words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from saccade_bench.fixtures.references import BehindTower
from saccade_bench.fixtures.tiny import TEXT, Ids, Options, Tiny, randomise, write_json

PATCH, WHOLE, CROP, LONGEST = 4, 48, 32, 96
"""Pixels of a patch, of the square as a whole, of a crop, and of a resized image's longer edge."""
HEADS, WIDTH, OUT = 4, 48, 64
SPECIAL = (
    *("<im_patch>", "<im_start>", "<im_end>"),
    *("<patch_start>", "<patch_end>", "<patch_newline>"),
)
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') %}<im_patch>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
VISION: dict[str, Any] = {
    "width": WIDTH,
    "layers": 3,
    "heads": HEADS,
    "mlp_ratio": 72 / WIDTH,
    "image_size": WHOLE,
    "patch_size": PATCH,
    "use_cls_token": False,
    "use_ln_pre": True,
    "use_ln_post": False,
    "use_abs_posemb": True,
    "use_rope2d": True,
    "ls_init_value": 0.1,
}
PROCESSOR: dict[str, Any] = {
    "size": {"height": WHOLE, "width": WHOLE},
    "patch_size": CROP,
    "max_image_size": LONGEST,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class ViewModel(torch.nn.Module):
    """Tower and projector."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_model = Step3p7VisionModel(Step3p7VisionConfig(**VISION))
        self.multi_modal_projector = torch.nn.Linear(4 * WIDTH, OUT, bias=False)

    def forward(self, views: torch.Tensor) -> torch.Tensor:
        """Normalised views [n, 3, side, side] to [n * tokens, OUT]."""
        rows: torch.Tensor = self.vision_model(views).last_hidden_state
        projected: torch.Tensor = self.multi_modal_projector(rows)
        return projected.flatten(0, 1)


def published_crops(
    width: int, height: int, sides: tuple[int, int, int] = (LONGEST, WHOLE, CROP)
) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Return the (width, height) that an image is first resized to, and that it is cut from, and
    the window: 0 for an image without crops. As published, in its words and floats.
    """
    longest, whole, crop = sides
    ratio = width / height
    if min(height, width) < 32 and (ratio > 4 or ratio < 1 / 4):
        width = height = max(height, width)
    if max(height, width) > longest:
        scale_factor = longest / max(height, width)
        width, height = int(width * scale_factor), int(height * scale_factor)
    long, short = max(height, width), min(height, width)
    if long <= whole:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, crop) if long / short > 4 else crop
    if not window:
        return (width, height), (width, height), 0
    cut = []
    for edge in (width, height):
        times = edge / window
        if times < 1:
            cut.append(edge)
            continue
        decimal = times - edge // window
        cut.append(window * (int(times) + 1 if decimal > 0.2 else int(times)))
    return (width, height), (cut[0], cut[1]), window


def squeezed(image: PIL.Image.Image, side: int) -> np.ndarray:
    """In a square, by float32 and rounded: the published processor leaves out the last step."""
    planes = torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1)[None]
    if image.size != (side, side):
        planes = torch.nn.functional.interpolate(
            planes, (side, side), mode="bilinear", antialias=True
        )
    return planes[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy()


class CropReference(BehindTower):
    """`pixels` are canvases: crops side by side, the whole image under the first of the last row,
    and black beside that. processor: tower and projector.
    """

    placeholder = "<im_patch>"

    def resize(self, picture: np.ndarray) -> np.ndarray:
        image = PIL.Image.fromarray(picture)
        if min(image.size) < 32 and max(image.size) > 4 * min(image.size):
            square = PIL.Image.new("RGB", (max(image.size),) * 2, 0)
            square.paste(image, (0, 0))
            image = square
        resized, cut, window = published_crops(*image.size)
        image = image.resize(resized, PIL.Image.Resampling.BILINEAR)
        rows, columns = (math.ceil(edge / window) if window else 0 for edge in cut[::-1])
        canvas = np.zeros((rows * CROP + WHOLE, max(columns * CROP, WHOLE), 3), np.uint8)
        source = image.resize(cut, PIL.Image.Resampling.BILINEAR)
        for row in range(rows):
            for column in range(columns):
                left, top = column * window, row * window
                crop = source.crop((left, top, left + window, top + window))
                at = slice(row * CROP, (row + 1) * CROP), slice(column * CROP, (column + 1) * CROP)
                canvas[at] = squeezed(crop, CROP)
        canvas[rows * CROP :, :WHOLE] = squeezed(image, WHOLE)
        return canvas

    def cut(self, canvas: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the crops [n, CROP, CROP, 3], the whole image, and how many crops a row has."""
        height = len(canvas) - WHOLE
        if not height:
            return np.empty((0, CROP, CROP, 3), np.uint8), canvas, 0
        columns = canvas.shape[1] // CROP
        apart = canvas[:height, : columns * CROP].reshape(-1, CROP, columns, CROP, 3)
        crops = apart.transpose(0, 2, 1, 3, 4).reshape(-1, CROP, CROP, 3)
        return crops, canvas[height:, :WHOLE], columns

    def widened(self, image: np.ndarray) -> str:
        crops, _, columns = self.cut(image)
        count = (CROP // PATCH // 4) ** 2
        text = ""
        for at in range(len(crops)):
            text += f"<patch_start>{self.placeholder * count}<patch_end>"
            if (at + 1) % columns == 0 and at + 1 < len(crops):
                text += "<patch_newline>"
        return text + f"<im_start>{self.placeholder * (WHOLE // PATCH // 4) ** 2}<im_end>"

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        mean, std = (torch.tensor(PROCESSOR[name]) for name in ("image_mean", "image_std"))
        found = []
        for canvas in pixels:
            crops, whole, _ = self.cut(canvas)
            views = [each for each in (crops, whole[None]) if len(each)]
            normal = [(torch.from_numpy(each.copy()) / 255 - mean) / std for each in views]
            found.append(torch.cat([self.processor(each.permute(0, 3, 1, 2)) for each in normal]))
        return found


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """From rows that turn with those half a head away to rows that turn with their neighbours."""
    return weight.unflatten(0, (HEADS, 2, -1)).transpose(1, 2).flatten(0, 2)


def hub_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the hub's names, each block's queries, keys and values in one."""
    found = {}
    for name, value in tensors.items():
        for theirs, hubs in (
            ("model.language_model.", "model."),
            ("model.multi_modal_projector.", "vit_large_projector."),
            ("model.vision_model.", "vision_model."),
            ("embeddings.patch_embedding.", "conv1."),
            ("embeddings.position_embedding.weight", "positional_embedding"),
            ("vision_model.layers.", "vision_model.transformer.resblocks."),
            ("pre_layernorm.", "ln_pre."),
            ("vision_model.downsampler", "vision_model.vit_downsampler"),
            (".layernorm_before.", ".ln_1."),
            (".layernorm_after.", ".ln_2."),
            (".lambda_1", ".ls_1.gamma"),
            (".lambda_2", ".ls_2.gamma"),
            (".mlp.fc1.", ".mlp.c_fc."),
            (".mlp.fc2.", ".mlp.c_proj."),
        ):
            name = name.replace(theirs, hubs)
        if name.startswith("vision_model."):
            name = name.replace(".self_attn.", ".attn.")
        found[name] = value
    for name in [name for name in found if ".attn.q_proj." in name]:
        q, k, v = (found.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv")
        joined = torch.cat((interleaved(q), interleaved(k), v))
        found[name.replace("q_proj.", "in_proj_")] = joined
    return found


class Step3Tiny(Tiny):
    """Step3-VL. A crop has 4 tokens, the whole image 9."""

    architecture = "StepVLForConditionalGeneration"
    tiled = True
    special = SPECIAL
    template = CHAT_TEMPLATE
    grids = frozenset({(0, 0), (2, 3), (3, 1), (3, 3), (24, 1)})
    variants = {  # noqa: RUF012
        "as on the hub": {},
        "as transformers has it": {"layout": "new"},
        "tied": {"tie": True},
    }

    def text(self, ids: Ids) -> dict[str, Any]:
        rope = {"rope_theta": 1e6, "rope_scaling": None}
        ends = {"bos_token_id": ids("<|endoftext|>"), "eos_token_id": ids("<|im_end|>")}
        kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
        return TEXT | kind | rope | ends

    def write_settings(self, folder: Path, ids: Ids, options: Options) -> None:
        data = {
            "architectures": [self.architecture],
            "model_type": "step3_vl",
            "image_token_id": ids("<im_patch>"),
            "projector_bias": False,
            "understand_projector_stride": 2,
            "text_config": self.text(ids) | options.get("text", {}),
            "vision_config": VISION | options.get("vision", {}),
            "tie_word_embeddings": options.get("tie", False),
            "torch_dtype": options.get("dtype", "float32"),
        }
        write_json(folder / "config.json", data)
        processor = PROCESSOR | options.get("processor", {})
        write_json(folder / "preprocessor_config.json", processor)

    def write(self, folder: Path, tokenizer: Tokenizer, seed: int, options: Options) -> None:
        """Write transformers' own names of the weights beside the hub's, too."""
        ids = tokenizer.get_vocab().__getitem__
        self.write_settings(folder, ids, options)
        text, tied = self.text(ids) | options.get("text", {}), options.get("tie", False)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, seeing = language_model(text | {"tie_word_embeddings": tied}), ViewModel()
            for each in (model, seeing):
                randomise(each)
        tensors = {f"model.{name}": value for name, value in seeing.state_dict().items()}
        for name, value in model.state_dict().items():
            if not (tied and name == "lm_head.weight"):
                tensors[name.replace("model.", "model.language_model.")] = value
        tensors = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
        metadata = {"format": "pt"}
        beside = folder / "reference"
        beside.mkdir(exist_ok=True)
        save_file(tensors, beside / "model.safetensors", metadata)
        if options.get("layout", "old") == "old":
            tensors = hub_tensors(tensors)
        save_file(tensors, folder / "model.safetensors", metadata)

    def read_reference(self, folder: Path, _: torch.dtype) -> CropReference:
        config = json.loads((folder / "config.json").read_text())
        tied = {"tie_word_embeddings": config["tie_word_embeddings"]}
        tensors = load_file(folder / "reference" / "model.safetensors")
        model, seeing = language_model(config["text_config"] | tied), ViewModel()
        theirs = {
            name.replace("model.language_model.", "model."): value
            for name, value in tensors.items()
            if "language_model" in name or name.startswith("lm_head")
        }
        if tied["tie_word_embeddings"]:
            theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
        model.load_state_dict(theirs)
        names = [name for name in tensors if not name.startswith(("model.language_model.", "lm_"))]
        seeing.load_state_dict({name.removeprefix("model."): tensors[name] for name in names})
        return CropReference(folder, model.eval(), seeing.eval())


def language_model(text: dict[str, Any]) -> Any:
    kept = {name: value for name, value in text.items() if name != "architectures"}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**kept))


TINY = {"step3_vl": Step3Tiny()}
