"""The demo model, its committed weights, and the three images that `saccade demo` asks it about.

`train/` trains the model and measures its accuracy.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The committed Hugging Face folder of the trained demo model."""
PICTURES = tuple(Path(__file__).parent / "pictures" / f"picture-{n}.png" for n in (1, 2, 3))
"""A number, and two images of shapes, as `saccade_bench.drawn` draws them."""
