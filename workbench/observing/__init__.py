"""Observing anyone's live PyTorch decoder under our names, without rewriting it: `observe`, and `equal` of two models.

Attention is read where it runs (fused calls, eager softmax, Hugging Face's interface), and every part by comparing numbers on
example tokens, not by its name. After an idea in TransformerLens issues 498, 773 and 888: no wrapper class per family.
"""

from workbench.observing.comparing import Comparison, equal
from workbench.observing.observed import Observed
from workbench.observing.observing import observe

__all__ = ["Comparison", "Observed", "equal", "observe"]
