"""Folders of LoRA adapters: opened on their base, as the sum of both; refused in a sentence where the base is not here."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import safetensors.torch
import torch
import transformers

import workbench
from workbench.errors import BadCheckpoint
from workbench.runs.checkpoint_import import import_run
from workbench.storage.mirror import folder

IDS = torch.arange(12)[None] % 61
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2)),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def adapted(request, tmp_path_factory):
    """(base's folder, adapter's folder, logits of both together as peft computes them)."""
    peft = pytest.importorskip("peft")  # here: its import takes seconds in every process that collects tests
    kind, config = MODELS[request.param]
    torch.manual_seed(0)
    home = tmp_path_factory.mktemp(request.param)
    base = kind(config)
    base.save_pretrained(home / "base")
    chosen = peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", use_rslora=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2 keeps its matrices transposed, which peft says and heeds; deprecations
        model = peft.get_peft_model(kind.from_pretrained(home / "base"), chosen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start, so that the adapter would change nothing
                parameter.normal_(std=0.3)
        model.save_pretrained(home / "adapter")
        logits = model.eval()(IDS).logits
    return home / "base", home / "adapter", logits


@pytest.mark.fast(1)
def test_an_adapter_opens_on_its_base_as_the_sum_of_both(adapted):
    base, folder, logits = adapted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which library opens it, what it assumes
        model, plain = workbench.load(folder), workbench.load(base)
    with torch.no_grad():
        ours = model(IDS)
        torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-4)
        assert (ours - plain(IDS)).abs().max() > 0.01
    assert set(model.source["sha256"]) == {"model.safetensors", "adapter_model.safetensors"}
    assert model.source["path"] == str(folder)


@pytest.mark.slow
def test_a_base_is_found_beside_its_adapter(adapted, tmp_path):
    base, folder, logits = adapted
    shutil.copytree(folder, tmp_path / "adapter")
    shutil.copytree(base, tmp_path / "adapter" / "base")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": "base"})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which library opens it, what it assumes
        run = import_run(tmp_path / "adapter", tmp_path / "runs", name="adapted")
        with torch.no_grad():
            torch.testing.assert_close(run.load()(IDS), logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model_name_or_path": None}, "does not name its base"),
        ({"r": 3}, "cannot be merged into"),
        ({"peft_type": "NONSENSE"}, "unknown kind of adapter that can be merged 'NONSENSE'"),
        (
            {"base_model_name_or_path": "http://127.0.0.1:9/leak/runs"},
            "a URL; a file may only name a folder or a model",
        ),
        ({"base_model_name_or_path": "//host/share"}, "a URL; a file may only name"),
        ({"base_model_name_or_path": "x" * 90, "revision": "r" * 5000}, "neither a folder nor in the cache"),
        ({"base_model_name_or_path": "lab/none", "revision": "../../../etc"}, "neither a folder nor in the cache"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_by_name(adapted, tmp_path, change, said, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was tried"))
    settings = json.loads((adapted[1] / "adapter_config.json").read_text())
    shutil.copytree(adapted[1], tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | change))
    with pytest.raises(BadCheckpoint, match=said):
        workbench.load(tmp_path / "adapter")


def test_an_adapter_that_lacks_matrices_is_refused(adapted, tmp_path):
    shutil.copytree(adapted[1], tmp_path / "adapter")
    weights = safetensors.torch.load_file(file := tmp_path / "adapter" / "adapter_model.safetensors")
    safetensors.torch.save_file(dict(list(weights.items())[1:]), file)
    with pytest.raises(BadCheckpoint, match="missing adapter keys"):
        workbench.load(tmp_path / "adapter")


def test_a_pickled_adapter_is_refused(adapted, tmp_path):
    shutil.copytree(adapted[1], tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(BadCheckpoint, match=r"adapter_model\.safetensors is missing"):
        workbench.load(tmp_path / "adapter")


def test_without_peft_the_message_says_what_to_install(adapted, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadCheckpoint, match=r"pip install 'value-residual-workbench\[adapters\]'"):
        workbench.load(adapted[1])


def test_a_base_in_the_copy_of_another_url_is_refused(adapted, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    shutil.copytree(adapted[1], tmp_path / "adapter")
    there = folder("memory://bucket/runs")
    shutil.copytree(adapted[0], there / "base")
    settings = json.loads((adapted[1] / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": str(there / "base")})
    )
    with pytest.raises(BadCheckpoint, match="a copy of memory://bucket/runs"):
        workbench.load(tmp_path / "adapter")
