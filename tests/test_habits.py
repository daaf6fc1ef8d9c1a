"""Calls that users of transformers and TransformerLens know, on own and observed models; tables that notebooks show."""

from __future__ import annotations

import warnings

import pandas as pd
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

import workbench
from workbench.errors import ArchitectureAssumed, BadData, UnknownName, WorkbenchError
from workbench.hook_names import stream_hook

IDS = torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 64, "initializer_range": 0.3}
RIGHT, LEFT = torch.ones_like(IDS), torch.ones_like(IDS)
RIGHT[1, 9:], LEFT[1, :3] = 0, 0


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **shape, num_key_value_heads=2, eos_token_id=None)).eval()


@pytest.fixture(scope="module")
def own(llama, tmp_path_factory):
    """Our decoder with the same weights; transformers wrote its architecture, so that no warning is issued."""
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArchitectureAssumed)
        return workbench.load(folder)


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, bos_token_id=None, eos_token_id=None, **SIZES)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def observed(gpt2):
    return workbench.observe(gpt2, IDS, quiet=True)


@torch.no_grad()
def test_outputs_with_logits_and_loss_equal_those_of_transformers(own, llama, observed, gpt2):
    for ours, theirs, mask in ((own, llama, RIGHT), (observed, gpt2, RIGHT), (observed, gpt2, LEFT)):
        labels = IDS.masked_fill(mask == 0, -100)
        output = ours(input_ids=IDS, attention_mask=mask, labels=labels)
        wanted = theirs(input_ids=IDS, attention_mask=mask, labels=labels)
        torch.testing.assert_close(output.logits[mask == 1], wanted.logits[mask == 1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.loss, wanted.loss)
        torch.testing.assert_close(ours(IDS, "both", labels=labels, attention_mask=mask)[1], wanted.loss)
    assert torch.equal(observed(IDS, "output", attention_mask=LEFT).logits, gpt2(IDS, attention_mask=LEFT).logits)
    torch.testing.assert_close(
        own(IDS, "loss", attention_mask=RIGHT), own(IDS, labels=IDS.masked_fill(RIGHT == 0, -100)).loss
    )
    assert own(input_ids=IDS).loss is None
    assert torch.equal(own(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits, own(IDS))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention_mask": LEFT}, "pad on the right"),
        ({"attention_mask": RIGHT, "labels": IDS}, "labels count padding"),
        ({"attention_mask": RIGHT[:1]}, r"attention_mask of shape \(1, 12\)"),
        ({"labels": IDS[:, 1:]}, r"labels of shape \(3, 11\)"),
        ({"labels": torch.full_like(IDS, -100)}, "all -100"),
        ({"tokens": IDS}, "one of them"),
    ],
)
def test_padding_and_labels_that_would_give_a_wrong_number_are_refused(own, given, said):
    with pytest.raises(BadData, match=said):
        own(input_ids=IDS, **given)
    with pytest.raises(UnknownName, match="output"):
        own(IDS, return_type="outputs")


def test_generation_takes_the_names_of_transformers(own, llama, observed, gpt2):
    for ours, theirs in ((own, llama), (observed, gpt2)):
        greedy = theirs.generate(IDS, attention_mask=RIGHT | 1, max_new_tokens=6, do_sample=False)
        assert torch.equal(
            ours.generate(input_ids=IDS, attention_mask=RIGHT | 1, max_new_tokens=6, do_sample=False), greedy
        )
        options = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3}
        drawn = [ours.generate(IDS, 5, **options, use_cache=cached) for cached in (None, True, False)]
        assert torch.equal(drawn[0], drawn[1])
        assert torch.equal(drawn[0], drawn[2]), "with and without a cache"
        with pytest.raises(WorkbenchError, match="temperature above 0"):
            ours.generate(IDS, 5, do_sample=True, temperature=0)
        with pytest.raises(BadData, match="padding"):
            ours.generate(input_ids=IDS, attention_mask=RIGHT)


def test_a_cache_is_filled_again_when_the_length_changes_the_rotary_frequencies():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [4.0, 2.0], "rope_theta": 10.0}
    rope["original_max_position_embeddings"] = 14
    config = LlamaConfig(**SIZES, **shape, rope_parameters=rope, max_position_embeddings=64, eos_token_id=None)
    model = workbench.observe(LlamaForCausalLM(config).eval(), IDS, quiet=True)
    cache = model.new_cache(3)
    parts = [model(IDS[:, :9], past_kv_cache=cache), model(IDS[:, 9:], past_kv_cache=cache)]
    ids = torch.cat([IDS, IDS[:, :5]], 1)
    parts.append(model(ids[:, 12:], past_kv_cache=cache))  # 17 of 14 positions
    torch.testing.assert_close(parts[2], model(ids)[:, 12:])
    torch.testing.assert_close(torch.cat(parts[:2], 1), model(IDS))
    assert torch.equal(
        model.generate(IDS, 9, do_sample=False), model.generate(IDS, 9, do_sample=False, use_cache=False)
    )


def test_a_module_that_returns_no_cache_says_how_to_generate():
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = RecurrentGemmaConfig(vocab_size=64, num_key_value_heads=1, head_dim=8, lru_width=16, **shape)
    model = workbench.observe(RecurrentGemmaForCausalLM(config).eval(), IDS, quiet=True)
    with pytest.raises(WorkbenchError, match="returns no key-value cache: generate with use_cache=False"):
        model.generate(IDS, 2)
    assert model.generate(IDS, 2, use_cache=False).shape == (3, 14)


