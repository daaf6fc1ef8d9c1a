"""Function mode that intercepts the attention calls of a forward pass; masks and layouts of these calls."""
