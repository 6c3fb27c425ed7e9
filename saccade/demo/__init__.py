"""The demo model: the tasks it is trained and examined on, its training script, and its committed
weights.

Owns: the pictures and questions (`draw`, `tasks`), the tokenizer, the training and the held-out
evaluation.
Does not know: the engine or the server. The evaluation speaks HTTP; only `train`, `net` and
`batches` import torch.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The committed Hugging Face folder of the trained demo model."""
