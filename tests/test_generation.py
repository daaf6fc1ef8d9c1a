"""Generation: the same tokens with and without a cache, sampling, stopping, and what is refused."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from decoding import WRITTEN, in_chunks
from inputs import WIDE, tokens
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from typer.testing import CliRunner

from workbench import cli
from workbench.data.tokenizer import train_tokenizer
from workbench.errors import BadData, WorkbenchError
from workbench.models import generation
from workbench.models.generation import Sampling
from workbench.models.hook_points import is_hooked


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a small text about small things, and über ß: naïve\n\n"] * 20, WRITTEN)


@pytest.fixture
def writer(tiny, tokenizer):
    """A model with a tokenizer."""
    model = tiny("svformer", config={"d_vocab": WRITTEN + 20})
    model.tokenizer = tokenizer
    return model


@contextlib.contextmanager
def scripted(model, *rows):
    """For as long as this stands, row i continues with the ids of the i-th script, its last one for ever."""
    at = iter(range(1000))

    def write(module, args, logits):
        now = next(at)
        for row, script in enumerate(rows):
            logits[row, -1] = 0
            logits[row, -1, script[min(now, len(script) - 1)]] = 50
        return logits

    handle = model.unembed.register_forward_hook(write)
    try:
        yield
    finally:
        handle.remove()


# ---- generating ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generation_is_the_same_with_and_without_a_cache(tiny, any_architecture):
    model = tiny(any_architecture)
    prompt = tokens(model, 4)
    for settings in ({"temperature": 0}, {"seed": 3, "top_k": 20, "top_p": 0.9}):
        cached = model.generate(prompt, 8, **settings)
        assert cached.shape == (2, 12)
        assert torch.equal(cached[:, :4], prompt)
        assert torch.equal(cached, model.generate(prompt, 8, use_cache=False, **settings))


def test_each_new_token_costs_one_token_unless_told_otherwise(tiny):
    model, seen = tiny(), []
    with model.hooks([("hook_embed", lambda value, hook: seen.append(value.shape[1]))]):
        model.generate(tokens(model, 4), 3, temperature=0)
        list(model.stream(tokens(model, 4), 3, temperature=0))
        model.generate(tokens(model, 4), 3, temperature=0, use_cache=False)
    assert seen == [*[4, 1, 1] * 2, 4, 5, 6]


def test_greedy_takes_the_likeliest_token_each_time(tiny):
    model = tiny()
    ids = tokens(model, 3)
    found = model.generate(ids, 6, temperature=0)
    for _ in range(6):
        ids = torch.cat((ids, model(ids)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(found, ids)
    assert torch.equal(found, model.generate(ids[:, :3], 6, temperature=1e-30, seed=0))
    assert torch.equal(found, model.generate(ids[:, :3], 6, top_k=1, seed=0))


def test_filters_are_those_of_transformers():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 3
    for temperature, top_k, top_p in [
        (0.7, 10, 0.8),
        (1.5, None, 0.95),
        (1.0, 3, None),
        (0.3, 50, 0.5),
        (2.0, 7, 0.01),
    ]:
        true = TemperatureLogitsWarper(temperature)(None, logits)
        true = TopKLogitsWarper(top_k)(None, true) if top_k else true
        true = TopPLogitsWarper(top_p)(None, true) if top_p else true
        found = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(logits)
        torch.testing.assert_close(found, true.softmax(-1))


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    kept = {p: int((Sampling(top_p=p).probabilities(logits) > 0).sum()) for p in (1e-9, 0.5, 0.6, 0.75, 0.8, 1.0)}
    assert kept == {1e-9: 1, 0.5: 1, 0.6: 2, 0.75: 2, 0.8: 3, 1.0: 4}
    assert Sampling(top_p=0.6).probabilities(logits)[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])


def test_draws_have_the_probabilities():
    """Tokens cut [0, 1) into pieces as long as their probabilities; what has none is never drawn, even at the ends."""
    logits = torch.tensor([-math.inf, 0.25, 0.5, 0.25, 0.0]).log().nan_to_num(nan=-math.inf)
    drawn = (torch.arange(1000) + 0.5) / 1000
    found = Sampling().choose(logits.expand(1000, -1), drawn)
    assert torch.bincount(found, minlength=5).tolist() == [0, 250, 500, 250, 0]
    ends = torch.tensor([0.0, 1.0])  # float32 may round the last one up
    assert Sampling().choose(logits.expand(2, -1), ends).tolist() == [1, 3]


def test_a_row_depends_on_the_seed_and_its_place_alone(tiny):
    model = tiny(dtype=WIDE)
    prompt = tokens(model, 4, batch=3)
    found = model.generate(prompt, 8, seed=1)
    assert torch.equal(model.generate(prompt, 8, seed=1), found)
    assert torch.equal(model.generate(prompt[:2], 8, seed=1), found[:2])
    changed = torch.cat((prompt[:2], tokens(model, 4, batch=1, seed=9)))
    assert torch.equal(model.generate(changed, 8, seed=1)[:2], found[:2])
    assert torch.equal(model.generate(prompt, 3, seed=1), found[:, :7])
    assert not torch.equal(model.generate(prompt, 8, seed=2), found)
    same = model.generate(prompt[:1].expand(3, 4), 8, seed=1)
    assert len({tuple(row) for row in same.tolist()}) == 3, "rows of one prompt are different samples"
    torch.manual_seed(0)
    free = model.generate(prompt, 8), model.generate(prompt, 8)
    assert not torch.equal(*free)
    torch.manual_seed(0)
    assert torch.equal(model.generate(prompt, 8), free[0])


def test_streamed_text_is_the_generated_text(writer):
    for seed in range(4):  # half characters abound in the bytes that a random model writes
        whole = writer.generate("über", 20, seed=seed, temperature=3.0, stop=["a", "\n\n", "\ufffdx"])
        pieces = list(writer.stream("über", 20, seed=seed, temperature=3.0, stop=["a", "\n\n", "\ufffdx"]))
        assert "über" + "".join(pieces) == whole
        assert "a" not in whole
        everything = generation.generate(writer, "über", 20, seed=seed, temperature=3.0, stop=())
        assert everything.texts == [writer.tokenizer.decode(everything.ids[0].tolist())]
    both = list(writer.stream(["über", "über"], 4, seed=0))
    assert all(len(pieces) == 2 for pieces in both)


def test_only_what_the_tokenizer_can_write_is_drawn_for_text(writer):
    """The vocabulary of the model is larger than the tokenizer's."""
    with torch.no_grad():
        writer.unembed.weight[WRITTEN:] *= 9
    assert writer.generate(writer.to_tokens("a"), 3, temperature=0)[0, 1:].min() >= WRITTEN
    assert writer.generate("a", 3, temperature=0) != "a"


