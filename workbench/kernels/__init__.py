"""Fast kernels for attention and losses, with the plain references that they must equal."""

from workbench.kernels.attention_and_its_statistics import attention_form, attention_statistics
from workbench.kernels.full_pattern_reference import AttentionStatistics, attention_reference
from workbench.kernels.pooled_maps import attention_window, bucket_edges, pooled_attention, pooled_maximum

__all__ = [
    "AttentionStatistics", "attention_form", "attention_reference", "attention_statistics", "attention_window",
    "bucket_edges", "pooled_attention", "pooled_maximum",
]  # fmt: skip
