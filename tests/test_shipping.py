"""Evidence that ships: a study's folder without weights says all that its runs said, and nothing writes to it."""

import dataclasses
import hashlib
import io
import json
import shutil

import pandas as pd
import pytest
import torch
from app_pages import charts, said

import workbench
from workbench.claims import collect_evidence as collecting
from workbench.claims import stored_verdicts
from workbench.claims.collect_evidence import collect, find_runs, stored
from workbench.data import data_sources
from workbench.data.corpus import Corpus, Document
from workbench.data.data_sources import RepeatedData, TextData, open_data
from workbench.data.tokenizer import train_tokenizer
from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.file_io import read_json, write_json
from workbench.measurement.measuring import measure
from workbench.places import SHIPPED
from workbench.runs.catalogue import catalogue
from workbench.runs.records import load_records, records, write_parquet
from workbench.runs.run import Run, list_runs
from workbench.statistics.copying_and_sink_steps import sink_step
from workbench.storage import packed
from workbench.storage.mirror import address_of
from workbench.storage.packed import unpacked
from workbench.studies.shipping import _shipped, ship
from workbench.studies.study_file import read_study
from workbench.studies.study_runs import outcomes, plan, prepare_data, sizes, summary, work
from workbench.training.loop import train
from workbench.views import Link, Source, source
from workbench.views.start_runs import runs_table
from workbench.views.writing import caption_of

