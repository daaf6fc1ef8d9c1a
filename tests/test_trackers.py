"""A run's numbers in other people's tools: what they are called there, and that the real clients take them."""

from __future__ import annotations

import inspect
import math
import sys
import types

import pytest
import training_runs

from workbench.errors import UnknownName, WorkbenchError
from workbench.measurement.measuring import measure
from workbench.runs import tracker_export
from workbench.runs.tracker_export import MlflowSink, export_log, run_identity, tag


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = training_runs.start(tmp_path_factory.mktemp("runs"), recipe=training_runs.RECIPE.replace(log_every=2))
    measure(made, ["sink_mass", "loss"], steps="ends", n=2)
    return made


def test_a_number_is_called_by_its_metric_and_its_axes():
    assert tag({"metric": "validation_loss", "data": "text"}) == "workbench/validation_loss/text"
    assert (
        tag({"metric": "gradient_norm", "part": "q_proj", "layer": 2, "head": None})
        == "workbench/gradient_norm/q_proj/2"
    )
    row = {"metric": "sink_mass", "variant": "k4", "control": "uniform", "layer": 0, "source": 1, "head": 3}
    assert tag(row) == "workbench/sink_mass-k4-uniform/0/from1/h3"


def scalars(folder):
    """(tag, step) -> value of all that a reader of TensorBoard's files shows: what a later file begins anew is gone."""
    from tensorboardX.proto.event_pb2 import Event

    shown, found = {}, sorted((folder / "tensorboard").glob("events.*"))
    for path in found:
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.session_log.status == 1:  # START: everything from this step on is purged
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            shown |= {(v.tag, event.step): v.simple_value for v in event.summary.value if v.HasField("simple_value")}
    return shown


@pytest.mark.slow
def test_tensorboard_shows_telemetry_and_records_once(run):
    for _ in range(2):
        told = export_log(run, "tensorboard")
    found = scalars(run.path)
    assert len(found) == told
    losses = run.telemetry("metric == 'train_loss'")
    sent = [found["workbench/train_loss", step] for step in losses["step"]]
    assert sent == pytest.approx(losses["value"].tolist(), rel=1e-6)
    assert any(name.startswith("workbench/loss/") and step == 8 for name, step in found), "records as well"
    assert not any("/h0" in name for name, _ in found), "by head: only where it is named"
    export_log(run, "tensorboard", ["sink_mass"])
    chosen = {name for name, _ in scalars(run.path)}
    assert {name.split("/")[1].split("-")[0] for name in chosen} == {"sink_mass"}
    assert any(name.endswith("/h0") for name in chosen)


def test_a_training_is_told_as_it_goes_and_after_a_stop_goes_on_there(tmp_path):
    def stop(step, *_):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training_runs.start(tmp_path, progress=stop, log="tensorboard")
    run = training_runs.start(tmp_path, log="tensorboard")
    steps = sorted(step for name, step in scalars(run.path) if name == "workbench/train_loss")
    assert steps == run.telemetry("metric == 'train_loss'")["step"].tolist() == list(range(8))
    with pytest.raises(UnknownName, match="did you mean wandb"):
        training_runs.start(tmp_path, name="none", log="wanbd")
    assert not (tmp_path / "none").exists()


class Recorded:
    """Stands for an object of a client; every call is held against the signature it has there."""

    def __init__(self, signatures, **answers):
        self.signatures, self.answers, self.calls = signatures, answers, []

    def __getattr__(self, name):
        def call(*given, **named):
            self.signatures[name].bind(*given, **named)
            self.calls.append((name, given, named))
            return self.answers.get(name)

        return call