def test_half_a_character_waits_for_its_other_half(writer):
    raw = [
        next(i for i in range(WRITTEN) if writer.tokenizer.token_strings([i]) == [f"\\x{b:02x}"]) for b in "€".encode()
    ]
    with scripted(writer, raw):
        assert list(writer.stream("a", 3, temperature=0)) == ["", "", "€"]
    with scripted(writer, raw[:2]):
        assert "".join(writer.stream("a", 2, temperature=0)) == "\ufffd"


# ---- stopping --------------------------------------------------------------------------------------------------------


def test_rows_stop_by_themselves_are_padded_and_reported(tiny):
    model = tiny()
    with scripted(model, [7, 8, 9, 9], [3, 7, 9, 9], [1, 2, 3, 4]):
        found = generation.generate(model, tokens(model, 2, batch=3), 4, temperature=0, stop=[7, 8])
    assert found.ids[:, 2:].tolist() == [[7, 7, 7, 7], [3, 7, 7, 7], [1, 2, 3, 4]]
    assert found.lengths == [3, 4, 6]
    assert found.ended == ["stop", "stop", "length"]


def test_generation_ends_with_its_last_row(tiny):
    model = tiny()
    for stop, columns in ((7, 2), ([7, 1], 2), ((), 4), (None, 4)):
        with scripted(model, [7, 8], [3, 7, 9, 9]):
            assert model.generate(tokens(model, 2), 4, temperature=0, stop=stop).shape == (2, 2 + columns)


