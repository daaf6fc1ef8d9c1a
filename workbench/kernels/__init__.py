"""Fast kernels for attention and losses, with the plain references that they must equal."""

from workbench.kernels.attention import attention_form, attention_statistics
from workbench.kernels.pooled_maps import attention_window, bucket_edges, pooled_attention, pooled_maximum
from workbench.kernels.reference import AttentionStatistics, attention_reference

__all__ = [
    "AttentionStatistics", "attention_form", "attention_reference", "attention_statistics", "attention_window",
    "bucket_edges", "pooled_attention", "pooled_maximum",
]  # fmt: skip