STUDY = """
question = "When does the sink form?"
seeds = [0]
outcome = "sink_step"
baseline = "transformer"
data = { kind = "repeated", vocabulary = 16 }
model = { n_layers = 2, d_model = 16, n_heads = 1, d_mlp = 4, n_ctx = 16 }
recipe = { steps = 4, batch = 2, T = 16, warmup = 1, validate_every = 2, validation_sequences = 2 }
measure = { metrics = ["sink_mass", "loss"], steps = "all", n = 2 }

[[models]]
architecture = "transformer"
[[models]]
architecture = "resformer"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    (root / "small.toml").write_text(STUDY)
    study = read_study(root / "small.toml")
    for job in plan(study, root / "runs"):
        work(dataclasses.replace(job, data=prepare_data(job)))
    return root, study


@pytest.fixture(scope="module")
def evidence(trained):
    root, study = trained
    measure(
        list_runs(root / "runs")[0][0], "value_norm", n=2
    )  # as a measuring of more questions that was stopped leaves one run
    ship(study, root / "small.toml", root / "runs", root / "evidence", questions=["loss"], commit="abc")
    return root / "evidence"


@pytest.mark.slow
def test_shipped_runs_say_what_the_runs_said_and_hold_no_weights(trained, evidence):
    root, study = trained
    assert not list(evidence.rglob("*.safetensors"))
    told = json.loads((evidence / "small" / "provenance.json").read_text())
    assert (told["commit"], told["runs"], told["not measured"]) == ("abc", 2, {})
    mine, problems = find_runs([root / "runs"])
    theirs, others = find_runs([evidence])
    assert not problems | others
    assert [run.name for run in mine] == [run.name for run in theirs]
    assert all(run.finished and run.shipped for run in theirs)
    key = ["run", "metric", "step", "layer", "head", "control"]
    tables = [load_records([r.path for r in runs]).sort_values(key) for runs in (mine, theirs)]
    assert set(tables[1]["metric"]) == {"sink_mass", "loss"}, "what nobody asked for stays behind"
    asked = tables[0][tables[0]["metric"] != "value_norm"]
    for a, b in zip(asked.iterrows(), tables[1].iterrows(), strict=True):
        assert a[1]["value"] == pytest.approx(b[1]["value"], rel=1e-6)
    assert len(collect(theirs, [])[0].everything()) == len(asked) > 0  # nothing is measured, and all is there
    assert (
        len(stored(catalogue(evidence).entries)[0].samples("loss")) == 2 * 2 * 2
    )  # the loss of two documents at both ends of two runs
    before, after = (
        summary(study, outcomes(study, plan(study, where), {})) for where in (root / "runs", evidence / "small")
    )
    pd.testing.assert_frame_equal(before, after, check_exact=False, rtol=1e-6)


def test_every_run_ships_its_median_speed_wherever_it_was_logged(trained, tmp_path):
    """Speeds are logged before multiples of 100 steps and whenever 2 s have passed, never at the steps of the losses."""
    path = shutil.copytree(trained[0] / "runs" / "small-transformer-s0", tmp_path / "run")
    info = read_json(path / "run.json")
    write_json(path / "run.json", info | {"train": info["train"] | {"steps": 1000}})
    rows = [{"step": s, "metric": "train_loss", "value": 3.0} for s in range(1000)]
    rows += [{"step": s, "metric": "tokens_per_second", "value": v} for s, v in ((99, 7.0), (571, 9.0), (999, 50.0))]
    shutil.rmtree(path / "telemetry")
    write_parquet(records(rows), path / "telemetry" / "000000-001000.parquet")
    _, tables = _shipped(Run.open(path), "small", ["loss"])
    losses, speed = (
        tables["telemetry"][tables["telemetry"]["metric"] == m] for m in ("train_loss", "tokens_per_second")
    )
    assert losses["step"].tolist() == list(range(0, 1000, 10))
    assert (speed["step"].tolist(), speed["value"].tolist()) == ([999], [9.0])
    write_parquet(records(rows[:1000]), path / "telemetry" / "000000-001000.parquet")
    assert len(_shipped(Run.open(path), "small", ["loss"])[1]["telemetry"]) == 100, "a run may have logged none"


@pytest.mark.slow
def test_a_study_measured_in_part_does_not_ship(trained, tmp_path, monkeypatch):
    root, study = trained
    really = collecting.measure

    def broken(run, names, *more, **settings):
        if run.name == "small-resformer-s0":
            raise WorkbenchError("no memory")
        return really(run, names, *more, **settings)

    monkeypatch.setattr(collecting, "measure", broken)
    shutil.copytree(root / "runs", tmp_path / "runs")
    for file in (tmp_path / "runs" / "small-resformer-s0" / "records").glob("*"):
        file.unlink()
    left_out = r"small does not ship\. Studies left out because .*: small \(.* on 1 of 2 runs\)"
    with pytest.raises(WorkbenchError, match=left_out):
        ship(study, root / "small.toml", tmp_path / "runs", tmp_path / "out", questions=["loss"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_shipped_run_is_not_measured_and_not_trained_again(trained, evidence):
    _, study = trained
    job = plan(study, evidence / "small")[0]
    before = sorted(evidence.rglob("*"))
    with pytest.raises(BadCheckpoint, match="shipped without weights"):
        measure(Run.open(evidence / "small" / job.name), "loss")
    assert sorted(evidence.rglob("*")) == before


@pytest.fixture(scope="module")
def models(trained):
    root, study = trained
    return ship(study, root / "small.toml", root / "runs", root / "models", questions=["sinks"], weights=[0, 4])


@pytest.mark.slow
def test_weights_ship_in_half_the_bytes_and_are_what_the_records_are_of(trained, models, tmp_path):
    (root, study), place = trained, models
    run, original = (Run.open(folder / "small-transformer-s0") for folder in (place, root / "runs"))
    assert (run.steps, run.shipped, run.finished) == ([0, 4], True, True)
    for mine, theirs in zip(run.load(4).parameters(), original.load(4).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.bfloat16().float(), rtol=0, atol=0)
    files = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    stored = load_records([run.path])
    for metric in ("loss", "value_norm"):  # one that came with it and one that did not, twice
        again = [measure(run, metric, steps="all", n=2) for _ in range(2)]
        pd.testing.assert_frame_equal(*again)
    losses = (
        f[f["metric"] == "loss"].sort_values(["step", "layer"])["value"]
        for f in (measure(run, "loss", steps="all", n=2), stored)
    )
    assert [*next(losses)] == pytest.approx([*next(losses)], rel=1e-6)
    assert {
        path: path.read_bytes() for path in place.rglob("*") if path.is_file() and not path.name.startswith(".")
    } == files
    with pytest.raises(WorkbenchError, match="step 3"):
        ship(study, root / "small.toml", root / "runs", tmp_path / "other", weights=[3])


@pytest.mark.slow
def test_a_run_on_the_embedded_text_needs_no_copy_of_it(trained, tmp_path, monkeypatch):
    texts = [
        Document(f"{i}.py", "python", "train" if i else "validation", "def f(x):\n    return x\n" * 20)
        for i in range(3)
    ]
    monkeypatch.setattr(data_sources, "embedded", lambda: Corpus(tuple(texts), {}))
    data = TextData(data_sources.embedded(), train_tokenizer([d.text for d in texts], 270))
    data.tokenizer.save(tmp_path / "tokenizer.json")
    assert open_data(data.describe(), tmp_path, tmp_path / "tokenizer.json").hash == data.hash
    with pytest.raises(BadCheckpoint, match="is not under"):
        open_data(data.describe() | {"hash": "0" * 16}, tmp_path, tmp_path / "tokenizer.json")


@pytest.mark.slow
def test_what_ships_is_not_shipped_again_over_itself(trained, evidence):
    before = {path: path.read_bytes() for path in evidence.rglob("*.parquet")}
    with pytest.raises(WorkbenchError, match="ships already"):
        ship(trained[1], trained[0] / "small.toml", evidence / "small", evidence)
    assert {path: path.read_bytes() for path in evidence.rglob("*.parquet")} == before


def test_a_study_with_another_recipe_than_its_runs_does_not_ship(trained, tmp_path):
    (tmp_path / "longer.toml").write_text(STUDY.replace("warmup = 1", "warmup = 2"))
    changed = dataclasses.replace(read_study(tmp_path / "longer.toml"), name="small")
    with pytest.raises(WorkbenchError, match="small-transformer-s0 was trained with another recipe"):
        ship(changed, tmp_path / "longer.toml", trained[0] / "runs", tmp_path / "evidence")


def test_a_study_that_is_not_finished_does_not_ship(trained, tmp_path):
    root, study = trained
    shutil.copytree(root / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "small-resformer-s0" / "step_000004")
    with pytest.raises(WorkbenchError, match="1 of 2 runs of small are not finished, first small-resformer-s0"):
        ship(study, root / "small.toml", tmp_path / "runs", tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()


def test_an_empty_folder_of_runs_shows_what_ships_until_there_is_a_run(evidence, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "EVIDENCE", evidence)
    here = Source(tmp_path)
    assert {e.name for e in here.catalogue().entries} == {"small-transformer-s0", "small-resformer-s0"}
    assert not here.own()
    assert set(runs_table(here)["state"]) == {"shipped, read-only"}
    with pytest.raises(WorkbenchError, match="shipped without weights"):
        here.subjects(Link("attention"))
    shutil.copytree(trained[0] / "runs" / "small-resformer-s0", tmp_path / "mine")
    assert [e.name for e in here.catalogue().entries] == ["mine"]
    assert here.own()


def test_pictures_of_compared_runs_without_weights_name_both(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "EVIDENCE", evidence)
    here = source.Source(tmp_path)
    a, b = (e.name for e in here.catalogue().entries[:2])
    group = here.catalogue().entries[0].group
    words = caption_of(here, Link("training", {"set": group, "a": a, "b": b, "compare": "1"}))
    assert words.startswith("A: ResFormer · s")
    assert "; B: " in words
    assert caption_of(here, Link("start", {"set": group, "compare": "1"}))


def test_shipped_runs_are_judged_beside_a_folder_that_does_not_hold_them(evidence, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stored_verdicts, "SHIPPED", evidence.parent)
    paths = [e.path for e in catalogue(evidence).entries]

    def judged(*asked):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(asked)))
        stored_verdicts.main(tmp_path)
        return stored_verdicts.parse_verdicts(json.loads(capsys.readouterr().out.splitlines()[-1]))

    assert {"loss", "sink_mass"} <= judged(*paths).metrics
    with pytest.raises(WorkbenchError, match="1 of 3 runs to judge are gone"):
        judged(*paths, str(tmp_path / "gone"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "figures"), [("depth", 1), ("attention", 0)])
def test_pages_show_evidence_where_there_are_no_runs(evidence, tmp_path, monkeypatch, browse, name, figures):
    monkeypatch.setattr(source, "EVIDENCE", evidence)
    at = browse(tmp_path / "runs", name)
    assert "Traceback" not in said(at)
    assert "2 runs shipped with the project, read-only" in said(at)
    assert len(charts(at)) >= figures
    assert ("shipped without weights" in said(at)) == (name == "attention")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention"])
def test_pages_open_on_shipped_models_where_there_are_no_runs(models, tmp_path, monkeypatch, browse, name):
    monkeypatch.setattr(source, "MODELS", models)
    at = browse(tmp_path / "runs", name)
    assert "2 runs shipped with the project, read-only" in said(at)
    for wrong in ("Traceback", "without weights", "not among this model's tokens"):
        assert wrong not in said(at)
    assert "Measure it here" not in [b.label for b in at.button], "what ships is not written to"


def test_a_study_ships_in_few_files_and_its_copy_in_the_cache_stands_for_it(evidence, tmp_path):
    """By its folder, its name within, or one of its runs; beside studies of run folders; a new copy for new contents."""
    assert {path.name for path in (evidence / "small").iterdir()} == {
        "small.toml", "provenance.json", "runs.json", "records.parquet", "samples.parquet", "telemetry.parquet"
    }  # fmt: skip
    root = tmp_path / "evidence"
    shutil.copytree(evidence, root)
    run = root / "small" / "small-transformer-s0"
    assert Run.open(run).name == run.name
    assert address_of(Run.open(run).path) == str(run)
    assert [entry.name for entry in catalogue(root / "small").entries] == ["small-resformer-s0", run.name]
    shutil.copytree(unpacked(root / "small"), root / "old")  # as studies shipped before
    assert len(catalogue(root).entries) == 2, "a run's name stands for its numbers, so it is there once"
    for path in (root / "old").glob("small-*-s0"):
        path.rename(path.with_name(path.name.replace("small", "old")))
    assert len(catalogue(root).entries) == 4
    assert unpacked(root) == unpacked(root)
    infos = json.loads((root / "small" / "runs.json").read_text())
    infos[run.name]["seed"] = 7
    (root / "small" / "runs.json").write_text(json.dumps(infos))
    assert Run.open(run).seed == 7
    infos["../elsewhere"] = infos[run.name]
    (root / "small" / "runs.json").write_text(json.dumps(infos))
    with pytest.raises(BadCheckpoint, match=r"'../elsewhere' is no run"):
        packed._runs(root / "small")


def test_a_folder_with_runs_of_its_own_stays_where_it_is(evidence, trained, tmp_path):
    root, _ = trained
    shutil.copytree(root / "runs" / "small-transformer-s0", tmp_path / "small-transformer-s0")
    shutil.copytree(evidence / "small", tmp_path / "small")
    assert unpacked(tmp_path) == tmp_path
    assert unpacked(tmp_path / "absent") == tmp_path / "absent"


def test_damaged_evidence_is_named_and_the_rest_shown(evidence, tmp_path):
    root, names = tmp_path / "evidence", ["small-resformer-s0", "small-transformer-s0"]
    shutil.copytree(evidence, root)
    (root / "small" / "records.parquet").write_bytes(b"PAR1")
    (root / "small" / "provenance.json").unlink()
    found = catalogue(root)
    assert [e.name for e in found.entries] == names
    here = Source(root)
    assert here.records(found.entries, ["sink_mass"]).empty
    assert sorted(here.problems) == names
    assert len(here.telemetry(found.entries, ["copy_loss"]))
    (root / "small" / "runs.json").write_text("{")
    assert not catalogue(root).entries
    assert "small" in catalogue(root).problems


def test_the_step_of_a_sink_lies_between_checkpoints_by_hand():
    """Masses .1, .4, .6 of the stronger head at steps 0, 100, 200: a half at 150."""
    rows = [(0, 0, 0.1), (100, 0, 0.4), (200, 0, 0.6), (0, 1, 0.0), (100, 1, 0.1), (200, 1, 0.2)]
    frame = pd.DataFrame(rows, columns=["step", "head", "value"])
    frame = frame.assign(metric="sink_mass", layer=0, control=None, variant=None)
    assert sink_step(frame) == pytest.approx(150)
    assert pd.isna(sink_step(frame[frame["step"] < 200]))
    with pytest.raises(WorkbenchError, match="less than two checkpoints"):
        sink_step(frame[frame["step"] == 0])


MODELS = {
    "transformer": "ab49cb754b562d7d5e624f9a106c1ea83dedf2eebba635da113d30eb7eb9f33a",
    "resformer": "67984fe7c124953c708f05b92ff49faa9bce0293f76996f8f68fda38a2e3a5a6",
}
"""SHA-256 of the weights of all steps of a shipped model, one after the other."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
def test_the_shipped_models_are_the_ones_that_were_measured_and_have_learned(architecture):
    run = Run.open(SHIPPED / "models" / f"models-{architecture}-s0")
    assert run.steps == [0, 512, 2048, 5000]
    files = [run.step_folder(step) / "model.safetensors" for step in run.steps]
    assert hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() == MODELS[architecture]
    rows = load_records([run.path])
    assert rows.loc[(rows["metric"] == "loss") & (rows["step"] == 5000), "value"].mean() < 3
    model = workbench.load(run.path)
    assert (model.architecture, model.source["step"]) == (architecture, 5000)
    assert model.tokenizer.decode(model.tokenizer.encode("def main():")) == "def main():"
    repeated = RepeatedData(1024).sample(16, 64)
    heads = [measure(m, "induction_score", repeated)["value"].max() for m in (run.load(0), model)]
    assert heads[0] < 0.05 < 0.25 < heads[1], "a head that copies what followed last time, on random tokens too"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["resformer"])
