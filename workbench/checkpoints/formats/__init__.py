"""One file for each code base whose checkpoints are recognised: how to tell them, and what they call our tensors."""
