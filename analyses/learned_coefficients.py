"""What do trained averages of earlier outputs look like?

Claim (Pagliardini et al. 2024, DenseFormer): lower loss than the same depth, with weights that are strong on the diagonal,
positive on the embedding early and negative late. Refuted where the weights stay as at the start, or nothing is gained.

Weight decay pulls the coefficients to 0 where it is on, and small models show the diagonal and the embedding's column only.
Trained coefficients of value residuals are in where_the_residual_belongs.
"""

from .common import Script
from .tables import trained_coefficients

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("averages",),
    table=trained_coefficients,
    quick=("transformer", "denseformer"),
)

if __name__ == "__main__":
    SCRIPT.main()
