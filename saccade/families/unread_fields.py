"""Fields of a checkpoint's JSON files that transformers reads but families do not.

These tables list why a field may be ignored, and for which values. With any other value, the
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
    """Why a field may be ignored."""

    why: str
    neutral: tuple[Any, ...] | None = None  # the values for which it may be; `None` means all

    def allows(self, value: Any) -> bool:
        """Return True if the field may be ignored with this value, or a list of such values."""
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
TENSORS = Unread("about a call's tensors, which servers make themselves")
NOT_A_MODEL = Unread("prompts and answers get these tokens from the tokenizer and chat template")
AS_SIZES = Unread("sizes follow from other fields", ())
WINDOWS = Unread("used with use_sliding_window alone, which is refused")

PIXELS: Fields = {
    "do_resize": Unread("images are resized to whole tokens", (True,)),
    "do_rescale": Unread("pixels are divided by 255", (True,)),
    "rescale_factor": Unread("pixels are divided by 255", (1 / 255,)),
    "do_normalize": Unread("pixels are normalised by image_mean and image_std", (True,)),
    "image_mean": Unread("used with do_normalize alone, which the family refuses"),
    "image_std": Unread("used with do_normalize alone, which the family refuses"),
    "resample": Unread("images are resized by bicubic filters (3)", (3,)),
    "do_center_crop": Unread("images are not cropped", (False,)),
    "crop_size": Unread("used with do_center_crop alone, which is refused"),
    "pad_size": Unread("images are not padded to a common size", ()),
    "do_pad": Unread("makes one size of a call's images, which are encoded one by one here"),
    "do_convert_rgb": Unread("images are made RGB, which changes none that is RGB"),
    "default_to_square": Unread("how a number as `size` is meant; `size` must be an object"),
    "size": Unread("the family's other fields decide sizes"),
    "image_seq_length": Unread("tokens are counted from an image's size"),
    "crop_to_patches": Unread("the model's own processor sets it regardless of the file"),
    "return_row_col_info": Unread("the model's own processor sets it"),
    "pan_and_scan_min_crop_size": Unread("used with do_pan_and_scan alone, which is refused"),
    "pan_and_scan_max_num_crops": Unread("used with do_pan_and_scan alone, which is refused"),
    "pan_and_scan_min_ratio_to_activate": Unread("used with do_pan_and_scan alone"),
    "data_format": TENSORS,
    "input_data_format": TENSORS,
    "device": TENSORS,
    "disable_grouping": TENSORS,
    "return_tensors": TENSORS,
}
"""Fields of the image processor's file and of the video processor's file."""

VIDEOS: Fields = PIXELS | {
    "do_sample_frames": Unread("frames are sampled by fps, num_frames and the request"),
    "fps": Unread("these models sample by max_num_frames alone"),
    "num_frames": Unread("these models sample by max_num_frames alone"),
    "video_metadata": TENSORS,
    "return_metadata": TENSORS,
    "use_image_id": Unread("read from the image processor's file"),
    # fields of video processors that no family supports
    "max_image_size": Unread("videos of these models are not taken"),
    "max_duration": Unread("videos of these models are not taken"),
    "max_soft_tokens": Unread("videos of these models are not taken"),
    "pooling_kernel_size": Unread("videos of these models are not taken"),
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
    "tie_word_embeddings": Unread("the flag at the top counts, and a stored head before it"),
    "head_dim": Unread("heads with latents have sizes of their own fields"),
    "hidden_act": Unread("MLPs have silu", ("silu",)),
    "layer_types": Unread("each layer sees all tokens before it", ("full_attention",)),
    "sliding_window": WINDOWS,
    "max_window_layers": WINDOWS,
    "use_sliding_window": Unread("each layer sees all tokens before it", (False,)),
    "num_experts": Unread("used with enable_moe_block alone"),
    "top_k_experts": Unread("used with enable_moe_block alone"),
    "moe_intermediate_size": Unread("used with enable_moe_block alone"),
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
    "image_size": Unread("the tower has no positions of one size"),
    "insert_layer_id": Unread("the field at the top counts"),
    "vision_use_head": Unread("the tower's own head is not used"),
    "max_position_embeddings": Unread("rotations are computed for any image"),
    "img_max_token_num": Unread("not used by transformers' modules"),
    "max_vit_seq_len": Unread("not used by transformers' modules"),
    "min_image_size": Unread("not used by transformers' modules"),
    "out_hidden_size": Unread("the language model's width counts, as the tensors have it"),
    "text_hidden_size": Unread("the language model's width counts, as the tensors have it"),
}
"""Fields of the vision encoder's section of config.json."""

TOP: Fields = TEXT | {
    "audio_config": Unread("sounds are not taken"),
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
    "image_size": Unread("the tower's section counts"),
}
"""Fields at the top level of config.json, where older files have the language model's fields."""

NOT_AN_ANSWER = Unread("about how transformers computes, not what")
DRAFTS = Unread("drafts change no answer")
BEAMS = Unread("used with num_beams alone, which is refused")
SAMPLING = Unread("not implemented", ())
ONE_DRAW = Unread("an answer is drawn token by token, without beams", (1,))

GENERATION: Fields = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), NOT_A_MODEL),
    # length
    "max_length": Unread("bounds prompt and answer together, as --context-length does"),
    "min_length": Unread("counts the prompt; use min_new_tokens", (0,)),
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
    "remove_invalid_values": Unread("an answer with such values ends with an error"),
    "renormalize_logits": Unread("the draw does so"),
    # beams
    "num_beams": ONE_DRAW,
    "num_beam_groups": ONE_DRAW,
    "num_return_sequences": Unread("use a request's n", (1,)),
    "diversity_penalty": Unread("an answer is drawn token by token, without beams", (0,)),
    "constraints": SAMPLING,
    "force_words_ids": SAMPLING,
    "length_penalty": BEAMS,
    "early_stopping": BEAMS,
    # computation and format of the result
    "is_assistant": Unread("a draft model for another model", (False,)),
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
    """Raise CheckpointError if a field that the family has not read may not be ignored with its
    value.

    Files that the family has not read are skipped.
    """
    for section, fields in _sections(checkpoint):
        _refuse(section, fields)


def refuse_generation(generation: Section) -> None:
    """Raise CheckpointError for an unsupported field of generation_config.json that changes
    outputs.
    """
    _refuse(generation, GENERATION, "; without the field the model is served without it")


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
