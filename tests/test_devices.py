"""On another device everything says what it says on the CPU: hooks, gradients, measures, figures, edits, observed modules, recordings.

The device is a GPU where there is one, else a pretended one, which computes on the CPU and refuses tensors of both places.
PyTorch cannot forget the latter, so `test_gpu.py` runs this file in a process of its own.
"""

from __future__ import annotations

import contextlib
import os

import dashboard
import figure_outputs
import foreign
import metric_outputs
import pandas as pd
import pretended_device
import pytest
import seams
import torch
from observed import STRANGERS, large, see
from own_loop import GPT, loss_of, tokens
from test_figure_outputs import test_views_draw_and_say_what_they_did as same_figures
from test_metric_versions import compare

from workbench import Recorder, prompts
from workbench.interventions import edited
from workbench.measurement.measuring import measure
from workbench.models import ARCHITECTURES
from workbench.models.hooked import next_token_loss
from workbench.runs.run import Run
from workbench.training.recorder import DEFAULT, NotRecorded

PRETENDED = "WORKBENCH_PRETENDED_DEVICE"
DEVICE = "cuda" if torch.cuda.is_available() else pretended_device.NAME
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE == pretended_device.NAME and PRETENDED not in os.environ,
        reason="no CUDA device; test_gpu.py runs this on a pretended one",
    ),
]
ALL = torch.cuda.is_available()  # every case on a GPU, some of each kind on the pretended device
IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))
EDITS = (
    "values:layer=1,how=zero", "values:layer=1,how=shuffle,seed=2", "values:layer=1,how=mean", "values:layer=1,how=prompt",
    "values:layer=2,how=layer", "head:layer=1,head=0,how=mean", "remove:layer=1,part=mlp", "sink:head=1",
)  # fmt: skip
CALLS = {
    "value_norms": lambda m: prompts.value_norms(m, IDS[:1]),
    "logit_lens": lambda m: prompts.logit_lens(m, IDS[:1], top=5),
    "next_tokens": lambda m: prompts.next_tokens(m, IDS[:1]),
    "logit_attribution": lambda m: prompts.logit_attribution(m, IDS[:1], position=5),
    "score_attribution": lambda m: prompts.score_attribution(m, IDS[:1], layer=1, head=0, query=9, key=2),
    "sink_attribution": lambda m: prompts.sink_attribution(m, IDS[:1], layer=1, head=0),
    "attention_map": lambda m: prompts.attention_map(m, IDS[:1], 1, 0),
    "attention_overview": lambda m: prompts.attention_overview(m, IDS[:1]),
    "token_path": lambda m: prompts.token_path(m, IDS[:1], 5),
    "value_flow": lambda m: prompts.value_flow(m, IDS[:1], 5, 1),
    "edit_effect": lambda m: prompts.edit_effect(m, IDS[:1], "values:layer=1,how=zero"),
    "patch_sweep": lambda m: prompts.patch_sweep(m, IDS[:1], IDS[1:]),
    "fit_tuned_lens": lambda m: prompts.fit_tuned_lens(m, IDS.repeat(4, 1) + torch.arange(8)[:, None] % 7),
    "check_model": lambda m: prompts.check_model(m, IDS[:1]).drop(columns="seconds", errors="ignore"),
}


@pytest.fixture(autouse=True, scope="module")
def device():
    with contextlib.nullcontext() if DEVICE == "cuda" else pretended_device.pretended():
        yield


