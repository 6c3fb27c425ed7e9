"""The network of a checkpoint that transformers' own modules compute.

It consists of their vision encoder, which runs image by image, their decoder layers with Saccade's
paged attention, and Saccade's output head. transformers loads the weights. The code is the same for
all models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import IMAGES_ADAPTER, weights_elsewhere
from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.reference.ops import Ops
from saccade.nn.family_model import FamilyModel, FullNet, NoVision, VisionOnlyNet
from saccade.nn.protocol import Attention, Batch, VisionNet
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.any_model import check, trial
from saccade.plugins.any_model.attention import NAME, PagedCall
from saccade.plugins.any_model.handed import (
    LOGITS,
    alike,
    find_difference,
    find_step_difference,
    watch,
)
from saccade.plugins.any_model.head import AfterHead, ways
from saccade.plugins.any_model.layered import Learned, for_layers, own_rows
from saccade.plugins.any_model.merged import merge_adapter
from saccade.plugins.any_model.processor import quiet, said
from saccade.plugins.any_model.products import pack
from saccade.plugins.any_model.prompts import marks
from saccade.plugins.any_model.refusals import DEAF, Unservable
from saccade.plugins.any_model.rope import keep_rope
from saccade.plugins.any_model.spec import AnySpec
from saccade.plugins.any_model.tower import AnyTower

logger = logging.getLogger("saccade")
ANY_NAME = "there is no such tensor"
"""A tensor name that no file contains. Unlike files, random weights contain a tensor of any
name.
"""
NO_SOUNDS = "audio is not supported;"
MERGED = {
    True: "(an adapter for images) is part of its weights, for all requests",
    False: (
        "is missing: the base weights answer about images, without the adapter that was trained "
        "for them"
    ),
}
SHORT = (
    "its rotary embedding has different factors for short and long texts (longrope): the context "
    "is limited to short texts; --family-option rope=long allows the model's full context, with "
    "the factors for long texts from the first token on"
)
LONG = (
    "rope=long: all texts use the factors for long texts; transformers' generate uses other "
    "factors for short texts, so its answers to them may differ"
)


class AnyText:
    """Runs transformers' decoder with paged attention. Implements `nn.protocol.LanguageModel`."""

    __slots__ = (
        "behind",
        "decoder",
        "deepstack",
        "dim",
        "embedding",
        "hidden",
        "learned",
        "matrix",
        "ops",
        "seen",
    )

    def __init__(self, model: Any, tower: AnyTower | None, spec: AnySpec, ops: Ops) -> None:
        """Set up the decoder, and compare it with the model's own `generate`.

        tower: the vision encoder, or None for a text-only model.

        Raises CheckpointError if results differ.
        """
        text, images = spec.facts.text, spec.facts.images
        self.hidden = text.hidden
        self.dim = text.head_dim
        self.deepstack = images.deepstack if images else None
        self.decoder = model.get_decoder()
        self.embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        with trial.refusing(spec, trial.OURS):
            linear = isinstance(head, torch.nn.Linear)
            if not linear or head.bias is not None:
                raise Unservable("its output head is not a matrix, or has a bias")
        seen = images.seen if images else ()
        self.seen = torch.tensor(seen, device=head.weight.device) if seen else None
        self.learned: Learned | None = None
        self.ops = ops
        with torch.inference_mode():
            if text.near is not None:
                keep_rope(self.decoder, text.near, spec.long)
            token = self._telling_token(spec)
            with trial.refusing(spec, trial.TEXT):
                theirs = model(input_ids=token[None], use_cache=False).logits[0]
            trials = trial.run_own(model, spec)
            pack(model, head, ops)
            self.matrix = DenseMatrix(head.weight.detach()).ready(ops)
            with trial.refusing(spec, trial.OURS):
                self.behind = self._checked(model, spec, token, theirs)
                attend_by(self.decoder, NAME)
                self._compare(trials, tower, spec)

    def _checked(
        self, model: Any, spec: AnySpec, token: torch.Tensor, theirs: torch.Tensor
    ) -> AfterHead:
        """Return the operations after the output head that reproduce the model's own logits
        `theirs` for one token.

        Raises Unservable if no known operations do.
        """
        attend_by(self.decoder, check.NAME)
        state = check.counted_token(spec.facts.text, self.run, self.embedding(token))
        plain = self.matrix.logits(self.ops, state)
        for way in ways(model.config.get_text_config(decoder=True)):
            if alike(way.apply(plain), theirs):
                return way
        raise Unservable(
            "its own forward pass returns other logits for one token: it has operations that "
            "Saccade does not support"
        )

    def _compare(
        self, trials: Sequence[trial.OwnAnswer], tower: AnyTower | None, spec: AnySpec
    ) -> None:
        device = self.embedding.weight.device
        batches = []
        for each in trials:
            canvases = each.prompt.canvases
            rows = [tower.encode_canvas(*canvas) for canvas in canvases] if tower else []
            none = torch.zeros((0, spec.embedding_width), device=device)
            made = torch.cat(rows) if rows else none
            batches.append(trial.batch_of(each.prompt, made, device))
        if tower is not None:
            ours = [self._embed(batch) for batch in batches]
            found = trial.learned_rows(list(zip(trials, ours, strict=True)), marks(spec))
            self.learned = Learned(found) if found else None
        for each, batch in zip(trials, batches, strict=True):
            with watch(self.decoder, stop=each.logits is None) as watched:
                self(batch, check.PromptAttention(spec.facts.text))
            assert watched.handed is not None
            if why := find_difference(watched.handed, each.handed):
                raise Unservable(why)
            if each.logits is None or watched.states is None:
                continue
            if not self._same_logits(watched.states, each.logits):
                raise Unservable("its logits for a prompt differ from those of its own generate")
            self._compare_step(each, batch.embeddings, spec)

    def _compare_step(self, own: trial.OwnAnswer, rows: torch.Tensor, spec: AnySpec) -> None:
        assert own.step is not None, "its layers were run"
        prompt = own.prompt.followed_by(own.step.token)
        with watch(self.decoder) as watched:
            batch = trial.batch_of(prompt, rows, self.embedding.weight.device)
            self(batch, check.PromptAttention(spec.facts.text))
        assert watched.handed is not None and watched.states is not None
        if why := find_step_difference(watched.handed, own.step.arguments):
            raise Unservable(why)
        if not self._same_logits(watched.states, own.step.logits):
            raise Unservable("its logits for a decode step differ from those of its own generate")

    def _same_logits(self, states: torch.Tensor, theirs: torch.Tensor) -> bool:
        return alike(self.logits(states[-1:])[0], theirs.float(), LOGITS[states.dtype])

    def _telling_token(self, spec: AnySpec) -> torch.Tensor:
        """Return [1]: the ID of the token with the largest embedding, other than those for
        images.
        """
        sizes: torch.Tensor = self.embedding.weight.norm(dim=1)
        if images := spec.facts.images:
            sizes[[images.placeholder, images.content, *images.seen]] = 0.0
        return sizes.argmax()[None]

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Return the states [T, hidden] after the last norm."""
        x = self._embed(batch)
        call = PagedCall(attention, self.dim, len(x), x.device)
        more: dict[str, Any] = {}
        if self.seen is not None:
            more["moe_mm_token_type_ids"] = torch.isin(batch.tokens, self.seen).int()[None]
        if self.deepstack is not None and batch.splice_rows.shape[0]:
            more |= for_layers(self.deepstack, batch, self.hidden, x.dtype)
        return self.run(x, batch.positions, call, **more)

    def _embed(self, batch: Batch) -> torch.Tensor:
        x: torch.Tensor = self.embedding(batch.tokens)
        if self.learned is not None:
            x = self.learned.put_rows(x, batch.tokens)
        if batch.splice_rows.shape[0]:
            rows = (
                batch.embeddings
                if self.deepstack is None
                else own_rows(self.deepstack, batch, self.hidden)
            )
            x = x.index_copy(0, batch.splice_rows, rows.to(x.dtype))
        return x

    def run(
        self, x: torch.Tensor, positions: torch.Tensor, call: PagedCall, **more: Any
    ) -> torch.Tensor:
        """Run the decoder on x [T, hidden] at positions [axes, T] -> [T, hidden]."""
        places = positions if len(positions) == 1 else positions[:, None]
        made = self.decoder(
            inputs_embeds=x[None], position_ids=places, use_cache=False, paged=call, **more
        )
        states: torch.Tensor = made.last_hidden_state[0]
        return states

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states` unchanged because they are normalized already."""
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits, [R, hidden] -> [R, vocab_size] in float32."""
        return self.behind.apply(self.matrix.logits(self.ops, states)).float()


def attend_by(decoder: Any, name: str) -> None:
    """Set the attention implementation of the decoder only.

    The vision encoder keeps its own, although its configuration may be part of the decoder's.
    """
    decoder.config._attn_implementation = {"": name}


class AnyModel(FamilyModel):
    """A model that transformers' own modules compute. Saccade does not know its tensor names, so it
    rejects no tensor.
    """

    spec: AnySpec

    names = ((r"^model\.language_model\.", "model."),)
    unused = ("",)

    def build_tower(self, weights: Weights, _encoder_shard: Shard) -> VisionOnlyNet:
        """Load the whole model, and release its language model."""
        model = self._read(weights)
        pack(model, model.get_output_embeddings(), weights.ops)
        return VisionOnlyNet(self.spec, weights.ops, self._tower(model), weights.adapters)

    def build(self, weights: Weights, _shard: Shard, _encoder_shard: Shard) -> FullNet:
        """Create the network.

        Raises CheckpointError if a tensor is missing, or a layer needs more than paged attention.
        """
        spec, model = self.spec, self._read(weights)
        tower = self._tower(model) if spec.sees_images else None
        text = AnyText(model, tower, spec, weights.ops)
        logger.warning(
            "%s is not implemented natively: it runs on transformers' modules "
            "(transformers_any), with Saccade's paged attention and %s kernels. Steps are "
            "slower, images are encoded one by one, and CUDA graphs, several ranks, quantization "
            "and adapters (LoRA) are not supported",
            spec.facts.architecture,
            weights.ops.name,
        )
        if spec.facts.text.near is not None:
            logger.warning("%s", LONG if spec.long else SHORT)
        vision: VisionNet = NoVision() if tower is None else tower
        return FullNet(spec, weights.ops, vision, text, weights.adapters)

    def _tower(self, model: Any) -> AnyTower:
        return AnyTower(model, self.spec)

    def _read(self, weights: Weights) -> Any:
        quiet()
        folder, kind = self.spec.folder, getattr(transformers, self.spec.facts.architecture)
        if weights.has(ANY_NAME):
            config = transformers.AutoConfig.from_pretrained(folder)
            with torch.device(weights.device):
                return kind(config).to(weights.dtype).eval()
        try:
            model, told = kind.from_pretrained(
                **self._source(kind, weights), dtype=weights.dtype, output_loading_info=True
            )
        except Exception as error:  # transformers may raise anything
            raise CheckpointError(
                f"{folder}: transformers cannot load it: {said(error)}"
            ) from error
        merged = merge_adapter(model, folder)
        if self.spec.facts.model_type in DEAF:
            logger.warning("%s %s", NO_SOUNDS, f"{folder / IMAGES_ADAPTER} {MERGED[merged]}")
        if missing := sorted(told["missing_keys"]):
            raise CheckpointError(f"{folder}: {len(missing)} tensors are missing: {missing[0]}")
        for each in model.parameters():
            # they are views of the memory-mapped file, which may be modified or deleted
            each.data = each.data.clone()
        model = model.to(weights.device).eval()
        for name, value in model.state_dict().items():
            weights.found(name, value)
        return model

    def _source(self, kind: Any, weights: Weights) -> dict[str, Any]:
        """Return transformers' keyword arguments that say where the weights are: the directory, or
        the tensors of GGUF files.
        """
        folder = self.spec.folder
        if not weights_elsewhere(folder):
            return {"pretrained_model_name_or_path": folder, "use_safetensors": True}
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            wanted = kind(config).state_dict()
        names = {name: self.canonical_name(name) for name in wanted}
        found = {
            name: weights.load(Part(names[name], tuple(each.shape)))
            for name, each in wanted.items()
            if weights.has(names[name])
        }
        return {"pretrained_model_name_or_path": None, "config": config, "state_dict": found}

    def projection(self, _name: str) -> bool:
        """Return False, because no matrix is quantized."""
        return False
