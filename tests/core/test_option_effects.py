"""Options that a way of serving takes without effect, each with the reason why that is right.

All else is honoured or refused by name: `tests/core/test_config.py`, `tests/families`. An option
that is new, renamed or gone must be looked at here.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from saccade.commands import SERVE_OPTIONS

LANGUAGE = "encoders get the options of the servers they encode for (saccade deploy ray)"
NO_GRAPHS = "it asks for no graphs, and there are none"
NO_IMAGES = "a cache of images stays empty where there are none"
STATED = "the value says what is so already"

WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "a family of Saccade's own, on a cpu": {
        "disable_cuda_graph": NO_GRAPHS,
        "vit_graphs": NO_GRAPHS,
    },
    "a model of text only": {
        "embedding_cache_device_mb": NO_IMAGES,
        "embedding_cache_host_mb": NO_IMAGES,
        "embedding_cache_dir": NO_IMAGES,
        "embedding_cache_shared": NO_IMAGES,
        "max_encode_patches": NO_IMAGES,
        "position_cache": NO_IMAGES,
        "vit_graphs": NO_IMAGES,
        "rotary_kernel": NO_IMAGES,
        "chunk_aware": NO_IMAGES,
    },
    "transformers' modules": {
        "disable_cuda_graph": NO_GRAPHS,
        "vit_graphs": NO_GRAPHS,
        "rotary_kernel": "its modules rotate heads themselves",
        "mm_attention_backend": STATED,  # sdpa; others need a GPU
        "max_encode_patches": "images are encoded one by one",
    },
    "role encode": {
        "quantization": LANGUAGE,
        "kv_cache_dtype": LANGUAGE,
        "chat_template": LANGUAGE,
        "tool_parser": LANGUAGE,
        "reasoning_parser": LANGUAGE,
        "context_length": LANGUAGE,
        "max_running_requests": LANGUAGE,
        "chunked_prefill_size": LANGUAGE,
        "page_size": LANGUAGE,
        "max_total_tokens": LANGUAGE,
        "speculative": LANGUAGE,
        "attention_backend": LANGUAGE,
        "disable_radix_cache": LANGUAGE,
        "kv_cache_dir": LANGUAGE,
        "kv_cache_host_mb": LANGUAGE,
        "chunk_aware": LANGUAGE,
    },
}
OPTIONS = {field.name for kind in SERVE_OPTIONS for field in fields(kind)}
CHANGES_ANSWERS = {
    *("dtype", "load_format", "quantization", "quantization_tower", "kv_cache_dtype", "revision"),
    *("mmproj", "chat_template", "family_option", "context_length"),
}


@pytest.mark.parametrize("way", WITHOUT_EFFECT)
def test_what_has_no_effect_is_an_option_and_has_a_reason(way: str) -> None:
    assert WITHOUT_EFFECT[way].keys() <= OPTIONS
    assert all(WITHOUT_EFFECT[way].values())


@pytest.mark.parametrize("way", [way for way in WITHOUT_EFFECT if way != "role encode"])
def test_what_changes_answers_always_has_an_effect_or_a_refusal(way: str) -> None:
    assert not WITHOUT_EFFECT[way].keys() & CHANGES_ANSWERS
