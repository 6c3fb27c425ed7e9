"""Rejects checkpoints with fields that transformers reads but families do not, unless they have no
effect.

The tables list why a field may be ignored, and for which values. With any other value, the
checkpoint is rejected with the field's name, so that no field is silently ignored.
`tests/families/test_unread_fields.py` compares the tables with transformers' classes. Runs without
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Checkpoint, Section


@dataclass(frozen=True, slots=True)
class Unread:
    """Why a field may be ignored, and for which values."""

    why: str
    neutral: tuple[Any, ...] | None = None  # the values for which it may be; `None` means all

    def allows(self, value: Any) -> bool:
        """Return True if the field may be ignored with this value, or with each value in a list."""
        if self.neutral is None or value is None:
            return True
        if isinstance(value, list):
            return all(map(self.allows, value))
        return any(_equal(value, each) for each in self.neutral)


def _equal(value: Any, other: Any) -> bool:
    numbers = [each for each in (value, other) if type(each) in (int, float)]
    if len(numbers) == 2:
        return math.isclose(value, other, rel_tol=1e-6)
    return type(value) is type(other) and bool(value == other)


Fields = dict[str, Unread]

TRAINING = Unread("training only")
TENSORS = Unread("it concerns tensors of a call, which the server creates itself")
NOT_A_MODEL = Unread("prompts and answers get these tokens from the tokenizer and chat template")
AS_SIZES = Unread("sizes follow from other fields", ())
WINDOWS = Unread("used only with use_sliding_window, which is rejected")

PIXELS: Fields = {
    "do_resize": Unread("images are resized to whole tokens", (True,)),
    "do_rescale": Unread("pixels are divided by 255", (True,)),
    "rescale_factor": Unread("pixels are divided by 255", (1 / 255,)),
    "do_normalize": Unread("pixels are normalized by image_mean and image_std", (True,)),
    "image_mean": Unread("used only with do_normalize, which the family rejects"),
    "image_std": Unread("used only with do_normalize, which the family rejects"),
    "resample": Unread("images are resized by bicubic filters (3)", (3,)),
    "do_center_crop": Unread("images are not cropped", (False,)),
    "crop_size": Unread("used only with do_center_crop, which is rejected"),
    "pad_size": Unread("images are not padded to a common size", ()),
    "do_pad": Unread("pads the images of a call to one size, but images are encoded one by one"),
    "do_convert_rgb": Unread("images are converted to RGB"),
    "default_to_square": Unread("applies only to a number as `size`; `size` must be an object"),
    "size": Unread("sizes follow from the family's other fields"),
    "image_seq_length": Unread("tokens are counted from an image's size"),
    "crop_to_patches": Unread("the model's own processor sets it regardless of the file"),
    "return_row_col_info": Unread("the model's own processor sets it"),
    "pan_and_scan_min_crop_size": Unread("used only with do_pan_and_scan, which is rejected"),
    "pan_and_scan_max_num_crops": Unread("used only with do_pan_and_scan, which is rejected"),
    "pan_and_scan_min_ratio_to_activate": Unread("used only with do_pan_and_scan"),
    "data_format": TENSORS,
    "input_data_format": TENSORS,
    "device": TENSORS,
    "disable_grouping": TENSORS,
    "return_tensors": TENSORS,
}
"""Fields of the image processor's file and of the video processor's file."""

VIDEOS: Fields = PIXELS | {
    "do_sample_frames": Unread("frames are sampled by fps, num_frames and the request"),
    "fps": Unread("these models sample by max_num_frames only"),
    "num_frames": Unread("these models sample by max_num_frames only"),
    "video_metadata": TENSORS,
    "return_metadata": TENSORS,
    "use_image_id": Unread("read from the image processor's file"),
    # fields of video processors that no family supports
    "max_image_size": Unread("videos of these models are not supported"),
    "max_duration": Unread("videos of these models are not supported"),
    "max_soft_tokens": Unread("videos of these models are not supported"),
    "pooling_kernel_size": Unread("videos of these models are not supported"),
}

SIZE: Fields = dict.fromkeys(
    (
        *("height", "width", "shortest_edge", "longest_edge"),
        *("max_height", "max_width", "min_pixels", "max_pixels"),
    ),
    AS_SIZES,
)
"""Fields of the object `size`, if the family reads other fields of it."""

TEXT: Fields = {
    "attention_dropout": TRAINING,
    "initializer_range": TRAINING,
    "output_router_logits": TRAINING,
    "router_aux_loss_coef": TRAINING,
    "pretraining_tp": TRAINING,
    "use_cache": Unread("keys and values are always cached"),
    "bos_token_id": NOT_A_MODEL,
    "eos_token_id": NOT_A_MODEL,
    "eod_token_id": NOT_A_MODEL,
    "sep_token_id": NOT_A_MODEL,
    "pad_token_id": NOT_A_MODEL,
    "tie_word_embeddings": Unread(
        "the flag at the top level is used, unless the checkpoint has a head"
    ),
    "head_dim": Unread("for latents (MLA), the sizes of heads have separate fields"),
    "hidden_act": Unread("MLPs have silu", ("silu",)),
    "layer_types": Unread("each layer attends to all earlier tokens", ("full_attention",)),
    "sliding_window": WINDOWS,
    "max_window_layers": WINDOWS,
    "use_sliding_window": Unread("each layer attends to all earlier tokens", (False,)),
    "num_experts": Unread("used only with enable_moe_block"),
    "top_k_experts": Unread("used only with enable_moe_block"),
    "moe_intermediate_size": Unread("used only with enable_moe_block"),
}
"""Fields of the language model's section of config.json."""

