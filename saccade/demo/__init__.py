"""The demo model: its tasks for training and examination, its training script, and its committed
weights.

Owns: the images and questions (`draw`, `tasks`), the tokenizer, the training and the held-out
evaluation. Does not know: the engine or the server. The evaluation speaks HTTP; only `train`, `net`
and `batches` import torch.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The committed Hugging Face folder of the trained demo model."""
