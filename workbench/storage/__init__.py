"""Runs and checkpoints that are kept elsewhere, by their URL: a folder of the cache stands for each."""