VISION: Fields = {
    "attention_dropout": TRAINING,
    "hidden_dropout_prob": TRAINING,
    "projection_dropout": TRAINING,
    "drop_path_rate": TRAINING,
    "initializer_range": TRAINING,
    "layer_scale_init_value": TRAINING,
    "use_mask_token": TRAINING,
    "in_channels": Unread("images have three channels", (3,)),
    "in_chans": Unread("images have three channels", (3,)),
    "num_channels": Unread("images have three channels", (3,)),
    "image_size": Unread("the vision encoder has no positions of a fixed size"),
    "insert_layer_id": Unread("the field at the top level is used"),
    "vision_use_head": Unread("the vision encoder's own head is not used"),
    "max_position_embeddings": Unread("rotations are computed for any image"),
    "img_max_token_num": Unread("not used by transformers' modules"),
    "max_vit_seq_len": Unread("not used by transformers' modules"),
    "min_image_size": Unread("not used by transformers' modules"),
    "out_hidden_size": Unread("the language model's width is used, as in the tensors"),
    "text_hidden_size": Unread("the language model's width is used, as in the tensors"),
}
"""Fields of the vision encoder's section of config.json."""

TOP: Fields = TEXT | {
    "audio_config": Unread("audio is not supported"),
    "boa_token_id": NOT_A_MODEL,
    "eoa_token_index": NOT_A_MODEL,
    "im_start_id": NOT_A_MODEL,
    "im_end_id": NOT_A_MODEL,
    "im_newline_id": NOT_A_MODEL,
    "image_start_token_id": NOT_A_MODEL,
    "image_end_token_id": NOT_A_MODEL,
    "video_start_token_id": NOT_A_MODEL,
    "video_end_token_id": NOT_A_MODEL,
    "video_token_id": NOT_A_MODEL,
    "vision_start_token_id": NOT_A_MODEL,
    "vision_end_token_id": NOT_A_MODEL,
    "image_size": Unread("the vision encoder's section is used"),
}
"""Fields at the top level of config.json, where older files have the language model's fields."""

NOT_AN_ANSWER = Unread("it affects how transformers computes, not the result")
DRAFTS = Unread("drafts do not change answers")
BEAMS = Unread("used only with num_beams, which is rejected")
SAMPLING = Unread("not implemented", ())
ONE_DRAW = Unread("beam search is not supported", (1,))