def test_the_end_of_a_document_ends_a_row_and_pads_it(writer):
    end, a = writer.tokenizer.eos_id, writer.tokenizer.encode("a")[0]
    prompt = torch.tensor([[a, a], [a, a]])
    for stop, expected in ((None, [[a, end, end], [a, a, a]]), ((), [[a, end, a], [a, a, a]])):
        with scripted(writer, [a, end, a], [a]):
            assert writer.generate(prompt, 3, temperature=0, stop=stop)[:, 2:].tolist() == expected
    with scripted(writer, [a, end, a], [a]):
        found = generation.generate(writer, ["aa", "aa"], 3, temperature=0)
    assert found.texts == ["aaa", "aaaaa"]  # what ended it is not part of the text
    assert found.lengths[1] - found.lengths[0] == 1


def test_stop_strings_span_tokens_and_are_left_out(writer):
    encode = writer.tokenizer.encode
    script = [encode(c)[0] for c in "x. y. z!"]
    for stop, expected in (("y. z", "x. "), (["z!", "zz"], "x. y. "), ("?", "x. y. z!"), (["y.", ". "], "x")):
        with scripted(writer, script):
            pieces = list(writer.stream("a", 8, temperature=0, stop=stop))
        assert "".join(pieces) == expected
    with scripted(writer, script):
        ids = writer.generate(encode("a"), 8, temperature=0, stop=". ")
    assert ids.tolist() == [*encode("a"), *script[:3]], "ids keep what ended them"


def test_the_command_writes_the_text_that_generate_returns(writer, monkeypatch):
    monkeypatch.setattr("workbench.checkpoints.loading.load", lambda path, **settings: writer)
    options = [
        *["--temperature", "0.5", "--top-k", "40", "--top-p", "0.9", "--seed", "3", "-n", "9", "--stop", "b", "--stop"],
        "\n",
    ]
    done = CliRunner().invoke(cli.app, ["generate", "here", "--prompt", "a small", *options])
    expected = writer.generate("a small", 9, temperature=0.5, top_k=40, top_p=0.9, seed=3, stop=["b", "\n"])
    assert done.exit_code == 0
    assert done.stdout == f"{expected}\n"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 125}, r"1\.\.124 of n_ctx=128, nearest 124"),
        ({"max_new_tokens": 2.5}, r"nearest 2"),
        ({"temperature": -1}, r"temperature=-1: a finite number from 0"),
        ({"temperature": "hot"}, r"temperature='hot'"),
        ({"top_k": 62}, r"nearest 61"),
        ({"top_p": 1.1}, r"top_p=1.1"),
        ({"seed": -1}, r"seed=-1: a whole number from 0"),
        ({"stop": 61}, r"stop=61: a token id 0\.\.60"),
        ({"stop": ""}, r"stop='': .* not empty"),
        ({"stop": "end"}, r"stop='end': this model came without a tokenizer"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(tiny, monkeypatch, settings, said):
    model = tiny()
    monkeypatch.setattr(model, "logits", lambda *a, **k: pytest.fail("the model ran"))
    with pytest.raises(WorkbenchError, match=said):
        model.stream(tokens(model, 4), **{"max_new_tokens": 3, **settings})


def test_bad_prompts_are_refused(tiny):
    model = tiny()
    with pytest.raises(BadData, match="without a tokenizer"):
        model.generate("text", 3)
    with pytest.raises(BadData, match="fills the model's context of n_ctx=128"):
        model.generate(tokens(model, 128), 1)
    assert model.generate(tokens(model, 127), 1).shape == (2, 128)
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(BadData, match="after 4 tokens have no finite maximum"):
        model.generate(tokens(model, 4), 1)


# ---- hooks, modes, precision -----------------------------------------------------------------------------------------


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("architecture", "point"),
    [
        ("transformer", "1.hook_mlp_out"), ("svformer", "0.attn.hook_v"), ("svformer", "1.attn.hook_v"),
        ("cla", "2.attn.hook_rot_k"), ("cross_layer", "2.attn.hook_rot_k"), ("bank_of_values", "2.attn.hook_v"),
    ],
)  # fmt: skip
def test_interventions_act_on_every_new_token(awake, architecture, point):
    model = awake(architecture, dtype=WIDE)
    prompt = tokens(model, 4)
    clean = model.generate(prompt, 10, temperature=0)
    with model.hooks([(f"blocks.{point}", lambda x, hook: 0 * x)]):
        cached = model.generate(prompt, 10, temperature=0)
        assert torch.equal(cached, model.generate(prompt, 10, temperature=0, use_cache=False))
        whole = model(cached)
        assert (in_chunks(model, cached, (4,)) - whole).abs().max() < 1e-10
    assert (whole - model(cached)).abs().max() > 1e-3
    assert torch.equal(model.generate(prompt, 10, temperature=0), clean)


