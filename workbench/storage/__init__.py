"""Runs and checkpoints at URLs, each mirrored by a folder of the cache."""
