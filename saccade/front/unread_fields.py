"""Fields that clients send but that no API uses: which ones are ignored, and which ones are
rejected.

The table applies to every API. A field that cannot change an answer is ignored (`IGNORED`,
`IgnoredFields`). Any other field is accepted with a value that has no effect (`NEUTRAL`; always
null, false, "", [] and {}). With other values, it is rejected with an error that names it.
`api/body_schema.py` applies these rules to bodies, `fields.py` to the objects in them, and
`members.py` to objects that are passed on as received.

Two types of objects accept unknown fields: `AnyFields` ignores all of them, and `UnsupportedFields`
all except those that carry images or set their size. All other classes forbid unknown fields
(`forbid_unknown_fields`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

Nothing = (
    Annotated[list[Any], Meta(max_length=0)]
    | Annotated[str, Meta(max_length=0)]
    | Annotated[dict[str, Any], Meta(max_length=0)]
    | None
)
"""An empty value. With any other value, the field would change the prompt."""
Neutral = Mapping[str, tuple[Any, ...]]
"""For each field, the values that have no effect. If there are none, only null has no effect."""

IGNORED = frozenset(
    {
        # ---- identity of the user, and notes of the client's
        "chat_id",
        "client_metadata",
        "litellm_call_id",
        "litellm_metadata",
        "metadata",
        "request_id",
        "rid",
        "safety_identifier",
        "session_id",
        "trace",
        "trace_id",
        "user",
        "user_id",
        "user_profile_id",
        # ---- for the HTTP client or a gateway
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "drop_params",
        "extra_headers",
        "extra_query",
        "max_retries",
        "num_retries",
        "timeout",
        # ---- choice of a server, and its caches: OpenRouter, LM Studio, llama.cpp ...
        "cache_prompt",
        "data_parallel_rank",
        "id_slot",
        "keep_alive",
        "models",
        "prompt_cache_max_len",
        "provider",
        "route",
        "ttl",
        # ---- methods of computing the same answer
        "draft_model",
        "guided_decoding_backend",
        "prediction",
        "prompt_lookup_num_tokens",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
        # ---- information in addition to the answer
        "perf_metrics_in_response",
        "return_progress",
        "timings_per_token",
        "tool_stream",
        "usage",
        "verbose",
        # ---- parameters of samplers that have no effect while the sampler is off
        "adaptive_decay",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "mirostat_eta",
        "mirostat_tau",
        "smoothing_curve",
        "xtc_threshold",
        # ---- context shifts: this server rejects a prompt that is too long
        "n_discard",
        "n_keep",
    }
)
"""Fields that never change an answer, whatever their value is."""

NEUTRAL: Neutral = {
    # ---- OpenAI's and Anthropic's
    "audio": (),
    "background": (False,),
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "conversation": (),
    "fallback_credit_token": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "inference_geo": ("global",),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "speed": ("standard",),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "web_search_options": (),
    # ---- vLLM's, SGLang's and Cohere's
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "embed_dtype": ("float32",),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "no_stop_trim": (False,),
    "normalize": (True,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "stream_reasoning": (True,),
    "structural_tag": (),
    "top_logprobs_num": (0,),
    "truncate": ("NONE",),
    "use_activation": (True,),
    "use_beam_search": (False,),
    # ---- llama.cpp's, Ollama's and LM Studio's
    "adaptive_target": (-1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": (),
    "lora": ([],),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "n_indent": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "num_predict": (-1,),
    "parse_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "repeat_last_n": (-1, 64),
    "repeat_penalty": (1,),
    "t_max_predict_ms": (-1, 0),
    "t_max_prompt_ms": (-1, 0),
    "tfs_z": (1,),
    "think": (),
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "xtc_probability": (0,),
    # ---- TGI's, text-generation-webui's and KoboldCpp's
    "add_bos_token": (True,),
    "dynatemp_high": (1,),
    "dynatemp_low": (1,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "do_sample": (True,),
    "guidance_scale": (1,),
    "mirostat_mode": (0,),
    "nsigma": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "rep_pen": (1,),
    "skew": (0,),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "top_a": (0,),
    "top_n_tokens": (0,),
    "typical": (1,),
    "typical_p": (1,),
    # ---- hosting providers'
    "context_length_exceeded_behavior": ("error",),
    "incremental_output": (True,),
    "plugins": ([],),
    "result_format": ("message",),
    "safe_prompt": (False,),
    "tool_choice": ("auto", "none"),
    "transforms": ([], ["middle-out"]),  # prompts that are too long are rejected
}
"""Fields of other servers, grouped by server, with the values that have no effect. Fields that the
API itself uses are not looked up here.
"""

INSTEAD = {
    "clear_thinking": "send it in chat_template_kwargs",
    "extra_body": "send its fields in the body itself",
    "function_call": "use tool_calls in messages, and tool_choice",
    "functions": "use tools",
    "max_new_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "num_predict": "use max_tokens",
    "options": "send its fields in the body itself",
    "partial": "use continue_final_message",
    "prefix": "use continue_final_message",
    "random_seed": "use seed",
    "rep_pen": "use repetition_penalty",
    "repeat_penalty": "use repetition_penalty",
    "think": "use enable_thinking",
}
"""What a client can send or do instead of a rejected field."""


def says_nothing(value: object) -> bool:
    """Return True for values that have no effect in any unknown field."""
    return value is None or value is False or value in ("", [], {})


def is_one_of(value: object, allowed: Iterable[object]) -> bool:
    """Return True if `value` is in `allowed`, where False differs from 0 and True from 1."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    )


