"""Readers of training logs without weights: one file for each form, and the table of their quantities in `quantity_names.py`."""
