"""The demo model with its weights, and the three images of `saccade demo`. The code in `train/`
trains the model and measures its accuracy.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The directory of the demo model's checkpoint, in Hugging Face format."""
PICTURES = tuple(Path(__file__).parent / "pictures" / f"picture-{n}.png" for n in (1, 2, 3))
"""The images of the demo: one of a number and two of shapes, created by `saccade_bench.drawn`."""