def changes_nothing(name: str, value: object) -> bool:
    """Return True if the unknown field `name` of an object cannot change an answer with this
    value.
    """
    return name in IGNORED or says_nothing(value) or is_one_of(value, NEUTRAL.get(name, ()))


if TYPE_CHECKING:
    Unread = Any
    """For type checkers, because a subclass may declare the field again with a specific type."""
    Uncut = Any
else:
    Unread = Nothing
    Uncut = str | float | bool | dict[str, Any] | Annotated[list[Any], Meta(max_length=0)] | None
    """A list is rejected: it has the corners of a region to crop. Other values may be notes."""


class AnyFields(Struct):
    """Base class of objects whose unknown fields cannot change an answer and are ignored, such as
    cache breakpoints, notes, and data of an earlier answer.
    """


class Citations(Struct, forbid_unknown_fields=True):
    """Whether the answer should cite a document."""

    enabled: Literal[False] | None = None
    """Must be false, because answers never cite their sources."""


class IgnoredFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of images, videos, files, and the objects with their URLs.

    The fields of this class may have any value, unless a subclass uses them. All other unknown
    fields are rejected.
    """

    _meta: Any = None  # MCP's
    alt: Any = None
    alt_text: Any = None
    altText: Any = None  # noqa: N815 - web pages' name
    annotations: Any = None
    cacheControl: Any = None  # noqa: N815 - Vercel's name
    cache_control: Any = None
    caption: Any = None
    citations: Citations | None = None
    contentType: Any = None  # noqa: N815 - Vercel's name
    content_type: Any = None
    created_at: Any = None
    description: Any = None
    extra_content: Any = None
    fileName: Any = None  # noqa: N815 - web pages' name
    file_name: Any = None
    filename: Any = None
    format: Any = None
    id: Any = None
    index: Any = None
    mediaType: Any = None  # noqa: N815 - Vercel's name
    media_type: Any = None
    metadata: Any = None
    mimeType: Any = None  # noqa: N815 - MCP's name
    mime_type: Any = None
    name: Any = None
    prompt_cache_breakpoint: Any = None
    source_type: Any = None
    tags: Any = None
    timestamp: Any = None
    title: Any = None
    uuid: Any = None


class SpokenAnswer(AnyFields):
    """The audio of an earlier answer, by its id, as sent back by OpenAI's SDK. It is accepted and
    ignored.
    """

    id: str


class UnsupportedFields(Struct, kw_only=True):
    """Base class of messages, texts, and items of a conversation.

    Unknown fields are ignored, except the fields of this class, which must be empty: they would
    carry images or set their size.
    """

    # ---- images
    image: Unread = None
    images: Unread = None
    image_url: Unread = None
    image_urls: Unread = None
    image_data: Unread = None
    image_base64: Unread = None
    image_file: Unread = None
    image_files: Unread = None
    image_path: Unread = None
    image_paths: Unread = None
    image_embeds: Unread = None
    input_image: Unread = None
    input_images: Unread = None
    pixel_values: Unread = None
    picture: Unread = None
    pictures: Unread = None
    # ---- videos and audio
    video: Unread = None
    videos: Unread = None
    video_url: Unread = None
    video_urls: Unread = None
    video_data: Unread = None
    input_video: Unread = None
    frames: Unread = None
    audio: (
        SpokenAnswer
        | Annotated[list[Any], Meta(max_length=0)]
        | Annotated[str, Meta(max_length=0)]
        | None
    ) = None
    audios: Unread = None
    audio_url: Unread = None
    audio_urls: Unread = None
    audio_data: Unread = None
    input_audio: Unread = None
    # ---- files and any media
    file: Unread = None
    files: Unread = None
    file_id: Unread = None
    file_ids: Unread = None
    file_data: Unread = None
    file_url: Unread = None
    file_urls: Unread = None
    fileData: Unread = None  # noqa: N815 - Gemini's name
    document: Unread = None
    documents: Unread = None
    attachment: Unread = None
    attachments: Unread = None
    experimental_attachments: Unread = None
    media: Unread = None
    media_url: Unread = None
    media_urls: Unread = None
    multi_modal_data: Unread = None
    multimodal_data: Unread = None
    mm_data: Unread = None
    inline_data: Unread = None
    inlineData: Unread = None  # noqa: N815 - Gemini's name
    parts: Unread = None
    base64: Unread = None
    b64_json: Unread = None
    # ---- sizes of images
    min_pixels: Unread = None
    max_pixels: Unread = None
    image_min_pixels: Unread = None
    image_max_pixels: Unread = None
    resized_height: Unread = None
    resized_width: Unread = None
    height: Unread = None
    width: Unread = None
    size: Unread = None
    image_size: Unread = None
    min_size: Unread = None
    max_size: Unread = None
    shortest_edge: Unread = None
    longest_edge: Unread = None
    detail: Unread = None
    resolution: Unread = None
    media_resolution: Unread = None
    max_tokens_per_image: Unread = None
    min_dynamic_patch: Unread = None
    max_dynamic_patch: Unread = None
    max_slice_nums: Unread = None
    num_crops: Unread = None
    do_resize: Unread = None
    crop: Unread = None
    region: Uncut = None
    # ---- sizes of videos
    total_pixels: Unread = None
    video_min_pixels: Unread = None
    video_max_pixels: Unread = None
    video_total_pixels: Unread = None
    fps: Unread = None
    sample_fps: Unread = None
    nframes: Unread = None
    num_frames: Unread = None
    min_frames: Unread = None
    max_frames: Unread = None
    frames_indices: Unread = None
    source_fps: Unread = None
    video_start: Unread = None
    video_end: Unread = None
