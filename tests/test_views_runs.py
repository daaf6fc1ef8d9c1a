"""Which runs a page draws: search words, what tells their lines apart, and the names of both."""

from __future__ import annotations

import dashboard
import pandas as pd
import pytest
import test_cli

from workbench.errors import UnknownName, WorkbenchError
from workbench.file_io import read_json, write_json
from workbench.runs.log_import import import_logs
from workbench.runs.records import records, write_parquet
from workbench.views import Link, Source, depth, main_result, start, start_runs
from workbench.views.source import facets

SEEDS = (0, 1, 12)


@pytest.fixture
def ask(tmp_path):
    """A Transformer and ResFormers of two sets of layers, three seeds each."""
    for seed in SEEDS:
        for name, layers in (("transformer", None), ("resformer", [1]), ("resformer", [0, 1])):
            run = f"text-{name}{'' if layers is None else len(layers)}-s{seed}"
            common = dashboard.run(tmp_path, run, name, seed, "text", steps=())
            path = tmp_path / run / "run.json"
            write_json(path, read_json(path) | {"options": {} if layers is None else {"layers": layers}})
            write_parquet(records(dashboard.measured(common, "text")), tmp_path / run / "records" / "a.parquet")
    return Source(tmp_path)


def series(ask, **options):
    runs = ask.chosen(Link("depth", options))
    return {name: sum(e.series == name for e in runs) for name in dict.fromkeys(e.series for e in runs)}


def test_lines_are_told_apart_by_options_seeds_or_the_architecture_alone(ask):
    assert facets(ask.group(Link("depth"))) == ["layers", "seed"]
    assert series(ask) == {"resformer layers=1": 3, "resformer layers=0+1": 3, "transformer": 3}
    assert series(ask, by="") == {"resformer": 6, "transformer": 3}
    assert series(ask, by="seed") == {
        f"{name} · s{n}": runs for name, runs in (("transformer", 1), ("resformer", 2)) for n in SEEDS
    }
    assert len(series(ask, by="layers,seed")) == 9
    with pytest.raises(UnknownName, match="colour"):
        series(ask, by="colour")


def test_search_words_find_names_models_options_and_seeds(ask):
    assert series(ask, find="ResFormer s1") == {"resformer layers=1": 1, "resformer layers=0+1": 1}, "not s12 too"
    assert series(ask, find="resf 12") == series(ask, find="ResFormer s1"), "what is no whole part is looked for inside"
    assert series(ask, find="layers=1") == {"resformer layers=1": 3}
    with pytest.raises(WorkbenchError, match="matches 'svformer'"):
        series(ask, find="svformer")


def test_names_of_models_are_parted_by_commas_and_each_line_is_drawn(ask):
    wanted = "transformer,resformer layers=0+1"
    assert series(ask, models=wanted) == {"resformer layers=0+1": 3, "transformer": 3}
    drawing = depth.layers(ask, Link("depth", {"metric": "importance_entropy", "by": "seed", "find": "transformer"}))
    names = {t.name for t in drawing.figure.data if t.mode == "lines+markers" and t.showlegend is not False}
    assert names == {"Transformer · s0", "Transformer · s1", "Transformer · s12"}


@pytest.mark.slow
def test_runs_are_grouped_within_an_experiment_with_the_interval_of_their_final_loss(ask, tmp_path):
    for seed in SEEDS:
        common = {"run": f"text-transformer-s{seed}", "architecture": "transformer", "seed": seed, "step": 19}
        rows = records([common | {"metric": "validation_loss", "value": 2.0 + seed, "unit": "nats"}])
        write_parquet(rows, tmp_path / common["run"] / "telemetry" / "000000-000020.parquet")
    finished = start_runs.runs_table(Source(tmp_path)).assign(state="finished")  # their checkpoints are not here
    table = start_runs.grouped_runs(finished, ["model"]).set_index("model")
    assert table["runs"].tolist() == [3, 3, 3]
    assert table.loc["Transformer", "final loss"] == pytest.approx(2 + sum(SEEDS) / 3)
    assert table.loc["Transformer", "final loss, seeds"] == 3
    assert table.drop("Transformer")["final loss, seeds"].tolist() == [0, 0]
    runs = finished.assign(**{"trained to step": pd.array([20] * 9, dtype="Int64")})
    runs.loc[runs["run"] == f"text-transformer-s{SEEDS[0]}", "trained to step"] = 8
    early = start_runs.grouped_runs(runs, ["model"]).set_index("model").loc["Transformer"]
    assert early["final loss"] == pytest.approx(2 + sum(SEEDS[1:]) / 2), "a run that stopped early has no final loss"
    assert (early["runs"], early["final loss, seeds"]) == (3, 2)
    for state in ("stopped before step 20", "being written now"):  # all at one step
        stopped = start_runs.grouped_runs(runs.assign(state=state, **{"trained to step": 8}), ["model"])
        assert stopped["final loss, seeds"].tolist() == [0, 0, 0], "no run was trained to its end"
    with pytest.raises(UnknownName, match="column that groups runs"):
        start_runs.grouped_runs(start_runs.runs_table(ask), ["final loss"])
    done = test_cli.run("list", "runs", "--by", "model", "--runs", tmp_path, "--out", tmp_path / "t.tex")
    assert done.returncode == 0, done.stderr
    assert r"\toprule" in (tmp_path / "t.tex").read_text()
    assert "has no seeds" in test_cli.run("list", "metrics", "--by", "model").stderr


