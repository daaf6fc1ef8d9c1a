"""Fast paths, each beside the plain reference it must equal."""

from workbench.kernels.attention import AttentionStatistics, attention_reference, attention_statistics

__all__ = ["AttentionStatistics", "attention_reference", "attention_statistics"]
