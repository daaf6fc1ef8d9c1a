"""Records -> plotly figures, with alt texts, tables and offline HTML.

    workbench.plot(workbench.measure("runs/text-resformer-s0", "importance_entropy", steps="ends")).show()

Each figure names its data, sequence length, number of seeds and the meaning of its band. One colour per architecture
everywhere (Okabe and Ito's, safe for colour-blind readers, legible on light and dark). Functions here read no files and run
no models.
"""

from workbench.plots.beside import beside
from workbench.plots.compare import compared, difference, timelapse
from workbench.plots.experiments import ablation, concentration, formation_table, intervals, race, sinks, verdicts
from workbench.plots.flow import HEADS, Strand, ValuePath, value_path
from workbench.plots.grids import Grid, grid_table, grids, unique
from workbench.plots.losses import against_loss
from workbench.plots.output import CONFIG, alt_text, paper, table
from workbench.plots.page import html
from workbench.plots.records import FORMS, form_of, plot
from workbench.plots.style import (
    DETAIL,
    GREY,
    MINUS,
    colour,
    dressed,
    label,
    narrow,
    ordered,
    reading,
    site,
    subtitle,
    symbol,
    untitled,
)
from workbench.plots.tokens import attention_map, attention_pair, next_tokens
from workbench.plots.training import coefficients, gradient_map, pace, relative

__all__ = [
    "CONFIG", "DETAIL", "FORMS", "GREY", "HEADS", "MINUS", "Grid", "Strand", "ValuePath", "ablation",
    "against_loss", "alt_text", "attention_map", "attention_pair", "beside", "coefficients", "colour", "compared",
    "concentration", "difference", "dressed", "form_of", "formation_table", "gradient_map", "grid_table", "grids",
    "html", "intervals", "label", "narrow", "next_tokens", "ordered", "pace", "paper", "plot", "race", "reading",
    "relative", "sinks", "site", "subtitle", "symbol", "table", "timelapse", "unique", "untitled", "value_path", "verdicts",
]  # fmt: skip