@pytest.mark.parametrize("architecture", ["svformer", "cla"])
def test_a_hook_that_begins_midway_leaves_the_past_alone(awake, architecture):
    """Values are zeroed from the sixth token on, at a layer that borrows them: it holds its own from then on."""
    model = awake(architecture, dtype=WIDE)
    ids, cache = tokens(model, 10), model.new_cache(2)
    first = model(ids[:, :5], past_kv_cache=cache)
    with model.hooks([("blocks.1.attn.hook_v", lambda v, hook: 0 * v)]):
        later = in_chunks(model, ids[:, 5:], (), cache)

    def late(v, hook):
        return torch.cat((v[:, :5], 0 * v[:, 5:]), 1)

    with model.hooks([("blocks.1.attn.hook_v", late)]):
        whole = model(ids)
    assert (torch.cat((first, later), 1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_modes_gradients_and_hooks_as_they_were(tiny, training):
    model = tiny("resformer_learnable").train(training)
    stream = model.stream(tokens(model, 4), 5, seed=0)
    next(stream)
    assert torch.is_grad_enabled(), "between two tokens the caller's settings hold"
    assert model.lock.acquire(blocking=False)
    model.lock.release()
    rest = list(stream)
    assert len(rest) == 4
    assert model.training is training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(map(is_hooked, model.hook_points()))
    model(tokens(model, 5), return_type="loss").backward()
    assert model.blocks[0].attn.v_proj.weight.grad is not None
    with torch.inference_mode():
        inside = model.generate(tokens(model, 4), 5, seed=0)
    assert torch.equal(inside, model.generate(tokens(model, 4), 5, seed=0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_on_a_gpu(any_architecture, tiny, dtype):
    model = tiny(any_architecture, dtype=WIDE)
    prompt = tokens(model, 4)
    found = model.generate(prompt, 8, seed=0, top_k=20, top_p=0.9)
    model.cuda()
    assert torch.equal(model.generate(prompt, 8, seed=0, top_k=20, top_p=0.9).cpu(), found)
    model.to(dtype)
    cache = model.new_cache(2)
    whole, parts = model(prompt), in_chunks(model, prompt.cuda(), (2,), cache)
    assert (whole - parts).abs().max() < (1e-4 if dtype == torch.float32 else 0.1) * whole.abs().max()
    assert model.generate(prompt, 8, seed=0).shape == (2, 12)
