"""Edits of a forward pass: their kinds and texts, the hooks that make them, the sites they act on."""
