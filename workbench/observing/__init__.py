"""Observing a live PyTorch decoder of any code base under our names, without rewriting it: `observe`, and `equal` of two.

Attention is read from its calls (fused, eager softmax, Hugging Face's interface). Every other part is recognised by comparing numbers
on example tokens, not by name. After an idea in TransformerLens issues 498, 773 and 888: no wrapper class per family.
This file imports nothing: a recorder uses parts of this package without the models.
"""
