"""The published implementations' outputs on their own random checkpoints, reproduced number by number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import workbench
from workbench.checkpoints.tensor_and_setting_names import llama_name
from workbench.errors import ArchitectureAssumed, BadCheckpoint
from workbench.hook_names import stream_hook
from workbench.metrics.attention_patterns import importance_entropy
from workbench.metrics.residual import token_similarity

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
RESULTS = (
    "architecture", "loss", "token_importance_entropy_by_layer", "hidden_state_similarity_by_layer", "grad_norm",
)  # fmt: skip


class Reference:
    """One folder: what the published code was told, and what it found."""

    def __init__(self, name: str) -> None:
        self.folder = GOLDEN / name
        self.found = json.loads((self.folder / "expected.json").read_text())
        self.tensors = load_file(self.folder / "expected.safetensors")
        self.ids = self.tensors["input_ids"]
        self.options = {key: value for key, value in self.found.items() if key not in RESULTS}

    def load(self):
        return workbench.load(self.folder, architecture=self.found["architecture"], **self.options)


@pytest.fixture(params=FOLDERS, scope="module")
def golden(request):
    return Reference(request.param)


def test_all_references_are_here():
    assert len(FOLDERS) == 22
    assert {Reference(name).found["architecture"] for name in FOLDERS} == {
        "transformer", "resformer", "svformer", "neutreno", "resformer+neutreno", "denseformer", "attention_residuals", "post_norm",
        "hyper_connections", "exclusive_attention", "gated_attention", "gated_value_embedding", "satformer", "sink_logit",
    }  # fmt: skip


def test_a_published_implementation_is_reproduced(golden):
    """Logits, loss, first and last attention, gradients, importance entropy, and similarity of what each block and the head read."""
    model, found = golden.load(), golden.found
    depth = model.config.n_layers
    logits, loss = model(golden.ids, return_type="both")
    torch.testing.assert_close(logits, golden.tensors["logits"], atol=1e-5, rtol=0)
    assert loss.item() == pytest.approx(found["loss"], abs=1e-5)
    loss.backward()
    norms = {llama_name(name): p.grad.norm().item() for name, p in model.named_parameters()}
    # what streams that are still alike are read with has no gradient but rounding's
    assert norms == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in found["grad_norm"].items()}
    _, cache = model.run_with_cache(golden.ids)
    null = cache.cache_dict.get  # what goes to no token, where a column of the softmax is none
    for layer, name in ((0, "attention_first"), (-1, "attention_last")):
        torch.testing.assert_close(cache["pattern", layer], golden.tensors[name], atol=1e-5, rtol=0)
    streams = [cache[stream_hook(n, depth)] for n in (*range(depth), "final")]
    similarity = [token_similarity(x).mean().item() for x in streams]
    assert similarity == pytest.approx(found["hidden_state_similarity_by_layer"], abs=1e-4)
    entropy = [
        importance_entropy(cache["received", n, "attn"], null(f"blocks.{n}.attn.hook_null")).mean().item()
        for n in range(depth)
    ]
    assert entropy == pytest.approx(found["token_importance_entropy_by_layer"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize("folder", ["baseline_gqa", "denseformer_dilation2_period1"])
def test_loading_without_a_name_warns_and_names_the_alternatives(folder):
    """Every file says `llama`: what the tensors cannot tell apart is assumed aloud, what they can is recognised."""
    golden = Reference(folder)
    with pytest.warns(ArchitectureAssumed) as caught:
        model = workbench.load(golden.folder)
    assert model.assumed
    told = str(caught[0].message)
    assert caught[0].filename == __file__
    true = golden.found["architecture"]
    if true in ("svformer", "denseformer"):
        assert model.architecture == true
        assert {key: model.options[key] for key in golden.options} == golden.options
        torch.testing.assert_close(model(golden.ids), golden.tensors["logits"], atol=1e-5, rtol=0)
    else:
        assert model.architecture == "transformer"
        for name in ("resformer", "neutreno", "resformer+neutreno", "residual_k"):
            assert name in told
        assert "svformer" not in told
        assert "denseformer" not in told


def test_an_option_alone_narrows_the_assumption():
    with pytest.warns(ArchitectureAssumed, match=r"'neutreno' is assumed.*resformer\+neutreno"):
        model = workbench.load(GOLDEN / "neutreno_lambda04", neutreno_lambda=0.4)
    reference = Reference("neutreno_lambda04")
    torch.testing.assert_close(model(reference.ids), reference.tensors["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("folder", "architecture", "tensor"),
    [
        ("baseline", "svformer", r"unexpected model\.layers\.1\.self_attn\.v_proj\.weight"),
        ("svformer", "resformer", r"missing model\.layers\.1\.self_attn\.v_proj\.weight"),
        ("baseline", "denseformer", r"missing dwa\.alphas\.0\.weight"),
        ("denseformer_dilation1_period1", "transformer", r"unexpected dwa\.alphas\.0\.weight"),
    ],
)
def test_a_contradictory_architecture_is_refused_by_the_tensors_names(folder, architecture, tensor):
    with pytest.raises(BadCheckpoint, match=tensor):
        workbench.load(GOLDEN / folder, architecture=architecture)


@pytest.mark.fast(8)
def test_a_wrong_constant_is_no_accident(golden):
    """The references do tell architectures apart: another constant moves the logits far beyond the tolerance."""
    for key, value in golden.options.items():
        if key.startswith(("lambda", "neutreno")):
            other = golden.options | {key: value + 0.1}
            model = workbench.load(golden.folder, architecture=golden.found["architecture"], **other)
            assert (model(golden.ids) - golden.tensors["logits"]).abs().max() > 1e-3
