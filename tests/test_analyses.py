"""From runs to verdicts: scripts in their quick form, the page and its files, what is measured once and what is left out."""

import html
import importlib
import json
import pkgutil
import re
import shlex
import shutil
import sys

import pandas as pd
import planted
import pytest
from typer.testing import CliRunner

import analyses
from analyses.common import QUICK_MODEL, QUICK_TEXT, QUICK_TRAIN, quick_runs
from analyses.tables import losses_and_sizes, mean_losses, profile
from workbench.claims import CLAIMS, DECIDED, STATUSES, collect_evidence
from workbench.claims.analysis import analyse, verdict_table, write_page, write_tables
from workbench.claims.collect_evidence import find_runs, gather, matching_steps, metrics_needed, run_facts, stored
from workbench.cli import app
from workbench.data.data_sources import prepare
from workbench.errors import BadData, NotMeasured
from workbench.runs.catalogue import catalogue
from workbench.runs.records import read_parquet, records
from workbench.runs.run import Run
from workbench.training.loop import train

SCRIPTS = [
    m.name for m in pkgutil.iter_modules(analyses.__path__) if m.name not in ("common", "tables") and not m.ispkg
]


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """One folder for all quick runs: what several scripts need is trained and measured once."""
    return tmp_path_factory.mktemp("quick")


@pytest.fixture(scope="session")
def three(shared):
    """Runs of three models with two seeds each, whose records grow."""
    return quick_runs(shared, ("transformer", "resformer", "svformer"), seeds=2)


