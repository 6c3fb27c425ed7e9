"""The child process in which transformers reports the properties of a checkpoint.

It finds the transformers class, checks whether Saccade can serve it, and reports the outputs of its
processor for an image by size. Started by `facts.py`. Blank images suffice, because only sizes
matter.
"""

from __future__ import annotations

import inspect
import json
import math
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import torch
import transformers
from transformers.models.auto import modeling_auto

from saccade.core.errors import CheckpointError
from saccade.core.family import put_spaces
from saccade.core.types import Size
from saccade.ipc.child import Channel, Disconnected, enter
from saccade.plugins.any_model.facts import (
    INSPECTOR,
    KNOWN_SIZES,
    LARGE_SIZES,
    Answer,
    Deepstack,
    ImageFacts,
    InspectorBoot,
    Joints,
    ModelFacts,
    NoAnswer,
    OwnProcessor,
    Question,
    SizeFacts,
    SizeQuestion,
    TensorKind,
    box_positions,
    content_spans,
    counted,
    with_images,
)
from saccade.plugins.any_model.pixel_tensors import PixelTensor
from saccade.plugins.any_model.processor import (
    EXPERTS,
    TEXT_KEYS,
    ask_image,
    ask_text,
    known_choices,
    load_processor,
    quiet,
    said,
)
from saccade.plugins.any_model.refusals import (
    DEAF,
    Unservable,
    check_config,
    read_text,
    refuse_type,
    ropes,
)

MAX_BYTES = 8 << 30
"""Maximum memory of the process, since a checkpoint's files may demand any image size."""
AROUND = ("x@y", "@x", "x@@y", "x@y@z", "@ x", "@\nx", "@<b>", "@1", "x @.")
"""Test prompts, with @ for an image, whose tokens reveal how a processor joins images and text."""
GREY = 127
AXES = 3
"""Number of position axes of a model with several: time, height, width."""


class Questions:
    """Answers questions about one checkpoint.

    The constructor raises Unservable if it cannot be served, or CheckpointError with the field.
    """

    def __init__(self, own: OwnProcessor) -> None:
        self._config = read_config(Path(own.folder))
        self._class = find_class(self._config)
        refuse_type(self._config, self._class)
        self._text = self._config.get_text_config(decoder=True)
        self._sees = self._class.__name__ in seeing_classes()
        check_config(self._text)
        self._text_facts = read_text(self._text)
        self._processor: Any = None
        self._positions = rope_index(self._config, self._text)
        if self._sees:
            self._processor = processor_of(own)
            self._content = content_token(self._config)
            text = self._processor.image_token
            self._placeholder = self._processor.tokenizer.convert_tokens_to_ids(text)

    def model(self) -> ModelFacts:
        images, text = None, replace(self._text_facts, axes=AXES if self._positions else 1)
        if self._sees:
            sizes = tuple(map(self.size, KNOWN_SIZES))
            largest = tuple(map(self.size, LARGE_SIZES))
            vision = self._config.vision_config.to_dict()
            images = ImageFacts(
                placeholder=self._placeholder,
                content=self._content,
                hidden=int(vision.get("hidden_size") or text.hidden),
                seen=self._seen_tokens(),
                kinds=tensor_kinds([*sizes, *largest]),
                sizes=sizes,
                largest=largest,
                mark=self._processor.image_token,
                deepstack=read_deepstack(self._config),
                joints=self._joints(min(sizes, key=lambda each: len(each.tokens))),
            )
        return ModelFacts(self._config.model_type, self._class.__name__, text, images)

    def _joints(self, image: SizeFacts) -> Joints:
        """Return the rules for the tokens between an image and text, and between two images."""
        mark, tokens = self._processor.image_token, image.tokens
        blank = PIL.Image.new("RGB", image.size[::-1], (GREY, GREY, GREY))
        theirs = {}
        for text in (each.replace("@", mark) for each in AROUND):
            made = ask_text(self._processor, text, [blank] * text.count(mark))
            theirs[text] = made["input_ids"][0].tolist()
        shared = range(tokens.index(self._content), -1, -1)
        for joints in (
            Joints(spaced, count)
            for count in shared
            if tokens[:count] == tokens[len(tokens) - count :]
            for spaced in (False, True)
        ):
            if all(self._written(text, image, joints) == each for text, each in theirs.items()):
                return joints
        wrong = next(
            text for text, each in theirs.items() if self._written(text, image, Joints()) != each
        )
        raise Unservable(
            f"its processor joins text and images by an unknown rule: its tokens for {wrong!r} "
            "differ from the concatenated tokens of the texts and images in this prompt"
        )

    def _written(self, text: str, image: SizeFacts, joints: Joints) -> list[int]:
        """Return the tokens that Saccade computes for a prompt with images.

        text: the prompt, with a placeholder for each image.
        image: the tokens of an image.
        """
        mark = self._processor.image_token
        if joints.spaced:
            text = put_spaces(text, mark)
        plain = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        images = [image.tokens] * text.count(mark)
        return with_images(plain, self._placeholder, images, joints.shared)[0]

    def _seen_tokens(self) -> tuple[int, ...]:
        """Return the IDs of tokens that the model's image experts process. Empty if it has none."""
        if EXPERTS not in self._processor.model_input_names:
            return ()
        tokens = [*range(len(self._processor.tokenizer))]
        kinds = self._processor.create_moe_mm_token_type_ids([tokens])[0]
        return tuple(token for token, kind in enumerate(kinds) if kind)

    def size(self, size: Size) -> SizeFacts:
        """Run the processor on a blank image of this size, and return its tokens and tensors.

        Raises Unservable if the processor rejects it.
        """
        blank = PIL.Image.new("RGB", (size[1], size[0]), (GREY, GREY, GREY))
        text = self._processor.image_token
        try:
            made = ask_image(self._processor, blank)
        except Exception as error:  # processors may raise anything
            raise Unservable(f"its processor rejects an image of this size: {error}") from error
        tokens = tuple(made["input_ids"][0].tolist())
        if self._content not in tokens:
            raise Unservable(
                f"its processor does not write the image token {self._content} of config.json "
                f"into the prompt {text}"
            )
        rule = self._positions
        box = () if rule is None else box_of(rule, made, tokens, self._content)
        return SizeFacts(size, tokens, tuple(pixel_tensors(made)), box)


