"""The training page as a browser gets it: every part on every kind of folder, choices in the address, live while somebody writes."""

from __future__ import annotations

import pytest
from app_pages import charts

from workbench.file_io import write_json
from workbench.runs.records import records, write_parquet
from workbench.runs.run import Run

PARTS = ("loss", "gradients", "coefficients", "pace")
SHOWN = {"populated": PARTS, "empty": ("loss",), "damaged": ("loss",), "half_written": ("loss",)}
"""Parts of the page that each kind of folder is a question to."""
A, B = "text-resformer-s0", "text-transformer-s0"


@pytest.fixture
def page(browse):
    return lambda folder, **address: browse(folder, "training", **address)


def said(at):
    kinds = ("markdown", "info", "warning", "caption", "code")
    return " ".join(e.value.replace("\\", "") for kind in kinds for e in at.get(kind))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "show"), [(kind, show) for kind, parts in SHOWN.items() for show in parts])
def test_no_part_breaks_on_any_folder(page, folders, kind, show):
    at = page(folders[kind], show=show)
    assert "Traceback" not in said(at)
    for chart in charts(at):
        assert len(chart.alt) > 20
    if kind == "populated":
        assert len(charts(at)) == {"loss": 3, "gradients": 2, "coefficients": 2, "pace": 2}[show]
        assert not at.warning
        assert not at.info
    if kind == "empty":
        assert "make demo" in said(at)
    if kind == "damaged":
        assert any(r"text\-transformer\-s0" in w.value for w in at.warning)
        assert charts(at)


def test_two_runs_are_compared_along_the_axes_of_the_address(page, populated):
    pair = {"compare": 1, "a": "text-denseformer-s0", "b": "text-denseformer-s1"}
    at = page(populated, show="loss", x="tokens", domain="each", smooth=5, log=1, **pair)
    assert (at.selectbox(key="w_x").value, at.selectbox(key="w_smooth").value) == ("tokens", 5)
    assert at.toggle(key="w_log").value
    assert len(charts(at)) == 2
    assert not at.info
    assert all("A: DenseFormer" in chart.spec for chart in charts(at))
    assert "log scale" in charts(at)[0].spec


def recording(folder, name, steps):
    info = {"format": 1, "architecture": "TheirNet", "seed": 0, "model": {"n_layers": 2}, "data": {"kind": "recorded"},
            "recorder": {"every": 1}}  # fmt: skip
    write_json(folder / name / "run.json", info)
    rows = [
        {"run": name, "architecture": "TheirNet", "seed": 0, "step": s, "metric": m, "part": "W_Q", "layer": n, "value": 0.1 * s}
        for s in range(steps) for n in range(2) for m in ("update_ratio", "gradient_norm")
    ]  # fmt: skip
    rows += [{"run": name, "seed": 0, "step": s, "metric": "train_loss", "value": 4.0 - s} for s in range(steps)]
    write_parquet(records(rows), folder / name / "telemetry" / "000000-000032.parquet")


def test_a_recording_is_drawn_without_checkpoints_and_told_to_be_live_while_it_is_written(page, tmp_path):
    recording(tmp_path, "their *loop*", 3)
    with Run(tmp_path / "their *loop*").writing():
        at = page(tmp_path)
        assert "Being written: their *loop*" in said(at)
        assert charts(at)[0].alt.endswith("from 4 at 0 to 2 at 2")
        recording(tmp_path, "their *loop*", 5)
        at.run()
        assert charts(at)[0].alt.endswith("from 4 at 0 to 0 at 4")
    at = page(tmp_path, show="inside", quantity="update_ratio")
    assert "Being written" not in said(at)
    assert at.selectbox(key="w_quantity").value == "update_ratio"
    assert len(charts(at)) == 1