def test_an_observed_module_generates_with_its_own_cache_unless_hooks_need_whole_sequences(observed, gpt2):
    lengths = []
    handle = gpt2.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(args[0].shape[1]), with_kwargs=True
    )
    try:
        plain = observed.generate(IDS, 3, do_sample=False)
        assert lengths == [12, 1, 1]
        with observed.hooks([("blocks.0.attn.hook_v", lambda v, hook: None)]):
            assert torch.equal(observed.generate(IDS, 3, do_sample=False), plain)
            with pytest.raises(WorkbenchError, match="use_cache=False"):
                observed.new_cache(3)
        assert lengths[3:] == [12, 13, 14]
    finally:
        handle.remove()
    cache = observed.new_cache(3)
    observed(IDS, past_kv_cache=cache)
    for wrong in (IDS[:1], IDS.repeat(1, 2)):
        with pytest.raises(BadData, match="12 tokens of 3 sequences"):
            observed(wrong, past_kv_cache=cache)


def test_models_are_saved_as_load_opens_them(own, observed, gpt2, tmp_path):
    resformer = workbench.load("models-resformer-s0")
    folder = resformer.save_pretrained(tmp_path / "resformer")
    opened = workbench.load(folder)
    assert (opened.architecture, opened.options) == ("resformer", resformer.options)
    assert torch.equal(opened(IDS), resformer(IDS))
    assert opened.tokenizer.encode("def main") == resformer.tokenizer.encode("def main")
    with pytest.raises(WorkbenchError, match="is not empty"):
        resformer.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArchitectureAssumed)
        assert torch.equal(workbench.load(own.save_pretrained(tmp_path / "own"))(IDS), own(IDS))
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "own")(IDS).logits.argmax(-1), own(IDS).argmax(-1))
    observed.save_pretrained(tmp_path / "gpt2")
    assert torch.equal(GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")(IDS).logits, gpt2(IDS).logits)
    with pytest.raises(WorkbenchError, match="has no save_pretrained"):
        workbench.observe(_Bare(gpt2), IDS, quiet=True).save_pretrained(tmp_path / "bare")


class _Bare(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return self.module(ids).logits


@torch.no_grad()
def test_stop_at_layer_returns_the_stream_that_a_block_reads(own, observed):
    for model in (own, observed):
        _, cache = model.run_with_cache(IDS)
        for stop, layer in ((0, 0), (1, 1), (2, 2), (-1, 1), (-2, 0)):
            torch.testing.assert_close(
                model(IDS, stop_at_layer=stop), cache[stream_hook(layer, 2)], atol=1e-4, rtol=1e-4
            )
        with pytest.raises(BadData, match=r"stop_at_layer=3: a layer -2\.\.2"):
            model(IDS, stop_at_layer=3)
    stream, cache = own.run_with_cache(IDS, stop_at_layer=1)
    assert stream.shape == (3, 12, 16)
    assert not [name for name in cache if name.startswith("blocks.1.")], "later blocks do not run"


@torch.no_grad()
def test_circuits_are_the_products_that_a_head_computes(own, tiny):
    _, cache = own.run_with_cache(IDS)
    x = cache["normalized", 1, "ln1"] * own.blocks[1].ln1.weight
    values = cache["v", 1, "own"].repeat_interleave(2, 2)
    by_head = torch.einsum("bphd,hdm->bphm", values, own.W_O[1])
    torch.testing.assert_close(torch.einsum("bpm,hmn->bphn", x, own.OV.AB[1]), by_head, atol=1e-4, rtol=1e-4)
    q, k = cache["q", 1], cache["k", 1].repeat_interleave(2, 2)
    scores = torch.einsum("bqm,hmn,bkn->bhqk", x, own.blocks[1].attn.QK.AB, x)
    torch.testing.assert_close(scores, torch.einsum("bqhd,bkhd->bhqk", q, k), atol=1e-3, rtol=1e-3)
    with pytest.raises(WorkbenchError, match=r"layer 1 has no W_V"):
        tiny("svformer").OV  # noqa: B018


def test_the_loss_function_is_that_of_the_model(own):
    logits = own(IDS)
    torch.testing.assert_close(own.loss_fn(logits, IDS), own(IDS, "loss"))
    assert own.loss_fn(logits, IDS, per_token=True).shape == (3, 11)
    assert (own.device, own.dtype) == (torch.device("cpu"), torch.float32)
    with pytest.raises(BadData, match=r'encoding\["input_ids"\]'):
        own({"input_ids": IDS})


def test_a_notebook_shows_results_as_tables(own, observed):
    records = workbench.measure(own, "token_similarity", IDS)
    html, text = records[records["site"] == "stream"]._repr_html_(), repr(records)
    assert "metric token_similarity" in html
    assert "provenance" not in html + text
    assert "<NA>" not in html + text
    rows = records.drop(columns=["value", "se", "n"])
    assert not rows.duplicated().any()
    assert {"variant", "control"} <= set(html.replace("</th>", "<th>").split("<th>")), "no two rows look alike"
    assert isinstance(records.groupby("site")["value"].mean(), pd.Series)
    assert "<table" in records.pivot_table("value", "layer", "site")._repr_html_()
    parts = workbench.decompose(own, IDS, by="head")
    assert "<th>L1H3</th>" in parts._repr_html_()
    assert "into block 1" in workbench.prompts.logit_lens(own, IDS[0])._repr_html_()
    assert "<b>equal</b>" in workbench.equal(own, own, IDS)._repr_html_()
