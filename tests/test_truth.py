"""Every measure equals plain float64 code that imports nothing of the product, on trained checkpoints of five architectures."""

from __future__ import annotations

import functools
import math

import pandas as pd
import pytest
import torch
import truth
import truth_probes
from metric_outputs import ELSEWHERE
from truth_attention import ATTENTION
from truth_experiments import EXPERIMENTS
from truth_gradients import GRADIENTS

from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import BackcopyData, Sample
from workbench.errors import WorkbenchError
from workbench.interventions import INTERVENTIONS
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.training.loop import train

MODEL = ModelConfig(n_layers=3, d_model=16, n_heads=4, n_key_value_heads=2, d_mlp=24, d_vocab=24, n_ctx=64)
RECIPE = TrainConfig(
    steps=40, batch=8, T=64, warmup=2, lr=2e-2, validate_every=40, save_every=40, validation_sequences=8
)
FIVE = ("transformer", "resformer", "svformer", "neutreno", "denseformer")
TRUTHS = ATTENTION | truth.VECTORS | EXPERIMENTS | GRADIENTS
PROBES = {
    "token_probe": (truth_probes.probe, 0), "previous_token_probe": (truth_probes.probe, 1),
    "token_probe_streamed": (truth_probes.streamed, 0), "previous_token_probe_streamed": (truth_probes.streamed, 1),
}  # fmt: skip
WITHIN = {"": 0.03, "accuracy": 0.02, "fraction": 0.01, "ceiling": 1e-6, "of_ceiling": 0.01, "spread": 0.02}
"""What a fit that stops early, in float32, may differ by: bits, or shares."""
CLOCK = ["throughput"]
AXES = ["site", "part", "layer", "source", "head", "position", "index", "variant", "control"]


DATA = BackcopyData(24)


class Training:
    """Where an experiment finds training sequences: always the same few, in which not every id occurs."""

    ids, hash = DATA.batch(7, 2, 12, 0), "bigrams"

    def batch(self, step, size, T, seed):
        return self.ids


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """`trained(name)`: a model trained on bigrams for 40 steps, in float64, and the same as a `World`."""

    @functools.cache
    def make(name):
        run = train(
            name, DATA, name=name, runs=tmp_path_factory.mktemp("truth"), model=MODEL, train=RECIPE, device="cpu"
        )
        model = run.load("last", dtype=torch.float64)
        ids = DATA.batch(3, 4, 64, 1)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        return model, truth.World(name, weights, MODEL, ids, Training.ids)

    return make


def sample(world):
    return Sample(world.ids, range(len(world.ids)), "bigrams", "backcopy", Training())


@pytest.fixture(scope="session")
def together(trained):
    """Every measure of one model in one pass; of the other models each is measured by itself."""
    model, world = trained("resformer")
    return measure(model, list(TRUTHS), sample(world), batch=2)


def test_every_measure_has_a_truth():
    assert {*METRICS, *INTERVENTIONS} - {*ELSEWHERE} == {*TRUTHS, *PROBES, *CLOCK}


def test_the_models_have_learned(trained):
    model, world = trained("resformer")
    torch.testing.assert_close(model(world.ids), world.logits, atol=1e-12, rtol=1e-12)
    assert float(world.losses(world.ids).mean()) < math.log(MODEL.d_vocab) - 0.4


def differences(told, true):
    """What does not agree, in words."""
    rows = {truth.at(**{a: row[a] for a in AXES if pd.notna(row[a])}): row for _, row in told.iterrows()}
    wrong = [f"not told: {dict(key)}" for key in true.keys() - rows.keys()]
    wrong += [f"without a truth: {dict(key)}" for key in rows.keys() - true.keys()]
    for key in true.keys() & rows.keys():
        each = torch.as_tensor(true[key], dtype=torch.double)
        found = [(float(rows[key]["value"]), float(each.mean()))]
        if each.ndim:
            found.append((float(rows[key]["se"]), float(each.std() / math.sqrt(len(each)))))
        for a, b in found:
            if not (math.isnan(a) and math.isnan(b)) and not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9):
                wrong.append(f"{dict(key)}: {a} is {b}")
    return wrong


def cases():
    """Each measure on one architecture, and on another one that is slow."""
    others = [kind for kind in FIVE if kind != "resformer"]
    for number, name in enumerate(TRUTHS):
        yield name, "resformer"
        yield pytest.param(name, others[number % 4], marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), [*cases()])
def test_a_measure_equals_its_truth(trained, request, name, kind):
    model, world = trained(kind)
    if not TRUTHS[name](world) and name == "skip_ablation":
        with pytest.raises(WorkbenchError, match="has no path or module that it changes"):
            measure(model, name, sample(world), batch=2)
        return
    if kind == "resformer":
        told = request.getfixturevalue("together").query("metric == @name")
    else:
        told = measure(model, name, sample(world), batch=2)
    wrong = differences(told, TRUTHS[name](world))
    assert not wrong, f"{len(wrong)} numbers of {name} in {kind}: " + "; ".join(wrong[:4])
    assert len(told)


@pytest.mark.slow
def test_errors_of_accumulated_measures_are_those_of_leaving_eighths_of_the_documents_out(trained):
    """Quenouille and Tukey's jackknife: what the public function says of the other seven eighths, eight times."""
    model, _ = trained("resformer")
    ids = DATA.batch(3, 12, 32, 1)
    names = [name for name, m in METRICS.items() if m.form == "accumulated" and m.folds > 1]

    def of(kept):
        found = measure(model, names, Sample(ids[kept], range(len(kept)), "bigrams", "backcopy", Training()), batch=5)
        return found.set_index(["metric", "site", "layer", "index", "variant", "control"])[["value", "se"]]

    told, groups = of([*range(12)]), range(8)
    others = pd.concat({g: of([i for i in range(12) if i % 8 != g])["value"] for g in groups}, axis=1)
    errors = (7 / 8 * others.sub(others.mean(axis=1), axis=0).pow(2).sum(axis=1)).pow(0.5).reindex(told.index)
    with_error = told["se"].notna()
    assert set(told[with_error].index.get_level_values("metric")) == set(names)
    torch.testing.assert_close(
        torch.tensor(told["se"][with_error].to_numpy()),
        torch.tensor(errors[with_error].to_numpy()),
        rtol=1e-5,
        atol=1e-9,
    )


def probe_cases():
    """One site of one architecture is fast, the rest and the controls are not; each probe has an architecture of its own."""
    yield "token_probe", "resformer"
    for name, kind in zip(PROBES, ("svformer", "transformer", "denseformer", "neutreno"), strict=True):
        yield pytest.param(name, kind, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), [*probe_cases()])
def test_a_probe_finds_what_scikit_learn_finds_at_convergence(trained, name, kind):
    (function, before), metric = PROBES[name], METRICS[name]
    world = truth.World(kind, trained(kind)[1].p, MODEL, DATA.batch(4, 16, 64, 1))
    fast = (kind, name) == ("resformer", "token_probe")
    for (site, n), x in [((site, n), x) for (site, n), x in world.seen.items() if site in metric.sites]:
        if n != (2 if fast else n) or (fast and site != "stream"):
            continue
        for control, options in {"": {}, **({} if fast else metric.controls)}.items():
            mine = metric.function(**options)
            mine.update(x, world.ids)
            found, true = mine.result(), function(x.flatten(2), world.ids, before=before, **options)
            assert found.keys() == true.keys()
            for variant, value in found.items():
                assert value == pytest.approx(true[variant], abs=WITHIN[variant], rel=0), (site, n, control, variant)
