"""Observing a live PyTorch decoder of any code base under our names, without rewriting it: `observe`, and `equal` of two.

Attention is read where it runs (fused calls, eager softmax, Hugging Face's interface), and every part by comparing numbers on
example tokens, not by its name. After an idea in TransformerLens issues 498, 773 and 888: no wrapper class per family.
Nothing is imported here: a recorder uses parts of this package without the models.
"""
