"""Figures that everybody can read: colours and marks for the colour-blind, one colour for each run, alt texts in plain words."""

from __future__ import annotations

import itertools
import tomllib

import numpy as np
import pytest

from app.elements.common import colour_table
from app.streamlit_settings import SETTINGS
from workbench import plots
from workbench.models.architecture_names_and_colours import ARCHITECTURES, SYMBOLS
from workbench.plots import HEADS
from workbench.plots.experiment_figures import STATUSES
from workbench.plots.style import DETAIL, GREY, MINUS_COLOUR, SEQUENTIAL, colour, symbol
from workbench.plots.token_map_figures import COLOURS
from workbench.runs.records import records

SIGHT = {
    "full": np.eye(3),
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
"""Linear RGB as somebody sees it (Machado, Oliveira and Fernandes 2009, severity 1)."""
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = XYZ.sum(1)
TOGETHER = ("transformer", "values_scaled", "resformer", "svformer", "neutreno", "denseformer", "gated_attention")
THEMES = tomllib.loads(SETTINGS.read_text())["theme"]
PAGES = {name: THEMES[name]["backgroundColor"] for name in ("light", "dark")}
"""Colour of the page, by Streamlit's theme."""


def linear(colour):
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def seen(colour, sight):
    """CIE L*a*b* of a colour as somebody sees it."""
    x, y, z = np.cbrt(np.maximum(XYZ @ np.clip(SIGHT[sight] @ linear(colour), 0, 1) / WHITE, 0.0089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def oklab(colour, sight):
    """OKLab x 100 of a colour as somebody sees it (Ottosson 2020)."""
    cones = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    axes = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return 100 * np.array(axes) @ np.cbrt(np.array(cones) @ np.clip(SIGHT[sight] @ linear(colour), 0, 1))


def frame(architectures, points=3, steps=(0, 20)):
    rows = [
        {"run": f"{name}-s0", "architecture": name, "seed": 0, "step": step, "metric": "importance_entropy", "layer": layer,
         "value": 1.0 + 0.1 * layer, "unit": "nats"}
        for name in architectures for step in steps for layer in range(points)
    ]  # fmt: skip
    return records(rows)


def test_models_that_look_alike_to_somebody_carry_other_marks():
    for one, other in itertools.combinations(ARCHITECTURES, 2):
        a, b = ARCHITECTURES[one], ARCHITECTURES[other]
        apart = min(float(np.linalg.norm(seen(a.colour, s) - seen(b.colour, s))) for s in SIGHT)
        assert apart > 15 or a.symbol != b.symbol, (one, other, apart)


@pytest.mark.parametrize("page", PAGES)
def test_every_colour_of_lines_and_marks_has_a_contrast_of_three_to_one(page):
    """WCAG 1.4.11; of settings, second models, unregistered names, heads, tokens and verdicts too."""
    named = [*ARCHITECTURES, *(f"{a}{DETAIL}{end}" for a in ARCHITECTURES for end in ("B′: s0", "without values"))]
    shades = [(f"{a} x={n}", [f"{a} x={n}" for n in range(8)]) for a in ARCHITECTURES for n in range(8)]
    marks = {
        name: colour(name, among) for name, among in [*((n, ()) for n in [*named, "my model", "gqa+neutreno"]), *shades]
    }
    marks |= {
        "difference": MINUS_COLOUR,
        "grey": GREY,
        **{f"of heads {c}": c for c in HEADS},
        **{f"of tokens {c}": c for c in COLOURS},
    }
    marks |= {status: look for status, (_, _, look) in STATUSES.items() if look.startswith("#")}
    ground = float(XYZ[1] @ linear(PAGES[page]))
    for name, one in marks.items():
        light, dark = sorted((float(XYZ[1] @ linear(one)), ground), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3.0, (name, one)


def test_models_that_are_often_drawn_together_differ_for_everybody():
    """In OKLab x 100 at least as far as the palette of Okabe and Ito was: no pair nearer than this to a kind of sight."""
    least = {"full": 10.2, "no red cones": 5.0, "no green cones": 6.3, "no blue cones": 7.1}
    for one, other in itertools.combinations(TOGETHER, 2):
        for sight, limit in least.items():
            apart = np.linalg.norm(oklab(ARCHITECTURES[one].colour, sight) - oklab(ARCHITECTURES[other].colour, sight))
            assert apart >= limit, (one, other, sight, apart)


def test_curves_carry_their_models_mark_hollow_before_training_and_few_on_long_curves():
    figure = plots.plot(frame(["resformer", "resformer+neutreno"]))
    marks = {t.name: t.marker.symbol for t in figure.data if t.mode == "lines+markers"}
    assert marks == {
        "ResFormer": "square",
        "ResFormer at step 0": "square-open",
        "ResFormer + NeuTRENO": "diamond",
        "ResFormer + NeuTRENO at step 0": "diamond-open",
    }
    assert symbol("resformer · B: s1, step 300") == symbol("resformer (lr 0.01)") == symbol("resformer")
    assert symbol("something else") in SYMBOLS


def test_words_in_the_cells_of_a_map_have_contrast_on_every_colour():
    values = np.linspace(0, 1, 24)[None]
    grid = plots.Grid(
        values, ["0"], [str(i) for i in range(24)], "", "row", "column", np.full((1, 24), "word"), (0.0, 1.0)
    )
    figure = plots.grids([("A", grid)], "")
    words, grounds = figure.data[0].text[0], colour_table(SEQUENTIAL, 24)
    for word, ground in zip(words, grounds, strict=True):
        light = [
            linear("#{:02x}{:02x}{:02x}".format(*c)) @ XYZ[1] for c in (ground, (0 if "black" in word else 255,) * 3)
        ]
        assert (max(light) + 0.05) / (min(light) + 0.05) >= 4.5
