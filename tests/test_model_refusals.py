"""What cannot be built or read is refused in words; the loss by hand."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.config import ModelConfig, TrainConfig
from workbench.errors import BadData, UnknownName, WorkbenchError, refuse_unknown
from workbench.models import build

SMALL = ModelConfig(n_layers=4, d_model=96, n_heads=4, d_mlp=256, d_vocab=1024, n_ctx=2048)


def test_an_unknown_name_is_refused_with_the_choices():
    refuse_unknown("layer", 1, (None, 0, 1))
    refuse_unknown("layer", None, (None, 0, 1))
    for unknown in (2, True, "x"):
        with pytest.raises(UnknownName, match=r"unknown layer .*; choose from 0, 1$"):
            refuse_unknown("layer", unknown, (None, "", 0, 1))


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: build("resfomer", "tiny"), "unknown architecture 'resfomer'; did you mean resformer"),
        (lambda: build(None, "tiny"), "unknown architecture None"),
        (lambda: build("transformer", "tiny", lambda_v1=1), "unknown option of transformer 'lambda_v1'"),
        (lambda: build("transformer", {"n_layer": 2}), "unknown config key 'n_layer'; did you mean n_layers"),
        (lambda: TrainConfig.of({"step": 2}), "unknown training key 'step'; did you mean steps"),
        (
            lambda: build("transformer", "tiny").run_with_cache(torch.arange(4), names_filter="blocks.0.attn.hook_vv"),
            r"unknown hook 'blocks.0.attn.hook_vv'; did you mean blocks.0.attn.hook_v",
        ),
        (
            lambda: build("transformer", "tiny").run_with_grads(torch.arange(4), ["blocks.9.hook_resid_pre"]),
            "unknown hook 'blocks.9.hook_resid_pre'",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(ask, told):
    with pytest.raises(UnknownName, match=told.replace("+", r"\+")) as caught:
        ask()
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: build("transformer", {"n_layers": 2}), "lacks d_model, n_heads, d_mlp, d_vocab, n_ctx"),
        (lambda: SMALL.replace(n_heads=5), r"n_heads=5 .* choose from \[1, 2, 3, 4, 6"),
        (lambda: SMALL.replace(n_key_value_heads=3), r"does not divide n_heads=4; choose from \[1, 2, 4\]"),
        (lambda: SMALL.replace(n_layers=2.0), "n_layers=2.0: must be a positive int"),
        (lambda: SMALL.replace(init_std=math.nan), "init_std=nan: must be a positive float"),
        (lambda: TrainConfig(steps=0, batch=1, T=8), "steps=0: must be a positive int"),
        (lambda: TrainConfig(steps=1, batch=1, T=1), "needs 2 tokens"),
        (lambda: TrainConfig(steps=1, batch=1, T=8, lr_factors=5), "lr_factors=5: must map patterns"),
        (lambda: TrainConfig.of({"steps": 3}), "lacks batch, T"),
    ],
)
def test_what_cannot_be_built_is_refused_in_words(ask, told):
    with pytest.raises(ValueError, match=told) as caught:
        ask()
    assert isinstance(caught.value, WorkbenchError)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (torch.tensor([[1, 61]]), r"token ids 1..61 leave the vocabulary 0..60"),
        (torch.tensor([[-1, 2]]), r"token ids -1..2"),
        (torch.empty(1, 0, dtype=torch.long), "not empty"),
        ([], "not empty"),
        ("", "tokenizer"),
        (torch.zeros(1, 129, dtype=torch.long), "129 tokens exceed the model's context of n_ctx=128"),
        (torch.tensor([[0.0, 1.0]]), "whole numbers"),
        (torch.tensor([[True, False]]), "whole numbers"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "whole numbers"),
        ([[1, 2], [3]], "rows of one length"),
        (None, "text or whole numbers|tokens or input_ids="),
    ],
)
def test_unusable_tokens_are_refused(tiny, ids, told):
    model = tiny()
    with pytest.raises(BadData, match=told):
        model(ids)
    with pytest.raises(BadData, match=told):
        model.run_with_grads(ids, "blocks.0.hook_resid_pre")


def test_ids_are_checked_before_they_go_to_another_device(tiny):
    """There a wrong one would bring the device down."""
    model = tiny().to("meta")
    assert model.to_tokens(torch.tensor([0, 60])).device.type == "meta"
    for wrong in (-1, 61):
        with pytest.raises(BadData, match="leave the vocabulary"):
            model.to_tokens(torch.tensor([1, wrong]))


def test_the_loss_of_a_single_token_is_refused(tiny):
    assert tiny()(torch.tensor([3])).shape == (1, 1, 61)
    with pytest.raises(BadData, match="2 tokens or more"):
        tiny()(torch.tensor([3]), return_type="loss")


def test_more_heads_do_not_become_grouped_heads():
    config = SMALL
    assert config.replace(n_heads=8).n_key_value_heads == 8
    assert config.replace(n_key_value_heads=2).replace(n_heads=8).n_key_value_heads == 2


def test_loss_by_hand(tiny):
    """Zero weights: every token is as likely as any other, ln 61 each; loss, both and per token agree."""
    model = tiny()
    with torch.no_grad():
        model.unembed.weight.zero_()
    ids = torch.arange(6)[None]
    logits, loss = model(ids, return_type="both")
    assert logits.shape == (1, 6, 61)
    assert loss.item() == pytest.approx(math.log(61), abs=1e-6)
    per_token = model(ids, return_type="loss", loss_per_token=True)
    assert per_token.shape == (1, 5)
    assert per_token.tolist()[0] == pytest.approx([math.log(61)] * 5, abs=1e-6)
    assert model(ids, return_type=None) is None