def test_a_shipped_model_loses_on_the_embedded_text_what_its_records_say(architecture):
    run = Run.open(SHIPPED / "models" / f"models-{architecture}-s0")
    rows = load_records([run.path])
    told = rows[(rows["metric"] == "loss") & (rows["step"] == 5000) & rows["layer"].isna()]["value"].mean()
    again = measure(run.load("last"), "loss", run.data.sample(64, run.train.T))
    assert again["value"].mean() == pytest.approx(told, abs=1e-4)


@pytest.mark.slow
def test_a_run_trained_again_from_the_shipped_study_finds_the_shipped_numbers(tmp_path):
    folder = SHIPPED / "evidence" / "sinks"
    job = plan(read_study(folder / "sinks.toml"), tmp_path)[0]
    shipped, (model, recipe) = Run.open(folder / job.name), sizes(job)

    def enough(step, *_):
        if step > 120:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            job.cell.architecture, shipped.data, name=job.name, runs=tmp_path, model=model, train=recipe, seed=job.seed,
            progress=enough,
        )  # fmt: skip
    again, steps = Run.open(tmp_path / job.name), [0, 50, 100]
    assert again.info["data"]["hash"] == shipped.info["data"]["hash"]
    losses = [r.telemetry("metric == 'validation_loss'").set_index("step").loc[steps] for r in (again, shipped)]
    apart = (losses[0]["value"] - losses[1]["value"]).abs()
    assert (apart <= losses[1]["se"]).all(), "within the error over documents"
    kept = [step for step in again.steps if step <= 100]
    masses = [
        rows[(rows["metric"] == "sink_mass") & rows["control"].isna()]
        .set_index(["step", "layer"])["value"]
        .astype(float)
        for rows in (measure(again, "sink_mass", steps=kept, n=64), load_records([shipped.path]))
    ]
    assert (masses[0] - masses[1].reindex(masses[0].index)).abs().max() < 0.02