def box_of(
    rule: Callable[..., Any], made: Any, tokens: Sequence[int], content: int
) -> tuple[int, ...]:
    """Return the extent of an image's rows along each of the model's position axes.

    rule: the model's `get_rope_index`.

    Checks on a prompt with the image twice that positions follow the rule of `counted`, and raises
    Unservable if they do not.
    """
    try:
        kinds = made["mm_token_type_ids"][0].tolist()
        twice = [0, *kinds, 0, *kinds, 0]
        names = (made.keys() - TEXT_KEYS) & inspect.signature(rule).parameters.keys()
        told = {name: torch.cat((made[name],) * 2) for name in names}
        ids = torch.tensor([[content if kind else 0 for kind in twice]])
        found, delta = rule(ids, mm_token_type_ids=torch.tensor([twice]), **told)
    except Exception as error:  # the rule may need other arguments
        raise Unservable(f"it does not provide its multi-axis positions: {error!r}") from error
    spans = content_spans((0, *tokens, 0, *tokens, 0), content)
    rows = found[:, 0, spans[0].start : spans[0].end] - spans[0].start
    box = tuple((rows.max(dim=1).values + 1).tolist())
    if len(spans) == 2 and math.prod(box) == spans[0].length:
        each = [replace(span, image=number) for number, span in enumerate(spans)]
        ours, then = counted(len(twice), each, [box_positions(box)] * 2, AXES)
        if (ours == found[:, 0].numpy()).all() and then == len(twice) + int(delta):
            return box
    raise Unservable("its positions have several axes, by an unknown rule")


def rope_index(config: Any, text: Any) -> Any:
    """Return the model's own `get_rope_index` for multi-axis positions, or None if they are 1-D."""
    name = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    kind = getattr(transformers, name) if isinstance(name, str) else None
    if kind is not None and "get_rope_index" in dir(kind):
        with torch.device("meta"):
            return kind(config).get_rope_index
    if any(rope.get("mrope_section") for rope in ropes(text.to_dict())):
        raise Unservable("its positions have several axes, and the model has no get_rope_index")
    return None


