"""Training: the loop and its recipe, what it writes down, processes for many at once, and the recorder of other loops."""
