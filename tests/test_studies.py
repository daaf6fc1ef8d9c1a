"""Studies: files that are refused by name, runs that resume, broken cells beside whole ones, tables worked by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from pathlib import Path

import equations
import pandas as pd
import pytest
import torch

from workbench.config import PRESETS
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.jobs.running import BrokenProcessPool, Job, run_jobs
from workbench.measurement.measuring import measure
from workbench.models import ARCHITECTURES, compose
from workbench.places import SHIPPED
from workbench.runs.run import Run
from workbench.studies import study_runs
from workbench.studies.study_file import read_study
from workbench.studies.study_runs import keep, outcomes, plan, prepare_data, run_study, sizes, summary, work
from workbench.training.loop import rate_factors

FILES = sorted((Path(__file__).parents[1] / "analyses" / "studies").glob("*.toml"))
SMALL = """
question = "Is it earlier?"
seeds = [0, 1, 2]
outcome = "formation_step"
baseline = "transformer"
data = { kind = "repeated", vocabulary = 16 }
model = { n_layers = 2, d_model = 16, n_heads = 2, d_mlp = 8, d_vocab = 16, n_ctx = 32 }
recipe = { steps = 4, batch = 2, T = 16, warmup = 1, validate_every = 4, save_every = 2, validation_sequences = 2 }
[[models]]
architecture = "transformer"
[[models]]
architecture = "resformer"
"""


def written(folder, text=SMALL, *changes):
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.toml"
    path.write_text(text)
    return path


# ---- the files that come with it -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_cell_of_the_study_files_can_be_built(file):
    study = read_study(file)
    many = (
        "sinks",
        "sinks_held",
        "sinks_without_start",
        "induction",
        "losses",
        "places",
        "value_paths",
        "bos",
        "sinks_remedies",
        "routing",
    )
    alone = file.stem == "models" or file.stem.endswith("_rates")  # these decide nothing
    assert len(study.seeds) >= (5 if file.stem in many else 1 if alone else 3)
    ships = study.rates_from and (SHIPPED / "evidence" / study.rates_from).is_dir()  # then its rates are known
    if study.rates_from and not ships:
        with pytest.raises(WorkbenchError, match=f"train them first: workbench study {study.rates_from}"):
            plan(study, Path("runs"))
        return
    for job in plan(study, Path("runs"))[: len(study.cells)]:
        model, recipe = sizes(job)
        assert model.n_ctx >= recipe.T
        with torch.device("meta"):
            built = compose(job.cell.architecture, model, **job.cell.settings["options"])
        rate_factors((name for name, _ in built.named_parameters()), recipe)


def test_mini_holds_every_architecture_and_the_controls_differ_in_rate_alone():
    mini, rates = (read_study(FILES[0].parent / f"{name}.toml") for name in ("mini", "first_layer_rate"))
    assert {cell.architecture for cell in mini.cells} == set(filter(equations.written, ARCHITECTURES)) - {
        "first_layer_shuffled"
    }, "measured on single sequences too"
    assert mini.preset == "mini"
    factors = {cell.name: dict(cell.settings["recipe"].get("lr_factors", {})) for cell in rates.cells}
    assert factors["faster layer factor=5"] == {"blocks.0.*": 5}
    assert factors["faster values factor=10"] == {"blocks.0.attn.v_proj.weight": 10}
    assert {cell.architecture for cell in rates.cells if "faster" in cell.name} == {"transformer"}


@pytest.mark.parametrize("name", ["learning_rate", "source_layer"])
def test_kept_results_are_of_the_study_as_it_stands(name):
    study, folder = read_study(FILES[0].parent / f"{name}.toml"), FILES[0].parent / "results"
    runs = pd.read_parquet(folder / f"{name}-runs.parquet")
    assert list(runs["run"]) == [job.name for job in plan(study, Path("runs"))]
    assert (runs["failed"] == "").all()
    again = summary(study, runs)
    pd.testing.assert_frame_equal(again, pd.read_parquet(folder / f"{name}.parquet"), check_dtype=False)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_grid_is_crossed_with_every_model_and_named_points_set_several_keys(tmp_path):
    more = """