def test_wandb_gets_one_run_with_its_settings_by_the_signatures_of_its_client(run, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    names = ("log", "finish", "define_metric")
    theirs = Recorded({name: inspect.signature(getattr(wandb.Run, name).__get__(object())) for name in names})
    opens = Recorded({"init": inspect.signature(wandb.init)}, init=theirs)
    monkeypatch.setattr(wandb, "init", opens.init)
    told = export_log(run, "wandb")
    ((_, _, settings),) = opens.calls
    assert (settings["mode"], settings["id"], settings["resume"]) == (
        "offline",
        run_identity(run.path, run.info),
        "allow",
    )
    assert settings["config"]["train"]["steps"] == 8
    logged = [given[0] for name, given, _ in theirs.calls if name == "log"]
    assert [row["workbench/step"] for row in logged] == list(range(9))
    assert sum(len(row) - 1 for row in logged) == told
    assert theirs.calls[-1] == ("finish", (), {})


def signature(text):
    names: dict = {}
    exec(f"def f({text}): ...", names)
    return inspect.signature(names["f"])


MLFLOW = {  # of MlflowClient as its documentation has them
    "get_experiment_by_name": "name",
    "create_experiment": "name, artifact_location=None, tags=None",
    "search_runs": "experiment_ids, filter_string='', run_view_type=1, max_results=1000, order_by=None, page_token=None",
    "create_run": "experiment_id, start_time=None, tags=None, run_name=None",
    "update_run": "run_id, status=None, name=None",
    "get_metric_history": "run_id, key",
    "log_batch": "run_id, metrics=(), params=(), tags=(), synchronous=None",
    "set_terminated": "run_id, status=None, end_time=None",
}


@pytest.fixture
def mlflow(monkeypatch):
    """A client that notes its calls, and the run that it makes; `mlflow` is not installed here."""
    made = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"), data=types.SimpleNamespace(metrics={}))
    client = Recorded(
        {k: signature(v) for k, v in MLFLOW.items()}, create_experiment="e1", create_run=made, search_runs=[]
    )
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient = lambda tracking_uri=None, registry_uri=None: client
    entities.Metric = lambda key, value, timestamp, step: (key, value, step)
    entities.Param = lambda key, value: (key, value)
    module.__spec__ = types.SimpleNamespace(name="mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return client, made


def test_mlflow_gets_its_batches_by_the_signatures_of_its_client(run, mlflow):
    """The real client is not installed here: its calls are held against those its documentation gives."""
    client, made = mlflow
    told = export_log(run, "mlflow")
    batches = [named for name, _, named in client.calls if name == "log_batch"]
    assert ("train.steps", "8") in [pair for batch in batches for pair in batch.get("params", ())]
    assert all(len(batch.get("metrics", ())) <= 1000 and len(batch.get("params", ())) <= 100 for batch in batches)
    sent = [number for batch in batches for number in batch.get("metrics", ())]
    assert len(sent) == told
    assert client.calls[-1] == ("set_terminated", ("r1",), {})
    made.data.metrics = {
        key: value for key, value, _ in sent
    }  # told again: the run is found there, all its numbers but one in it
    there = [types.SimpleNamespace(key=k, step=s, value=v) for k, v, s in sent[1:]]
    client.get_metric_history = lambda run_id, key: [number for number in there if number.key == key]
    client.answers["search_runs"], client.calls = [made], []
    assert export_log(run, "mlflow") == told
    assert [named["metrics"] for name, _, named in client.calls if name == "log_batch"] == [sent[:1]]


@pytest.mark.parametrize(("value", "back"), [(math.nan, math.nan), (math.inf, 1.7976931348623157e308), (0.5, 0.5)])
def test_mlflow_is_not_told_twice_what_equals_nothing_or_comes_back_as_the_largest_number(
    mlflow, tmp_path, value, back
):
    client, made = mlflow
    made.data.metrics = {"workbench/train_loss": back}
    number = types.SimpleNamespace(key="workbench/train_loss", step=3, value=back)
    client.answers |= {"search_runs": [made], "get_metric_history": [number]}
    sink = MlflowSink(tmp_path, {}, 0)
    sink.add(3, [{"metric": "train_loss", "value": value}])
    assert "log_batch" not in [name for name, *_ in client.calls]
    sink.add(4, [{"metric": "train_loss", "value": value}])
    assert "log_batch" in [name for name, *_ in client.calls]


def test_an_imports_placeholder_of_a_recipe_is_not_exported(run, monkeypatch):
    sent = []
    monkeypatch.setattr(tracker_export, "installed_trackers", lambda names: [names])
    monkeypatch.setattr(tracker_export, "open_trackers", lambda names, folder, info, start: sent.append(info) or [])
    export_log(run, "wandb")
    monkeypatch.setitem(run.info, "imported", {})
    export_log(run, "wandb")
    assert ["train" in info for info in sent] == [True, False]


def test_what_cannot_be_told_is_refused_by_name(run, monkeypatch):
    with pytest.raises(UnknownName, match="did you mean tensorboard"):
        export_log(run, "tensorbord")
    with pytest.raises(UnknownName, match="did you mean sink_mass"):
        export_log(run, "wandb", metrics=["sink_mas"])

    def refused(*_):
        raise ConnectionError("no route")

    monkeypatch.setitem(tracker_export.TRACKERS, "wandb", ("wandb", refused))
    with pytest.raises(WorkbenchError, match="wandb cannot be opened: ConnectionError: no route"):
        export_log(run, "wandb")
