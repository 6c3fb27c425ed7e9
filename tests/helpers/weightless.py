"""Networks without weights on tensors without memory, which say that they are on a GPU: what a
server would hold there is counted, by who asked for it. Triton's launches are left out.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import FrameType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from saccade.core.config import GIB, EngineConfig, Hardware
from saccade.core.family import FamilySpec
from saccade.core.options import EngineOptions, ModelOptions
from saccade.engine.memory_estimate import StepBounds
from saccade.engine.sizing import resolve
from saccade.families.registry import family_model, load_spec
from saccade.kernels import device as placement
from saccade.nn.protocol import FamilyNet
from saccade.nn.weights import Part
from saccade.parallel import UNSHARDED
from saccade.plugins.gpu import triton as triton_kernels
from saccade.plugins.gpu.cuda import pack_graphs, step_graphs
from saccade.plugins.gpu.cuda.graphs import eager
from saccade.plugins.gpu.triton.ops import TritonOps
from saccade.runtime.vision import streams
from saccade.runtime.weights.dummy import DummyWeights
from saccade_bench.lab.checkpoint import make_checkpoint

META = torch.device("meta")
BF16 = torch.bfloat16
CONTEXT_BYTES = GIB // 2
"""Of CUDA and its libraries."""
CARDS = {
    "qwen3-vl-8b": 79.19,
    "qwen3-vl-4b": 23.5,
    "qwen3-vl-30b-a3b": 79.19,
    "qwen3.5-9b": 23.5,
    "gemma-3-4b": 23.5,
    "gemma-3-12b": 79.19,
    "gemma-4-e2b": 23.5,
    "gemma-4-26b-a4b": 79.19,
    "gemma-4-31b": 79.19,
    "deepseek-vl2-small": 79.19,
}
"""GiB that a card of 80 or 24 GB says it has."""


GEMMA = {"gemma-3-4b": (2560, 34, 8, 4, 10_240), "gemma-3-12b": (3840, 48, 16, 8, 15_360)}
"""Hidden values, layers, heads, key heads and values of the MLP."""


def make_gemma(name: str, folder: Path) -> Path:
    """The configuration of a Gemma 3 checkpoint, as its file has it."""
    hidden, layers, heads, kv_heads, intermediate = GEMMA[name]
    text = {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
    }
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": dict.fromkeys(("height", "width"), 896),
    }
    folder.mkdir()
    for file, said in (("config", config), ("preprocessor_config", processor)):
        (folder / f"{file}.json").write_text(json.dumps(said))
    return folder


GEMMA4: dict[str, dict[str, Any]] = {
    "gemma-4-e2b": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "gemma-4-26b-a4b": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "gemma-4-31b": {
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
}
"""Of the language model, what the three do not have alike."""
LARGE = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
"""Of the two large ones alike."""


def make_gemma4(name: str, folder: Path) -> Path:
    """The configuration of a Gemma 4 checkpoint: the small one's tower clamps rows."""
    small = name == "gemma-4-e2b"
    text = {"model_type": "gemma4_text", "final_logit_softcapping": 30.0, **GEMMA4[name]}
    vision: dict[str, Any] = {"model_type": "gemma4_vision", "use_clipped_linears": small}
    if not small:
        text |= LARGE
        vision |= {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "standardize": True,
        }
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "eos_token_id": [1, 106],
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
    }
    folder.mkdir()
    processor = {"image_processor": {"image_seq_length": 280}}
    for file, said in (("config", config), ("processor_config", processor)):
        (folder / f"{file}.json").write_text(json.dumps(said))
    return folder


def make_deepseek(_: str, folder: Path) -> Path:
    """The configuration of DeepSeek-VL2-small, and a tokenizer of its image's token alone."""
    text = {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 10_944,
        "vocab_size": 102_400,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "topk_method": "greedy",
    }
    sizes = [[384 * w, 384 * h] for w in range(1, 10) for h in range(1, 10) if w * h <= 9]
    vision = {"image_size": 384, "patch_size": 14, "width": 1152, "layers": 27, "heads": 16}
    config = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": sizes,
        "global_view_pos": "head",
        "tile_tag": "2D",
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "language_config": text,
        "projector_config": {"input_dim": 1152, "n_embed": 2048, "model_type": "mlp_projector"},
        "vision_config": vision | {"mlp_ratio": 3.7362, "model_type": "vision"},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(
        json.dumps({"candidate_resolutions": sizes, "image_token": "<image>"})
    )
    vocabulary = WordLevel({"<image>": 100_003}, unk_token="<image>")
    Tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    return folder


MAKERS = {
    **dict.fromkeys(GEMMA, make_gemma),
    **dict.fromkeys(GEMMA4, make_gemma4),
    "deepseek-vl2-small": make_deepseek,
}
"""Of models that `make_checkpoint` has no preset for."""