vary.options.lambda_v1 = [0.5, 2.0]
[grid]
recipe.lr = [1e-3, 4e-3]
[[grid.length]]
name = "short"
recipe = { T = 8, batch = 4 }
[[grid.length]]
name = "long"
"""
    study = read_study(written(tmp_path, SMALL + more))
    assert len(study.cells) == 3 * 4
    assert study.axes == ["lr", "length"]
    cell = next(c for c in study.cells if c.name == "resformer lambda_v1=2 lr=0.004 length=short")
    assert cell.settings["options"] == {"lambda_v1": 2.0}
    assert cell.settings["recipe"] | {"lr": 4e-3, "T": 8, "batch": 4} == cell.settings["recipe"]
    jobs = plan(study, tmp_path)
    assert [job.seed for job in jobs] == [0] * 12 + [1] * 12 + [2] * 12
    assert "small-resformer-lambda_v1=2-lr=0.004-length=short-s2" in {job.name for job in jobs}
    _, recipe = sizes(next(job for job in jobs if job.cell == cell))
    assert (recipe.lr, recipe.T, recipe.batch) == (4e-3, 8, 4)
    assert recipe.weight_decay == PRESETS["tiny"].train.weight_decay


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ([("outcome =", "outcom =")], UnknownName, "did you mean outcome"),
        ([("formation_step", "formation_steps")], UnknownName, "did you mean formation_step"),
        ([("steps = 4", "step = 4")], UnknownName, "unknown training key 'step'; did you mean steps"),
        ([('"repeated", vocabulary = 16', '"text"')], BadData, "text has no copy loss"),
        ([("seeds = [0, 1, 2]", "seeds = [0, 0]")], BadData, "different whole numbers"),
        ([('architecture = "resformer"', 'architecture = "transformer"')], BadData, "two models are called 'transformer'"),
        ([('question = "Is it earlier?"', "")], BadData, "lacks question"),
        ([('architecture = "resformer"', 'architecture = "resformer"\noptions.lambda_v2 = 1')], UnknownName, "lambda_v1"),
        ([('architecture = "resformer"', "architecture = true")], BadData, "architecture of a model is True; give a text"),
        ([("seeds =", 'grid.x = [{name = "a", recipe = true}]\nseeds =')], BadData, "recipe of grid.x is True; give a table"),
        ([("seeds =", 'tuned = "lr"\nseeds =')], UnknownName, "tuned axis"),
        ([("seeds =", "measure.metric = ['loss']\nseeds =")], UnknownName, "did you mean metrics"),
    ],
)  # fmt: skip
def test_what_a_file_says_wrongly_is_named_with_the_nearest(tmp_path, changes, kind, says):
    with pytest.raises(kind, match=says):
        read_study(written(tmp_path, SMALL, *changes))


# ---- running ---------------------------------------------------------------------------------------------------------


def test_a_study_trains_tells_what_broke_and_trains_nothing_twice(tmp_path, forkserver):
    """Real processes. The second model's rate destroys it, the third one's shape cannot be built."""
    broken = '\n[[models]]\narchitecture = "svformer"\nrecipe = { lr = 1e30, clip = 0.0, warmup = 0 }\n'
    broken += '[[models]]\narchitecture = "gqa"\noptions.query_group = 7\n'
    study = read_study(written(tmp_path, SMALL.replace("[0, 1, 2]", "[0]") + broken))
    heard = []
    frame = run_study(study, tmp_path / "runs", workers=1, progress=heard.append)
    by_model = frame.set_index("model")
    assert (by_model.loc[["transformer", "resformer"], "failed"] == "").all()
    assert "the loss is" in by_model.loc["svformer", "failed"]
    assert "query_group=7" in by_model.loc["gqa", "failed"]
    assert heard[-1]["finished"]
    assert len(heard[-1]["failed"]) == 2
    run = Run.open(tmp_path / "runs" / by_model.loc["resformer", "run"])
    weights = run.step_folder(4) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert by_model.loc["resformer", "validation_loss"] == pytest.approx(math.log(16), abs=0.1)
    verdicts = summary(study, frame).set_index("model")["verdict"]
    assert verdicts["svformer"] == "unresolved: 1 of 1 runs failed"
    kept = keep(study, frame, tmp_path / "runs", tmp_path / "out")
    assert [path.name for path in kept] == ["small.parquet", "small-runs.parquet"]
    pd.testing.assert_frame_equal(
        pd.read_parquet(kept[1])[["run", "failed"]], frame[["run", "failed"]], check_dtype=False
    )
    jobs = [job for job in plan(study, tmp_path / "runs") if job.cell.model == "resformer"]
    work(processes_with_data(jobs[0]))
    assert weights.stat().st_mtime_ns == before


def test_tables_of_quick_runs_have_names_of_their_own(tmp_path):
    study = read_study(written(tmp_path))
    for quick, name in ((False, "small"), (True, "quick-small")):
        planned = plan(study, tmp_path / "runs", quick=quick)
        frame = outcomes(study, planned, {run.name: "not trained" for run in planned})
        files = keep(study, frame, tmp_path / "runs", tmp_path / "out")
        assert [file.name for file in files] == [f"{name}.parquet", f"{name}-runs.parquet"]
        assert set(pd.read_parquet(files[1])["run"]) == {run.name for run in planned}


def test_a_damaged_run_fails_by_itself_and_its_study_goes_on(tmp_path, monkeypatch):
    study = read_study(written(tmp_path, SMALL.replace("[0, 1, 2]", "[0]")))
    names = [run.name for run in plan(study, tmp_path / "runs")]
    (damaged := tmp_path / "runs" / names[0] / "run.json").parent.mkdir(parents=True)
    damaged.write_text("{broken")
    tried = []

    def run_each(jobs, workers, done, folders):
        for job in jobs:
            tried.append(job.name)
            done(job, WorkbenchError("not trained here"))

    monkeypatch.setattr(study_runs, "run_jobs", run_each)
    frame = run_study(study, tmp_path / "runs")
    assert tried == names
    assert frame["failed"].tolist() == ["WorkbenchError: not trained here"] * len(names)


def test_a_measure_that_the_sequences_are_too_short_for_is_refused_before_the_training(tmp_path):
    study = read_study(written(tmp_path, SMALL + '\n[measure]\nmetrics = ["sink_rate"]\n'))
    with pytest.raises(WorkbenchError, match="sink_rate needs sequences of 64 tokens; these have"):
        work(processes_with_data(plan(study, tmp_path / "runs")[0]))
    assert not list((tmp_path / "runs").glob("small-*"))


def processes_with_data(job):
    import dataclasses

    return dataclasses.replace(job, data=prepare_data(job))


def test_an_interrupted_run_of_a_study_goes_on(tmp_path, monkeypatch):
    from workbench.training import loop as training

    study = read_study(written(tmp_path))
    job = processes_with_data(plan(study, tmp_path / "runs")[0])
    update = training._Loop._update

    def interrupted(loop):
        if loop.step == 2:
            loop.stop = True
        return update(loop)

    with monkeypatch.context() as patch:
        patch.setattr(training._Loop, "_update", interrupted)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 3 of 4"):
            work(job)
    assert not Run.open(tmp_path / "runs" / job.name).finished
    work(job)
    assert Run.open(tmp_path / "runs" / job.name).telemetry("metric == 'train_loss'")["step"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_measures_of_a_study_are_kept_with_it(tmp_path):
    study = read_study(
        written(tmp_path, 'measure = { metrics = ["loss", "sink_mass"], n = 2 }\n' + SMALL, ("[0, 1, 2]", "[0]"))
    )
    jobs = [processes_with_data(job) for job in plan(study, tmp_path / "runs")]
    for job in jobs:
        work(job)
    measure(tmp_path / "runs" / jobs[0].name, "loss", n=1)  # other documents, which no mean may hold with these
    kept = keep(study, outcomes(study, jobs, {}), tmp_path / "runs", tmp_path / "out")
    records = pd.read_parquet(kept[-1])
    assert kept[-1].name == "small-records.parquet"
    assert set(records["metric"]) == {"loss", "sink_mass"}
    assert set(records["step"]) == {0, 4}
    assert set(records["n"].dropna()) == {2}
    assert set(records["architecture"]) == {"transformer", "resformer"}


def _dies(number):
    if number == 2:
        os._exit(9)
    return number


def test_a_killed_process_fails_its_own_job_and_no_other(forkserver):
    heard = {}
    jobs = [Job(str(i), _dies, (i,)) for i in (1, 2, 3, 4)]
    run_jobs(jobs, 2, lambda job, error: heard.update({job.name: error}))
    assert {job for job, error in heard.items() if error is None} == {"1", "3", "4"}
    assert isinstance(heard["2"], BrokenProcessPool)


# ---- what they say ---------------------------------------------------------------------------------------------------


def table(**steps):
    """Runs with these formation steps per model and seed, at one rate."""
    rows = [
        {"model": model, "lr": "1", "architecture": model, "seed": seed, "run": f"{model}-{seed}", "formation_step": value}
        for model, values in steps.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(failed="", step=200.0)


@pytest.mark.parametrize(
    ("steps", "difference", "verdict"),
    [
        ([80, 91, 99], -20.0, "earlier"),  # -20 in every seed: no spread at all
        ([99, 100, 125], -2.0, "unresolved"),  # -1, -11, +6: 4.30 * 8.54 / sqrt(3) = 21.2 around -2
        ([121, 130, 140], 20.3333, "later"),  # 21, 19, 21
        (
            [80, 91, math.nan],
            13.6667,
            "unresolved: formed in 2 of 3 against 3 of 3 runs",
        ),  # -20, -20, and 81 by the last step, 200
    ],
)
def test_a_difference_counts_beyond_its_band_over_paired_seeds(tmp_path, steps, difference, verdict):
    study = read_study(written(tmp_path, "grid.recipe.lr = [1.0]\n" + SMALL))
    row = summary(study, table(transformer=[100, 111, 119], resformer=steps)).set_index("model").loc["resformer"]
    assert row["difference"] == pytest.approx(difference, abs=1e-3, nan_ok=True)
    assert row["verdict"] == verdict
    assert row["unit"] == ("restricted mean steps" if math.isnan(steps[-1]) else "steps")
    if verdict == "unresolved":
        half = 4.302653 * math.sqrt(((-1 + 2) ** 2 + (-11 + 2) ** 2 + (6 + 2) ** 2) / 2) / math.sqrt(3)
        assert (row["low"], row["high"]) == pytest.approx((-2 - half, -2 + half), rel=1e-5)


@pytest.mark.parametrize("outcome", ["formation_step", "validation_loss"])
def test_a_failed_run_of_the_baseline_leaves_a_difference_unresolved(tmp_path, outcome):
    study = read_study(written(tmp_path, "grid.recipe.lr = [1.0]\n" + SMALL.replace("formation_step", outcome)))
    runs = table(transformer=[math.nan, 3.0, 4.0, 5.0], resformer=[1.0, 2.0, 3.0, 4.0])
    runs = runs.rename(columns={"formation_step": outcome})
    runs.loc[runs[outcome].isna(), "failed"] = "its loss is inf"
    row = summary(study, runs).set_index("model").loc["resformer"]
    assert row["verdict"] == "unresolved: 1 of 4 runs of transformer failed"


def test_a_baseline_that_has_not_formed_decides_nothing(tmp_path):
    study = read_study(written(tmp_path, "grid.recipe.lr = [1.0]\n" + SMALL))
    rows = summary(study, table(transformer=[100, math.nan, 119], resformer=[1, 2, 3])).set_index("model")
    assert rows.loc["resformer", "verdict"] == "unresolved: formed in 3 of 3 against 2 of 3 runs"
    assert (rows.loc["transformer", "n"], rows.loc["transformer", "least"]) == (2, 100)
    assert rows.loc["transformer", ["mean", "largest"]].isna().all(), "the last step is no observation"


def test_verdicts_of_a_study_are_corrected_over_its_table(tmp_path):
    """p of -10, -12, -20 is .044: below .05 alone, above it once doubled for a second rate."""
    one = table(transformer=[100, 111, 119], resformer=[90, 99, 99])
    other = table(transformer=[100, 111, 119], resformer=[101, 110, 120]).assign(lr="2")
    verdicts = [
        summary(read_study(written(tmp_path, f"grid.recipe.lr = {rates}\n" + SMALL)), pd.concat(rows))[
            "verdict"
        ].tolist()
        for rates, rows in (([1.0], [one]), ([1.0, 2.0], [one, other]))
    ]
    assert verdicts == [["baseline", "earlier"], ["baseline", "unresolved"] * 2]


def test_two_seeds_decide_nothing(tmp_path):
    study = read_study(written(tmp_path, "grid.recipe.lr = [1.0]\n" + SMALL))
    rows = summary(study, table(transformer=[100, 100], resformer=[50, 51])).set_index("model")
    assert rows.loc["transformer", "verdict"] == "baseline"
    assert rows.loc["resformer", "verdict"] == "unresolved: 2 of the 3 seeds needed"
    assert (rows.loc["resformer", "least"], rows.loc["resformer", "largest"]) == (50, 51)


def test_each_model_takes_its_own_best_value_of_the_tuned_axis(tmp_path):
    """Vanilla is best at rate 2 (60), ResFormer at rate 1 (50): at equal rates -50 and +15, best against best -10."""
    study = read_study(written(tmp_path, 'tuned = "lr"\ngrid.recipe.lr = [1.0, 2.0]\n' + SMALL))
    unsorted = read_study(written(tmp_path, 'tuned = "lr"\ngrid.recipe.lr = [2.0, 1.0, 4.0]\n' + SMALL))
    never, once = ([math.nan] * 3, [50, 50, math.nan])
    slow, few = table(transformer=[100] * 3, resformer=never), table(transformer=[110] * 3, resformer=once)
    parts = slow.assign(lr="2"), few.assign(lr="1"), slow.assign(lr="4")
    rows = summary(unsorted, pd.concat(parts, ignore_index=True)).set_index(["model", "lr"])
    assert rows.loc[("transformer", "best (2)"), "mean"] == 100, "2 lies between 1 and 4, whatever their order"
    assert rows.loc[("resformer", "best (1, at the edge)"), "n"] == 2, "more seeds get there than at the first rate"
    slow = table(transformer=[100, 100, 100], resformer=[50, 50, 50])
    fast = table(transformer=[60, 60, 60], resformer=[75, 75, 75]).assign(lr="2")
    rows = summary(study, pd.concat([slow, fast], ignore_index=True)).set_index(["model", "lr"])
    assert rows.loc[("resformer", "1"), "difference"] == -50
    assert rows.loc[("resformer", "2"), "difference"] == 15
    assert rows.loc[("resformer", "best (1, at the edge)"), "difference"] == -10
    assert rows.loc[("resformer", "best (1, at the edge)"), "verdict"] == "earlier"
    assert rows.loc[("transformer", "best (2, at the edge)"), "verdict"] == "baseline"


# ---- the whole command -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES[::6], ids=lambda file: file.stem)
def test_every_sixth_study_runs_in_its_quick_form(file, tmp_path_factory, forkserver, monkeypatch):
    """With one seed, and of each study two cells far apart: more would be the same work again."""
    monkeypatch.setattr(study_runs, "QUICK_SEEDS", 1)
    root = tmp_path_factory.getbasetemp() / "quick-studies"  # one corpus for all
    study = read_study(file)
    study = dataclasses.replace(study, cells=study.cells[:: -(-len(study.cells) // 2)])
    frame = run_study(study, root, quick=True)
    assert (frame["failed"] == "").all(), frame[frame["failed"] != ""][["run", "failed"]].to_dict("records")
    assert frame["validation_loss"].notna().all()
    cells = summary(study, frame)
    assert cells["verdict"].str.match("baseline|unresolved").all()
    for path in keep(study, frame, root, root / "out"):
        assert len(pd.read_parquet(path))


def test_a_study_fetches_no_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was tried"))
    text = 'question = "?"\nbaseline = "transformer"\n[[models]]\narchitecture = "transformer"\n'
    (tmp_path / "s.toml").write_text(text + 'data = { texts = ["datasets:nobody/nothing-of-this-name"] }\n')
    (job, *_) = plan(read_study(tmp_path / "s.toml"), tmp_path / "runs")
    with pytest.raises(BadData, match=r"cannot be loaded.*from this machine's cache: fetch it once"):
        prepare_data(job)


@pytest.mark.slow
def test_each_model_takes_its_best_rate_from_a_study_of_other_seeds(tmp_path, monkeypatch):
    seeds = "seeds = [9]\ngrid.recipe.lr = [1e-6, 1e-2]\ngrid.model.d_mlp = [8, 600]"  # each width has its own rate
    rates = SMALL.replace("seeds = [0, 1, 2]", seeds).replace('"formation_step"', '"validation_loss"')
    (tmp_path / "rates.toml").write_text(rates)
    named = f'rates_from = "{tmp_path / "rates.toml"}"\nseeds = [0, 1, 2]\ngrid.model.d_mlp = [8, 600]'
    study, runs = read_study(written(tmp_path, SMALL, ("seeds = [0, 1, 2]", named))), tmp_path / "runs"
    with pytest.raises(
        WorkbenchError, match="of which 8 of 8 runs are not finished; train them first: workbench study rates"
    ):
        plan(study, runs)
    tried = read_study(tmp_path / "rates.toml")
    for job in plan(tried, runs):
        work(dataclasses.replace(job, data=prepare_data(job)))
    losses = outcomes(tried, plan(tried, runs), {}).set_index(["model", "lr", "d_mlp"])["validation_loss"]
    losses["transformer", "1e-06", "600"] = losses["resformer", "0.01", "8"] = 0.0  # widths with rates of their own
    monkeypatch.setattr(study_runs, "outcomes", lambda *_: losses.reset_index())
    found = {(job.cell.model, job.cell.point["d_mlp"]): sizes(job)[1].lr for job in plan(study, runs)}
    best = losses.groupby(["model", "d_mlp"]).idxmin()
    assert found == {(model, int(width)): float(lr) for (model, width), (_, lr, _) in best.items()}
    assert (found["transformer", 600], found["resformer", 8]) == (1e-6, 1e-2)
    assert {job.seed for job in plan(study, runs)} == {0, 1, 2}
    for given, needed in (("", r"several values of d_mlp, an axis that small lacks"), ("grid.model.d_mlp = [8]", None)):
        one = read_study(
            written(tmp_path, SMALL, ("seeds = [0, 1, 2]", named.replace("grid.model.d_mlp = [8, 600]", given)))
        )
        with pytest.raises(WorkbenchError, match=needed) if needed else contextlib.nullcontext():
            assert {sizes(job)[1].lr for job in plan(one, runs) if job.cell.model == "resformer"} == {1e-2}
    same = read_study(written(tmp_path, SMALL, ("seeds = [0, 1, 2]", named.replace("[0, 1, 2]", "[8, 9]"))))
    with pytest.raises(WorkbenchError, match=r"which has the same seeds \[9\]; give others"):
        plan(same, runs)