def test_a_final_loss_is_of_the_last_step_that_has_every_domain(tmp_path):
    common = dashboard.run(tmp_path, "a", "transformer", 0, "text", steps=(20,)) | {"metric": "validation_loss"}
    losses = [("prose", 0, 4.0), ("prose", 10, 3.0), ("prose", 20, 1.0), ("code", 0, 6.0), ("code", 10, 5.0)]
    rows = records(common | {"data": data, "step": step, "value": value} for data, step, value in losses)
    write_parquet(rows, tmp_path / "a" / "telemetry" / "000000-000020.parquet")
    assert start_runs.runs_table(Source(tmp_path))["final loss"].tolist() == [4.0]
    write_parquet(rows.iloc[[0, 4]], tmp_path / "a" / "telemetry" / "000000-000020.parquet")
    assert start_runs.runs_table(Source(tmp_path))["final loss"].isna().all(), "no step has both"


def test_the_best_rate_of_the_main_result_is_best_on_seeds_that_all_rates_have(tmp_path):
    """Rate 0.002 was run on the luckiest seed alone, where rate 0.001 is better."""
    for rate, losses in ((1e-3, (2.0, 2.2, 2.4)), (2e-3, (2.1,))):
        for architecture in ("transformer", "resformer"):
            for seed, loss in enumerate(losses):
                common = dashboard.run(
                    tmp_path, f"{architecture}-{rate}-{seed}", architecture, seed, "text", steps=(20,)
                )
                path = tmp_path / common["run"] / "run.json"
                write_json(path, (info := read_json(path)) | {"train": info["train"] | {"lr": rate}})
                rows = records([common | {"metric": "validation_loss", "data": "prose", "step": 20, "value": loss}])
                write_parquet(rows, path.parent / "telemetry" / "000000-000020.parquet")
    result = main_result.finding(Source(tmp_path), Link("start"))
    assert result.rates[result.best] == result.rates[result.group] == 1e-3
    assert result.seeds == (3, 3)


def test_a_loss_is_compared_with_the_transformer_of_its_own_size(tmp_path):
    for name, architecture, changes in (
        ("base", "transformer", {}), ("same", "resformer", {"train": {"lr": 2e-3}}), ("deep", "resformer", {"model": {"n_layers": 4}}),
    ):  # fmt: skip
        common = dashboard.run(tmp_path, name, architecture, 0, "text", steps=(20,))
        info = read_json(tmp_path / name / "run.json")
        write_json(tmp_path / name / "run.json", info | {key: info[key] | new for key, new in changes.items()})
        rows = records(
            [common | {"metric": "validation_loss", "data": "prose", "step": 20, "value": 2.0 + len(changes)}]
        )
        write_parquet(rows, tmp_path / name / "telemetry" / "000000-000020.parquet")
    source = Source(tmp_path)
    assert start.final_losses(source, source.catalogue().entries)["minus Transformer, same seed"] == {
        "base": 0.0,
        "same": 1.0,
    }


def test_a_log_whose_validation_ended_before_its_training_has_no_final_loss(tmp_path):
    """Evaluated at 0 and 50 of 100 steps, at 0 alone, at the end, and at 96, which is less than an interval before the end."""
    logs = {
        "early": {0: 4.0, 50: 3.0},
        "start": {0: 4.5},
        "end": {0: 4.0, 50: 3.0, 100: 2.0},
        "near": {0: 4.0, 48: 3.0, 96: 2.5},
    }
    for i, (name, losses) in enumerate(logs.items()):
        rows = "".join(f"{step},{9 - i},{losses.get(step, '')}\n" for step in range(0, 101, 2))
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / f"{name}.csv").write_text("step,train_loss,val_loss\n" + rows)
    runs = import_logs([tmp_path / "logs"], tmp_path / "runs", name="x").runs
    names = {run.name: run.info["log"]["name"].removesuffix(".csv") for run in runs}
    table = start_runs.runs_table(Source(tmp_path / "runs")).dropna(subset="final loss")
    assert dict(zip(table["run"].map(names), table["final loss"], strict=True)) == {"end": 2.0, "near": 2.5}
