"""The child process that runs transformers' own `generate` for `--parity generate`. Started by
`parity.py`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import PIL.Image
import torch

from saccade.ipc.child import Channel, Disconnected, enter
from saccade.plugins.any_model.facts import OwnProcessor
from saccade.plugins.any_model.inspector import find_class, read_config
from saccade.plugins.any_model.merged import merge_adapter
from saccade.plugins.any_model.parity import (
    REFERENCE,
    Expected,
    ReferenceBoot,
    ReferenceQuestion,
    checkered,
)
from saccade.plugins.any_model.processor import (
    EXPERTS,
    TEXT_KEYS,
    ask_image,
    load_processor,
    quiet,
)
from saccade.plugins.any_model.rope import keep_rope

TYPES = "mm_token_type_ids"


@torch.inference_mode()
def answer(model: Any, own: OwnProcessor | None, question: ReferenceQuestion) -> Expected:
    """Generate `question.count` tokens with greedy decoding."""
    ids = torch.tensor([question.tokens])
    told = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if question.size is not None:
        assert own is not None
        processor = load_processor(own)
        made = ask_image(processor, PIL.Image.fromarray(checkered(question.size)))
        told |= {name: made[name] for name in made.keys() - TEXT_KEYS}
        if TYPES in made:
            kinds = processor.create_mm_token_type_ids([list(question.tokens)])
            told[TYPES] = torch.tensor(kinds)
        if EXPERTS in made:
            told[EXPERTS] = processor.create_moe_mm_token_type_ids(ids)
    output = model.generate(
        **told,
        max_new_tokens=question.count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].float().topk(2).values for logits in output.logits]
    return Expected(
        tuple(output.sequences[0, ids.shape[1] :].tolist()),
        tuple(float(first - second) for first, second in best),
    )


def main() -> int:
    boot, link = enter(ReferenceBoot)
    quiet()
    kind = find_class(read_config(Path(boot.folder)))
    model = kind.from_pretrained(boot.folder, dtype=getattr(torch, boot.dtype)).eval()
    merge_adapter(model, Path(boot.folder))
    if boot.far is not None:
        keep_rope(model.get_decoder(), boot.far, long=True)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    channel: Channel[Expected, ReferenceQuestion] = Channel(link.socket, REFERENCE)
    with suppress(Disconnected):
        while True:
            question = channel.receive()
            try:
                channel.send(answer(model, boot.processor, question))
            except Exception as error:  # transformers may raise anything
                channel.send(Expected(error=f"{type(error).__name__}: {error}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
