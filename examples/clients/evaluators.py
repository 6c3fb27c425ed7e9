"""Unchanged programs that benchmark servers and models: guidellm and lm-eval.

Each is run as a process, as on a command line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asked import Target

TIMEOUT_SECONDS = 300


def guidellm(target: Target) -> str:
    """Send four requests of synthetic text. All must succeed."""
    if find_spec("guidellm") is None:
        raise ImportError("guidellm", name="guidellm")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [
            *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
            *(
                "--backend",
                f"kind=openai_http,target={target.base},model={target.model}",
                "--profile",
                "kind=synchronous",
            ),
            *("--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={output}"),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        assert output.is_file(), (done.stderr or done.stdout)[-1500:]
        counted = re.findall(
            r"completed .*successful=(\d+) errored=(\d+)", done.stdout + done.stderr
        )
        assert counted == [("4", "0")], counted
    return "4 of 4 requests"


LM_EVAL_TASK = """
task: quick_sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 1}
"""
LM_EVAL_DOCUMENTS: list[dict[str, Any]] = [
    {"question": f"There are {a} red circles and {b} blue squares. How many shapes? Answer:",
     "choices": [f" {a + b}", f" {a + b + 1} shapes", " none at all", " red"], "answer": 0}
    for a, b in ((1, 2), (3, 4), (2, 2), (5, 1), (4, 4), (1, 1))
]  # fmt: skip


def lm_eval(target: Target) -> str:
    """Run a multiple-choice task with log-likelihoods of echoed prompts (`local-completions`)."""
    import lm_eval as _  # type: ignore[import-not-found]  # noqa: F401

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "questions.jsonl"
        data.write_text("\n".join(map(json.dumps, LM_EVAL_DOCUMENTS)))
        (folder / "quick_sums.yaml").write_text(LM_EVAL_TASK.replace("DATA", str(data)))
        settings = {
            "model": target.model,
            "base_url": f"{target.v1}/completions",
            "tokenizer": target.tokenizer,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
        }
        command = [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in settings.items())),
            *("--tasks", "quick_sums", "--include_path", name, "--batch_size", "4"),
            *("--output_path", str(folder / "out"), "--log_samples"),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, **offline},
        )
        files = list(folder.glob("out/**/samples_*.jsonl"))
        assert files, (done.stderr or done.stdout)[-1500:]
        samples = [json.loads(line) for line in files[0].read_text().splitlines()]
    found = [
        (*(arguments["arg_0"], arguments["arg_1"]), *(float(answer[0][0]), answer[0][1] == "True"))
        for sample in samples
        for arguments, answer in zip(sample["arguments"].values(), sample["resps"])
    ]
    assert len(found) == sum(len(each["choices"]) for each in LM_EVAL_DOCUMENTS)
    return f"{len(found)} log-likelihoods; {compared(found, target.tokenizer)}"


def compared(found: list[tuple[str, str, float, bool]], folder: str) -> str:
    """Compare (context, continuation, log-likelihood, whether it is the greedy continuation) with
    transformers' results.
    """
    if not (Path(folder) / "config.json").is_file():
        return "not compared: no checkpoint was given"
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    kind: Any = AutoModelForImageTextToText
    network = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    largest, greedy = 0.0, 0
    for context, continuation, score, is_greedy in found:
        before = len(tokenizer.encode(context))
        tokens = torch.tensor([tokenizer.encode(context + continuation)])
        with torch.inference_mode():
            rows = torch.log_softmax(network(tokens).logits[0, before - 1 : -1], dim=-1)
        answer = tokens[0, before:]
        expected = float(rows.gather(1, answer.unsqueeze(1)).sum())
        largest = max(largest, abs(score - expected))
        greedy += is_greedy == bool((rows.argmax(dim=-1) == answer).all())
    assert largest < 0.05 * abs(found[0][2]) + 0.05, f"off by {largest}"
    return f"off from transformers by {largest:.1g} at most, {greedy} of {len(found)} greedy alike"