def numbers(x):
    """Every number in a result, in its order."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().double().flatten().tolist()
    if isinstance(x, pd.DataFrame):
        return x.select_dtypes("number").to_numpy(float).ravel().tolist()
    if isinstance(x, int | float) and not isinstance(x, bool):
        return [float(x)]
    if isinstance(x, dict):
        return [n for value in x.values() for n in numbers(value)]
    if isinstance(x, list | tuple):
        return [n for value in x for n in numbers(value)]
    if hasattr(x, "dtype"):
        return x.ravel().astype(float).tolist() if x.dtype.kind in "fiu" else []
    return numbers(vars(x)) if hasattr(x, "__dataclass_fields__") else []


def agree(mine, theirs, rel=1e-6):
    found, true = numbers(mine), numbers(theirs)
    assert len(found) == len(true) > 0
    size = max((abs(x) for x in true if x == x), default=1.0)
    assert found == pytest.approx(true, rel=rel, abs=rel * max(size, 1e-9), nan_ok=True)


@pytest.mark.parametrize("name", ARCHITECTURES if ALL else seams.TOGETHER)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32] if ALL else [torch.float64])
def test_hooks_and_gradients(awake, name, dtype):
    found = {}
    for device in ("cpu", DEVICE):
        model = awake(name, dtype=dtype).to(device)
        logits, cache = model.run_with_cache(IDS)
        assert {x.device.type for x in cache.values()} == {device}
        loss = next_token_loss(model(IDS), IDS.to(device))
        loss.backward()
        found[device] = dict(cache.items()) | {n: p.grad for n, p in model.named_parameters()} | {"logits": logits}
    assert found[DEVICE].keys() == found["cpu"].keys()
    for key, true in found["cpu"].items():
        if true is not None:
            near = 1e-9 if dtype == torch.float64 else 5e-4 * float(true.detach().abs().max()) + 1e-6
            torch.testing.assert_close(
                found[DEVICE][key].cpu(), true, rtol=1e-9, atol=near, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.skipif(DEVICE == "cuda", reason="a CUDA device is here")
def test_the_pretended_device_refuses_what_a_gpu_refuses():
    away, here = torch.arange(3.0).to(DEVICE), torch.arange(3)
    assert (away[here] + 1).cpu().tolist() == [1, 2, 3], "an index may be on the CPU"
    for mixed in (
        lambda: away + here,
        lambda: here[here.to(DEVICE)],
        lambda: torch.stack([away, here.float()]),
        lambda: away.numpy(),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            mixed()


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        load = Run.load
        patch.setattr(Run, "load", lambda self, *a, **k: load(self, *a, **k).to(DEVICE))
        yield metric_outputs.measured(metric_outputs.MEASURES)


@pytest.mark.parametrize("name", metric_outputs.MEASURES)
def test_measures(measured, name):
    compare(name, metric_outputs.kept()[name], measured[name])


@pytest.mark.parametrize("link", figure_outputs.LINKS)
def test_figures(populated, link, monkeypatch):
    load = Run.load
    monkeypatch.setattr(Run, "load", lambda self, *a, **k: load(self, *a, **k).to(DEVICE))
    same_figures(dashboard.kept(populated), link)


@pytest.mark.parametrize("architecture", ["resformer", "denseformer", "neutreno", "sink_logit"])
@pytest.mark.parametrize("name", CALLS)
def test_prompts(awake, name, architecture):
    here, there = (awake(architecture, dtype=torch.float64).to(device) for device in ("cpu", DEVICE))
    try:
        true = CALLS[name](here)
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            CALLS[name](there)
        return
    agree(CALLS[name](there), true)


@pytest.mark.parametrize("edit", EDITS)
def test_edits(awake, edit):
    found = []
    for device in ("cpu", DEVICE):
        model = awake("resformer", dtype=torch.float64).to(device)
        with torch.no_grad(), edited(model, edit, tokens=IDS, other=IDS.flip(0)):
            found.append(model(IDS))
            if "prompt" not in edit and "how=layer" not in edit:  # these stand for one prompt
                found.append(model.generate(IDS[:, :5], 4, temperature=0))
    agree(found[len(found) // 2 :], found[: len(found) // 2])


@pytest.mark.parametrize("name", list(STRANGERS)[:: 1 if ALL else 4])
def test_observed(name):
    found = []
    for device in ("cpu", DEVICE):
        model = see(large(STRANGERS[name]()).to(device), IDS.to(device))
        logits, cache = model.run_with_cache(IDS.to(device))
        rows = measure(
            model,
            ["sink_mass", "token_importance", "value_norm", "hidden_norm", "loss", "effective_rank", "row_entropy"],
            IDS,
        )
        found.append([logits, dict(cache.items()), rows[["value", "se"]]])
    agree(*reversed(found), rel=1e-3)


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt_neox", *(["mistral", "qwen3", "gemma", "phi", "olmo2"] if ALL else [])]
)
def test_library_models(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        name, **foreign.SIZES, head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = []
    for device in ("cpu", DEVICE):
        model = see(module.to(device), IDS.to(device))
        rows = measure(model, ["sink_mass", "value_norm", "loss"], IDS)
        found.append(rows[["value", "se"]])
    agree(*reversed(found), rel=1e-3)


def test_recordings(tmp_path):
    frames = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = GPT().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(NotRecorded):
            recorder = Recorder(model, 1, tmp_path / device, quantities=DEFAULT)
        with recorder:
            for step in range(3):
                loss = loss_of(model, tokens(step).to(device))
                optimizer.zero_grad()
                loss.backward()
                recorder.step(loss)
                optimizer.step()
        frame = Run.open(tmp_path / device).telemetry()
        frames.append(frame[~frame["metric"].isin(["seconds_per_step", "recorder_share"])])
    agree(frames[1][["step", "layer", "value"]], frames[0][["step", "layer", "value"]], rel=1e-4)