GENERATION: Fields = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), NOT_A_MODEL),
    # length
    "max_length": Unread("it limits prompt and answer together, as --context-length does"),
    "min_length": Unread("it counts the prompt; use min_new_tokens", (0,)),
    "max_time": SAMPLING,
    "exponential_decay_length_penalty": SAMPLING,
    # sampling
    "begin_suppress_tokens": SAMPLING,
    "forced_bos_token_id": SAMPLING,
    "forced_eos_token_id": SAMPLING,
    "sequence_bias": Unread("use a request's logit_bias", ()),
    "encoder_no_repeat_ngram_size": Unread("not implemented", (0,)),
    "encoder_repetition_penalty": Unread("not implemented", (1,)),
    "typical_p": Unread("not implemented", (1,)),
    "epsilon_cutoff": Unread("not implemented", (0,)),
    "eta_cutoff": Unread("not implemented", (0,)),
    "top_h": SAMPLING,
    "guidance_scale": Unread("not implemented", (1,)),
    "watermarking_config": SAMPLING,
    "dola_layers": SAMPLING,
    "penalty_alpha": Unread("contrastive search is not implemented", (0,)),
    "token_healing": Unread("not implemented", (False,)),
    "remove_invalid_values": Unread("an answer with NaN or infinity ends with an error"),
    "renormalize_logits": Unread("sampling normalizes anyway"),
    # beams
    "num_beams": ONE_DRAW,
    "num_beam_groups": ONE_DRAW,
    "num_return_sequences": Unread("use a request's n", (1,)),
    "diversity_penalty": Unread("beam search is not supported", (0,)),
    "constraints": SAMPLING,
    "force_words_ids": SAMPLING,
    "length_penalty": BEAMS,
    "early_stopping": BEAMS,
    # computation and format of the result
    "is_assistant": Unread("this is a draft model for another model", (False,)),
    **dict.fromkeys(
        (
            *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
            *("assistant_ensemble_weight", "target_lookbehind", "speculation_type", "use_mtp"),
            *("num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
        ),
        DRAFTS,
    ),
    **dict.fromkeys(
        (
            *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
            *("compile_config", "disable_compile", "prefill_chunk_size"),
            *("continuous_batching_config", "output_attentions", "output_hidden_states"),
            *("output_logits", "output_scores", "return_dict_in_generate"),
            "transformers_version",
        ),
        NOT_AN_ANSWER,
    ),
}
"""Fields of generation_config.json, except eos_token_id and those that `front/answer_defaults.py`
reads.
"""

SECTIONS: Mapping[str, Fields] = {
    "text_config": TEXT,
    "language_config": TEXT,
    "vision_config": VISION,
    "vlm_config": TOP,
}
"""Sections of config.json, at any depth."""


def refuse_unread(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a field that the family has not read has an effect.

    Files that the family has not read are skipped.
    """
    for section, fields in _sections(checkpoint):
        _refuse(section, fields)


def refuse_generation(generation: Section) -> None:
    """Raise CheckpointError for an unsupported field of generation_config.json that changes
    outputs.
    """
    _refuse(generation, GENERATION, "; remove the field to serve the model without it")


def _refuse(section: Section, fields: Fields, remedy: str = "") -> None:
    for name in sorted(fields.keys() & section.data.keys()):
        value, unread = section.data[name], fields[name]
        if not section.looked_up(name) and not unread.allows(value):
            raise CheckpointError(
                f"{section.where}: {name} {json.dumps(value)} is not supported: "
                f"{unread.why}{remedy}"
            )


def _sections(checkpoint: Checkpoint) -> Iterator[tuple[Section, Fields]]:
    yield from _nested(checkpoint.config, TOP)
    for file, fields in ((checkpoint.processor, PIXELS), (checkpoint.video, VIDEOS)):
        if not file.used:
            continue
        yield file, fields
        if file.looked_up("size") and isinstance(file.data.get("size"), dict):
            yield file.section("size"), SIZE


def _nested(section: Section, fields: Fields) -> Iterator[tuple[Section, Fields]]:
    yield section, fields
    for name, inner in SECTIONS.items():
        if section.looked_up(name) and section.has(name):
            yield from _nested(section.section(name), inner)