def read_deepstack(config: Any) -> Deepstack | None:
    """Return which layers get image features according to the configuration, or None if none do."""
    said = config.to_dict()
    if pairs := said.get("deepstack_layer_map"):
        layers = {layer for _, layer in pairs} | {*(said.get("spatial_target_layers") or ())}
        return Deepstack(tuple(sorted(layers)), by_number=True)
    if indexes := said["vision_config"].get("deepstack_visual_indexes"):
        return Deepstack(tuple(range(len(indexes))))
    return None


def tensor_kinds(sizes: Sequence[SizeFacts]) -> tuple[TensorKind, ...]:
    """Return the name, dtype and number of dimensions of the tensors at all these sizes, sorted by
    name.
    """
    found = {(t.name, t.dtype, len(t.shape)) for each in sizes for t in each.tensors}
    if len({name for name, *_ in found}) < len(found):
        raise Unservable(
            "the number or dtype of its processor's tensors depends on the image's size"
        )
    return tuple(sorted(found))


def pixel_tensors(made: Any) -> list[PixelTensor]:
    """Return the image tensors in a processor's output."""
    found = []
    for name in sorted(made.keys() - TEXT_KEYS):
        value = made[name]
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            found.append(PixelTensor(name, dtype, tuple(value.shape)))
    if not any(each.name.endswith("pixel_values") for each in found):
        raise Unservable("its processor returns no pixel_values for an image")
    return found


def read_config(folder: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers may raise anything
        raise Unservable(f"transformers cannot read it: {said(error)}") from error


def seeing_classes() -> set[str]:
    named = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return {
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
        *(named[each] for each in DEAF),
    }


def find_class(config: Any) -> Any:
    """Return the transformers class that config.json names in `architectures`, or else the one of
    its model type.
    """
    known = seeing_classes() | set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    names = [*map(str, config.architectures or ())]
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        names.append(mapping.get(config.model_type, ""))
    for name in names[:1] if config.architectures else names:
        if name in known and hasattr(transformers, name):
            return getattr(transformers, name)
    raise Unservable(
        f"{names[0] or config.model_type} is not a model for text, or for images and text, in "
        "transformers"
    )


def processor_of(own: OwnProcessor) -> Any:
    try:
        known = known_choices(load_processor(OwnProcessor(own.folder)))
        processor = load_processor(own)
    except Exception as error:  # transformers may raise anything
        raise Unservable(
            f"transformers cannot create a processor from its files: {said(error)}"
        ) from error
    if not isinstance(vars(processor).get("image_token"), str):
        raise Unservable("its processor has no image_token")
    if unknown := sorted(json.loads(own.choices).keys() - known):
        raise Unservable(
            f"its image processor has no option {unknown[0]}; it has {', '.join(sorted(known))}"
        )
    return processor


def content_token(config: Any) -> int:
    """Return the ID of the image token, of which a prompt has one per row of an image's
    embedding.
    """
    said = config.to_dict()
    if not isinstance(said.get("vision_config"), dict):
        raise Unservable("config.json describes no vision encoder for its images (vision_config)")
    for part in (said, said["vision_config"]):
        for name in ("image_token_id", "image_token_index"):
            if isinstance(part.get(name), int):
                return int(part[name])
    raise Unservable("config.json has no image_token_id")


def serve(channel: Channel[Answer, Question], own: OwnProcessor) -> None:
    """Answer questions from `channel` until it is closed."""
    questions: Questions | None = None
    with suppress(Disconnected):
        while True:
            question = channel.receive()
            try:
                questions = questions or Questions(own)
                if isinstance(question, SizeQuestion):
                    channel.send(questions.size(question.size))
                else:
                    channel.send(questions.model())
            except (CheckpointError, Unservable) as error:
                channel.send(NoAnswer(str(error)))


def main() -> int:
    boot, link = enter(InspectorBoot)
    torch.set_num_threads(1)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    quiet()
    serve(Channel(link.socket, INSPECTOR), boot.processor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
