"""Measurement of models and runs: tidy records with error bars."""