class NoKernel:
    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class NoStream:
    """Streams and events of torch.cuda."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    wait_stream = wait_event = record = synchronize = wait
    __enter__ = __exit__ = wait
    cudaHostRegister = cudaHostUnregister = lambda *_: 0  # noqa: N815 - CUDA's names

    def query(self) -> bool:
        return True


class Peak(TorchDispatchMode):
    """The most bytes of the device that were alive at a time, of tensors made within, and who made
    those that are: functions of saccade by their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.now = 0
        self._live: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each._cdata for each in storages((args, kwargs))}
        if func is torch.ops.aten.copy_.default and args[0].device != META:
            return args[0]  # to the host: there is nothing to be copied
        out = func(*args, **(kwargs or {}))
        for each in storages(out):
            if each._cdata not in self._live and each._cdata not in given:
                self._live[each._cdata] = StorageWeakRef(each), each.nbytes(), maker()
                self.now += each.nbytes()
        self._sweep()
        self.bytes = max(self.bytes, self.now)
        return out

    def _sweep(self) -> None:
        for key in [key for key, (ref, *_) in self._live.items() if ref.expired()]:
            self.now -= self._live.pop(key)[1]

    def kept(self) -> dict[str, int]:
        """Bytes that are alive now, by who made them."""
        gc.collect()
        self._sweep()
        found = Counter[str]()
        for _, nbytes, name in self._live.values():
            found[name] += nbytes
        return dict(found)


def storages(values: object) -> Iterator[torch.UntypedStorage]:
    """Of the device's tensors among these."""
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor) and each.device == META:
            yield each.untyped_storage()


def maker() -> str:
    """The class or function of saccade that asked for memory."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals["__name__"].startswith("saccade."):
        frame = frame.f_back
    if frame is None:
        return "the test"
    name = frame.f_code.co_qualname.removesuffix(".__init__").split(".<locals>")[0]
    return f"{frame.f_globals['__name__'].removeprefix('saccade.')}.{name}"


def named(made_by: Callable[..., Any]) -> str:
    """The name by which `Peak.kept` knows a class or a function."""
    return f"{made_by.__module__.removeprefix('saccade.')}.{made_by.__qualname__}"


class NoWeights(DummyWeights):
    """Of the right shapes. `nbytes`: of all that was asked for."""

    def __init__(self, absent: tuple[str, ...] = ()) -> None:
        super().__init__(BF16, META, ops=TritonOps())
        self.nbytes = 0
        self._absent = absent

    def load(self, *parts: Part) -> torch.Tensor:
        if parts[0].limit:  # a number that the host asks for
            return torch.zeros(())
        shape = (sum(part.wanted[0] for part in parts), *parts[0].wanted[1:])
        made = torch.empty(shape, dtype=self.dtype, device=META)
        self.nbytes += made.nbytes
        return made

    def has(self, name: str) -> bool:
        return name not in self._absent


@dataclass
class Model:
    name: str
    spec: FamilySpec
    net: FamilyNet
    weights: int


def pretend_cuda(patch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device say that they are on a GPU, which takes whatever it is told."""
    made = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return made(*args, **kwargs)

    patch.setattr(torch, "empty", empty)
    patch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.device == META))
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for name in ("Stream", "Event", "stream", "current_stream", "device", "cudart"):
        patch.setattr(torch.cuda, name, NoStream)
    patch.setattr(streams, "_unpin", lambda _: None)
    for module in (step_graphs, pack_graphs):
        patch.setattr(module, "begin_captures", lambda *_: eager)


@contextmanager
def weightless(preset: str, folder: Path) -> Iterator[Model]:
    """A model of `CARDS`. folder: for its JSON files."""
    with pytest.MonkeyPatch.context() as patch:
        for entry in iter_modules(triton_kernels.__path__):
            module = import_module(f"saccade.plugins.gpu.triton.{entry.name}")
            for name, each in list(vars(module).items()):
                if isinstance(each, KernelInterface):
                    patch.setattr(module, name, NoKernel())
        patch.setattr(placement, "generation", lambda _: 90)
        pretend_cuda(patch)
        folder = MAKERS.get(preset, make_checkpoint)(preset, folder)
        # Gemma's head is its table, which no file has twice.
        absent = ("lm_head.weight",) if preset.startswith("gemma") else ()
        spec, weights = load_spec(folder), NoWeights(absent=absent)
        net = family_model(spec).build(weights, UNSHARDED, UNSHARDED)
        yield Model(preset, spec, net, weights.nbytes)


def decide(model: Model) -> tuple[EngineConfig, Hardware]:
    """As a server on its card would."""
    total, used = int(CARDS[model.name] * GIB), model.weights + CONTEXT_BYTES
    card = Hardware("cuda", "", total, total - used, 64 * GIB, arch=90)
    return resolve(ModelOptions(), EngineOptions(), model.spec, "bfloat16", card), card


def bounds(config: EngineConfig) -> StepBounds:
    return StepBounds(
        config.max_running, config.chunk_tokens, config.context_length, config.page_size
    )
