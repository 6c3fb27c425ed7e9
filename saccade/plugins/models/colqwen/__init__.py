"""The family of ColQwen2 and ColQwen2.5: Qwen2-VL and Qwen2.5-VL with a vector per token (late
interaction).
"""

from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.colqwen.spec:colqwen_spec",
    model="saccade.plugins.models.colqwen.net:ColQwenModel",
    architectures=("ColQwen2ForRetrieval", "ColQwen2", "ColQwen2_5"),
    model_types=("colqwen2",),
)