# ---- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS[::3])
def test_script_in_its_quick_form(name, shared, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--quick", str(shared), "--out", str(tmp_path)])
    script = importlib.import_module(f"analyses.{name}").SCRIPT
    script.main()
    said = capsys.readouterr().out
    for claim in script.asked:
        assert f"Claim: {claim.text}" in said
        assert f"Published: {claim.published}" in said
    told = (tmp_path / f"{name}.txt").read_text()
    assert told.count("Here: ") == len(script.asked)
    assert any(words in told for words in STATUSES.values())
    table = pd.read_parquet(tmp_path / f"{name}.parquet")
    assert len(table)
    assert "missing" not in table, "the quick form measures what its table shows"
    assert list(pd.read_csv(tmp_path / f"{name}.csv").columns) == list(table.columns)
    page = tmp_path / f"{name}.html"
    drawn = name != "easier_optimisation"  # several rates are not averaged, and one seed makes no comparison
    assert page.exists() == drawn
    assert not drawn or "plotly" in page.read_text().lower()


def test_scripts_cover_every_claim_once():
    asked = [claim.name for name in SCRIPTS for claim in importlib.import_module(f"analyses.{name}").SCRIPT.asked]
    assert sorted(asked) == sorted(CLAIMS)


def test_tables_average_domains_and_heads_within_a_run_and_no_unequal_trainings():
    made = planted.runs("svformer", seeds=2) + planted.runs("svformer", seeds=2, lr=1e-3, parameters=1e5)
    losses = {(0, "a"): 1.0, (0, "b"): 4.0, (1, "a"): 3.0, (1, "b"): 2.0}
    told = [
        planted.row(of, "validation_loss", loss + 10 * (of["lr"] == 1e-3), data=domain)
        for of in made for (seed, domain), loss in losses.items() if seed == of["seed"]
    ]  # fmt: skip
    mass = [
        planted.row(of, "sink_mass", 0.9 if h == of["seed"] else 0.1, layer=1, head=h) for of in made for h in (0, 1)
    ]
    evidence = planted.evidence(made, mass, told)
    columns = ["lr", "mean", "min", "max", "size"]
    assert mean_losses(evidence)[columns].to_numpy().tolist() == [[4e-3, 2.5, 2.5, 2.5, 2], [1e-3, 12.5, 12.5, 12.5, 2]]
    sizes = losses_and_sizes(evidence)[["data", "parameters", "mean"]].to_numpy().tolist()
    assert sizes == [["a", 1e5, 12.0], ["a", 4e5, 2.0], ["b", 1e5, 13.0], ["b", 4e5, 3.0]]
    assert profile(evidence, "sink_mass", strongest=True)[["lr", "mean"]].to_numpy().tolist() == [
        [1e-3, 0.9],
        [4e-3, 0.9],
    ]


# ---- evidence --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_are_told_apart_by_the_options_that_are_not_their_defaults(shared):
    odd = ("resformer", {"source_layer": 1}), ("transformer", {"lr_factors": {"blocks.0.*": 5.0}})
    made = quick_runs(shared, ("resformer", *odd))
    assert [run_facts(Run.open(path))["model"] for path in made] == [
        "resformer", "resformer[layers=[2, 3],source_layer=1]", "transformer[lr_factors={blocks.0.*: 5.0}]",
    ]  # fmt: skip


@pytest.mark.slow
def test_facts_of_a_run_are_its_own(three):
    found = run_facts(Run.open(three[0]))
    d, f, v, n = QUICK_MODEL.d_model, QUICK_MODEL.d_mlp, QUICK_MODEL.d_vocab, QUICK_MODEL.n_layers
    assert found["parameters"] == 2 * v * d + n * (4 * d * d + 3 * d * f) + (2 * n + 1) * d
    assert found["tokens"] == QUICK_TRAIN.steps * QUICK_TRAIN.batch * QUICK_TRAIN.T
    assert (found["task"], found["bos"], found["seed"]) == ("text", False, 0)
    assert run_facts(Run.open(three[0]), "for imported runs.txt")["data"] == found["data"]


@pytest.mark.slow
def test_plan_asks_for_each_metric_at_the_steps_its_claims_need(three):
    run = Run.open(three[0])
    found = metrics_needed(run, [CLAIMS["richer_values"], CLAIMS["lower_loss"]])
    assert found == {run.steps[0]: ("effective_rank",), run.steps[-1]: ("effective_rank", "loss")}
    assert metrics_needed(Run.open(three[4]), [CLAIMS["deep_values_need_little_context"]]) == {}, (
        "a claim about vanilla models alone"
    )


@pytest.mark.slow
def test_expensive_measures_read_fewer_documents_and_fewer_checkpoints(three, monkeypatch):
    run, asked = Run.open(three[0]), []
    monkeypatch.setattr(collect_evidence, "EXPENSIVE", {"loss": 3})
    monkeypatch.setattr(
        collect_evidence, "measure", lambda run, names, data, steps, n: asked.append((names, steps, n)) or records([])
    )
    gather(run, {2: ("loss", "sink_mass")}, n=8)
    assert sorted(asked) == [(["loss"], [2], 3), (["sink_mass"], [2], 8)]


def test_checkpoints_around_equal_loss_are_measured(three, monkeypatch):
    """The vanilla model ends at 4.0, which the other passes at step 25, between its checkpoints 20 and 30."""
    base, method = (Run.open(three[i]) for i in (0, 2))
    curves = {base: pd.Series({0: 6.0, 40: 4.0}), method: pd.Series({0: 6.0, 20: 4.5, 30: 3.5, 40: 3.0})}
    monkeypatch.setattr(Run, "telemetry", lambda run, *_: run)
    monkeypatch.setattr(collect_evidence, "loss_curve", curves.__getitem__)
    monkeypatch.setattr(Run, "steps", property(lambda run: [0, 10, 20, 30, 40]))
    assert matching_steps([base, method]) == {base: [40], method: [20, 30]}
    monkeypatch.setattr(Run, "steps", property(lambda run: [10, 20]))
    assert matching_steps([base, method]) == {base: [20], method: [20]}, "none beyond those that are there"
    monkeypatch.setattr(Run, "steps", property(lambda run: [0, 10, 20, 30, 40]))
    asked = metrics_needed(method, [CLAIMS["token_information_is_preserved"]], [20, 30])
    assert list(asked) == [0, 20, 30, 40]


@pytest.mark.slow
def test_workers_find_the_same_in_the_same_order_also_after_a_resume(three, forkserver):
    alone = analyse(three[:2], claims=["same_cost"], n=8)
    pair = analyse(three[:2], claims=["same_cost"], n=8, workers=2)
    shutil.rmtree(three[0] / "records")  # as where it was stopped before the first run was measured
    resumed = analyse(three[:2], claims=["same_cost"], n=8, workers=2)
    for other in (pair, resumed):
        pd.testing.assert_frame_equal(alone.evidence.everything(), other.evidence.everything())


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run on sequences of 32 tokens, half as long as those of `three`, of another corpus and tokenizer."""
    folder = tmp_path_factory.mktemp("short")
    data = prepare(root=folder / ".corpora", max_bytes=QUICK_TEXT // 4, vocabulary=400)
    settings = {"model": QUICK_MODEL.replace(d_vocab=data.d_vocab), "train": QUICK_TRAIN.replace(T=32), "device": "cpu"}
    return train("resformer", data, name="short", runs=folder, **settings).path


def test_damaged_and_unfinished_runs_are_left_out_with_their_reason(three, tmp_path):
    for path in three:
        shutil.copytree(path, tmp_path / path.name)
    corpora = three[0].parent / ".corpora"
    shutil.copytree(corpora, tmp_path / ".corpora")
    (tmp_path / three[0].name / "run.json").write_text("{")
    last = Run.open(three[1]).steps[-1]
    shutil.rmtree(tmp_path / three[1].name / f"step_{last:06d}")
    weights = tmp_path / three[2].name / f"step_{last:06d}" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    shutil.rmtree(tmp_path / three[2].name / "records", ignore_errors=True)
    found = analyse([tmp_path], claims=["lower_loss"], n=8)
    assert "cannot be read" in found.problems[three[0].name]
    assert "not finished" in found.problems[three[1].name]
    assert "loss" in found.problems[three[2].name]
    assert found.judged[0].verdict.status == "not_checkable"
    assert found.judged[0].verdict.sentence == "Needs runs of Transformer; here are ResFormer and SVFormer."


def test_no_run_at_all_is_refused(tmp_path):
    with pytest.raises(BadData, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(BadData, match="no such run"):
        find_runs([tmp_path / "nowhere"])


def test_a_relabelled_copy_of_a_run_is_no_further_seed(three, tmp_path):
    for path in three[:2]:
        shutil.copytree(path, tmp_path / path.name)
    copies = [shutil.copytree(path, tmp_path / f"{path.name}9") for path in three[:2]]
    for copy in copies:
        kept = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps(kept | {"seed": 9}))
    found, _ = stored(catalogue(tmp_path).entries)
    assert found.runs.groupby("run")["seed"].first().to_dict() == {p.name: i % 2 for i, p in enumerate(three[:2])} | {
        c.name: i % 2 for i, c in enumerate(copies)
    }
    assert set(found.telemetry("validation_loss")["seed"]) == {0, 1}


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_page_puts_what_is_decided_in_front_and_folds_the_rest(three, tmp_path):
    found = analyse(three, n=8, questions=["loss", "sharing"])
    assert {j.verdict.status in DECIDED for j in found.judged} == {True, False}
    page = write_page(found, tmp_path, "workbench analyze x").read_text()
    front, _, folded = page.partition("<h2>Not decided here</h2>")
    for j in found.judged:
        assert f'id="{j.claim.name}"' in (front if j.verdict.status in DECIDED else folded)
    drawn = [j.verdict.status in DECIDED for j in found.judged if j.figure is not None]
    assert (front.count("<figure"), folded.count("<figure")) == (sum(drawn), 0)
    assert page.count("<script") <= 2 * sum(j.figure is not None for j in found.judged) + 2
    assert "http" not in folded.split("<h2>Provenance</h2>")[1], "nothing is fetched"
    assert "workbench analyze x" in folded


@pytest.mark.slow
def test_tables_hold_what_the_sentences_say(three, tmp_path):
    found = analyse(three, n=8, claims=["lower_loss", "fewer_parameters"])
    write_tables(found, tmp_path)
    table = pd.read_parquet(tmp_path / "verdicts.parquet")
    assert table["claim"].tolist() == ["lower_loss", "fewer_parameters"]
    pd.testing.assert_frame_equal(table, verdict_table(found))
    assert read_parquet([tmp_path / "records.parquet"])["metric"].unique().tolist() == ["loss"]
    assert "all domains" in pd.read_csv(tmp_path / "tables" / "lower_loss.csv")["comparison"].tolist()


def test_command_writes_everything_and_speaks_json(three, tmp_path):
    command = ["analyze", *map(str, three), "--out", str(tmp_path), "--documents", "8", "--workers", "1", "--question"]
    said = CliRunner().invoke(app, [*command, "loss"])
    assert said.exit_code == 0, said.output
    assert (
        "lower_loss: not tested: no difference is found after 0.0 training tokens per parameter, but 10 are needed"
        in said.output.replace("\n", " ")
    )
    verdicts = (tmp_path / "verdicts.csv").read_text()
    printed = re.search("Reproduce: <code>(.*?)</code>", (tmp_path / "claims.html").read_text())[1]
    shutil.move(tmp_path / "verdicts.csv", tmp_path / "before.csv")
    CliRunner().invoke(app, shlex.split(html.unescape(printed))[1:])
    assert (tmp_path / "verdicts.csv").read_text() == verdicts, "of the same claims, on as many documents"
    assert (tmp_path / "figures" / "lower_loss.html").exists()
    told = CliRunner().invoke(app, [*command, "downstream", "--json"])
    assert [row["claim"] for row in json.loads(told.stdout)] == ["downstream_gains"]


def test_a_metric_that_a_model_has_nothing_for_is_said_and_the_rest_is_measured(three):
    """Only value residuals have a shortcut to take away; the others keep their loss."""
    vanilla, _, resformer, *_ = map(str, three)
    options = ["-m", "skip_ablation", "--documents", "4", "--json"]
    alone = CliRunner().invoke(app, ["measure", vanilla, *options])
    assert alone.exit_code
    assert "transformer has no path or module that it changes" in str(alone.exception)
    with pytest.warns(NotMeasured, match="transformer has no path or module that it changes"):
        both = CliRunner().invoke(app, ["measure", vanilla, resformer, "-m", "loss", *options])
    told = pd.DataFrame(json.loads(both.stdout)).groupby("metric")["run"].nunique()
    assert told.to_dict() == {"loss": 2, "skip_ablation": 1}


@pytest.mark.slow
def test_different_lengths_and_tokenizers_are_not_compared(three, short):
    """One sentence says what differs; what does not compare is judged all the same."""
    found = analyse([three[0], short], claims=["lower_loss", "concentration_is_learned"], n=8)
    assert not found.problems
    by_name = {j.claim.name: j.verdict for j in found.judged}
    assert by_name["lower_loss"].status == "not_checkable"
    assert "never under equal conditions: they differ in data, T and d_vocab." in by_name["lower_loss"].sentence
    assert by_name["concentration_is_learned"].status == "unresolved"
