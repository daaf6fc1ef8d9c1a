"""Records -> plotly figures, with alt texts, tables and offline HTML.

    workbench.plot(workbench.measure("runs/text-resformer-s0", "importance_entropy", steps="ends")).show()

Each figure names its data, sequence length, number of seeds and the meaning of its band. One colour per architecture
everywhere (Okabe and Ito's, safe for colour-blind readers, legible on light and dark). Functions here read no files and run
no models.
"""

from workbench.plots.attention_maps import attention_map_figure, attention_pair, next_tokens_figure
from workbench.plots.comparisons_and_animations import beside, compared, difference, layer_differences, timelapse_figure
from workbench.plots.experiment_figures import (
    ablation,
    against_loss_figure,
    concentration_figure,
    formation_table,
    intervals,
    race_figure,
    sinks_figure,
    verdicts_figure,
)
from workbench.plots.heat_maps import Grid, grid_table, grids, unique
from workbench.plots.html_page import CONFIG, PX_PER_MM, alt_text, fitted_maps, html, paper, paper_page, printed, table
from workbench.plots.path_of_token import HEADS, DrawnPath, Strand, value_path
from workbench.plots.published_curves import budget_figure, coefficients_by_layer
from workbench.plots.record_figures import FORMS, SPREADS, form_of, plot
from workbench.plots.style import (
    DETAIL,
    GREY,
    MINUS,
    colour,
    dressed,
    label,
    narrow,
    ordered,
    positions_of,
    reading_direction,
    site,
    subtitle,
    symbol,
    untitled,
)
from workbench.plots.training_and_gradient_figures import (
    coefficients_figure,
    gradient_map,
    pace_figure,
    relative_to_baseline,
)

__all__ = [
    "CONFIG", "DETAIL", "FORMS", "GREY", "HEADS", "MINUS", "PX_PER_MM", "SPREADS", "DrawnPath", "Grid", "Strand", "ablation",
    "against_loss_figure",
    "alt_text", "attention_map_figure", "attention_pair", "beside", "budget_figure", "coefficients_by_layer",
    "coefficients_figure", "colour", "compared",
    "concentration_figure", "difference", "dressed", "fitted_maps", "form_of", "formation_table", "gradient_map", "grid_table", "grids",
    "html", "intervals", "label", "layer_differences", "narrow", "next_tokens_figure", "ordered", "pace_figure", "paper", "paper_page",
    "plot", "positions_of", "printed",
    "race_figure",
    "reading_direction", "relative_to_baseline", "sinks_figure", "site", "subtitle", "symbol", "table", "timelapse_figure",
    "unique", "untitled", "value_path", "verdicts_figure",
]  # fmt: skip
