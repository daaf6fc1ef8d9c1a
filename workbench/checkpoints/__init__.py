"""Checkpoints of any training: identify -> read -> infer -> build -> fill; nothing in them is ever run."""
