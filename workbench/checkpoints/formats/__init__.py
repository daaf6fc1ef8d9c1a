"""Checkpoint formats of other code bases, one file each."""
