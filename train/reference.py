"""The demo model's accuracy with transformers as the reference: `python -m train.reference DIR -n
200`. Needs the dev extra.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from saccade_bench.drawn.tasks import SKILLS, TWO_HOPS
from train.batches import IMAGE, preprocess
from train.evaluate import Ask, ChatMessage, as_json, evaluate, print_scores
from train.net import patchify


def library_asker(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Ask:
    """Return a function with greedy answers of a model folder by transformers, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def ask(messages: list[ChatMessage]) -> str:
        patches, grids = [], []
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] == "image_url":
                    encoded = part["image_url"]["url"].partition(",")[2]
                    pixels = preprocess(Image.open(io.BytesIO(base64.b64decode(encoded))))
                    flat = patchify(pixels[None])[0].float() / 127.5 - 1  # [patches, 3 * 16 * 16]
                    patches.append(
                        flat.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).reshape(len(flat), -1)
                    )
                    grids.append((1, pixels.shape[0] // 16, pixels.shape[1] // 16))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = []
        sizes = iter(grids)
        for token in tokenizer.encode(text, add_special_tokens=False):
            if token == IMAGE:
                _, rows, cols = next(sizes)
                tokens += [IMAGE] * (rows * cols // 4)
            else:
                tokens.append(token)
        ids = torch.tensor([tokens])
        pictures = {}
        if grids:
            pictures = {
                "pixel_values": torch.cat(patches).to(dtype),
                "image_grid_thw": torch.tensor(grids),
            }
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == IMAGE).int(),
            max_new_tokens=48,
            do_sample=False,
            **pictures,
        )
        return str(tokenizer.decode(out[0, len(tokens) :], skip_special_tokens=True))

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-prompts", type=int, default=200, help="tasks per skill")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--skills", nargs="*", default=list(SKILLS), choices=(*SKILLS, TWO_HOPS))
    parser.add_argument(
        "--misses", type=int, default=0, help="print so many wrong answers per skill"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    scores = evaluate(
        library_asker(args.folder), args.num_prompts, args.skills, args.first, threads=1
    )
    print_scores(scores, args.misses)
    if args.json:
        args.json.write_text(json.dumps(as_json(scores), indent=1) + "\n")


if __name__ == "__main__":
    main()
