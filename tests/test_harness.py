"""The evaluation harness's three kinds of request against scores worked out one token at a time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from workbench.data.tokenizer import train_tokenizer
from workbench.errors import BadData, WorkbenchError
from workbench.models.lm_eval import Harness, for_lm_eval


@dataclass
class Request:
    """What the harness hands over: anything with `args`."""

    args: tuple


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 3] * 3, 270)


@pytest.fixture
def model(tiny, tokenizer):
    made = tiny("resformer", config={"d_vocab": 270, "n_ctx": 24})
    made.tokenizer = tokenizer
    return made


@torch.no_grad()
def naive(model, ids, first):
    """Sum of log probabilities of ids[first:], each from one run on all that stands before it."""
    total, greedy = 0.0, True
    for i in range(first, len(ids)):
        scores = model(torch.tensor([ids[max(0, i - model.config.n_ctx) : i]]))[0, -1].double()
        total += float(scores[ids[i]] - scores.logsumexp(0))
        greedy &= int(scores.argmax()) == ids[i]
    return total, greedy


def test_loglikelihood_is_the_sum_over_the_continuation(model, tokenizer):
    pairs = [("the cat", " sat on"), ("", "the mat"), ("the dog sat on the ", "log"), ("the", " mat"), ("the cat", "")]
    found = Harness(model, batch=3).loglikelihood([Request(pair) for pair in pairs])
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        before = tokenizer.encode(context.rstrip())
        whole = tokenizer.encode(context + continuation)
        expected = naive(
            model, before + whole[len(before) :] if before else [tokenizer.eos_id, *whole], len(before) or 1
        )
        assert value == pytest.approx(expected[0], abs=1e-4)
        assert greedy is expected[1]
    assert found[4] == (0.0, True)


def test_what_greedy_decoding_says_is_called_greedy(model, tokenizer):
    harness = Harness(model)
    said = harness.generate_until([Request(("the cat", {"until": [], "max_gen_toks": 4}))])[0]
    ids = tokenizer.encode("the cat")
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert said == tokenizer.decode(ids[len(tokenizer.encode("the cat")) :])
    wanted = ids[len(tokenizer.encode("the cat")) :]
    assert harness._score([(tokenizer.encode("the cat"), wanted)])[0][1] is True


def test_a_start_token_of_the_training_begins_every_request(model, tokenizer):
    model.start_token = tokenizer.bos_id
    pairs = [("the cat", " sat on"), ("", "the mat")]
    for (context, more), (value, _) in zip(pairs, Harness(model).loglikelihood([*map(Request, pairs)]), strict=True):
        ids = [tokenizer.bos_id, *tokenizer.encode(context + more)]
        assert value == pytest.approx(naive(model, ids, 1 + len(tokenizer.encode(context)))[0], abs=1e-4)
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0][0, 0].item()))
    Harness(model).generate_until([Request(("the cat sat " * 40, {"max_gen_toks": 3}))])
    assert set(seen) == {tokenizer.bos_id}, "also where the context is cut"


def test_results_do_not_depend_on_the_batch(model):
    requests = [Request((("the cat sat " * n).strip(), " on the mat"[: 3 * n])) for n in (1, 2, 3, 4)]
    one, four = (Harness(model, batch=b).loglikelihood(requests) for b in (1, 4))
    assert [v for v, _ in one] == pytest.approx([v for v, _ in four], abs=1e-5)


def test_rolling_predicts_each_token_once_with_as_much_context_as_fits(model, tokenizer):
    """Context 4, ids 0..9, prefix P: (P 0 1 2 | 0 1 2 3), (3 4 5 6 | 4 5 6 7), (5 6 7 8 | 8 9)."""
    harness, pairs = Harness(model, prefix=99), []
    harness.model = SimpleNamespace(config=SimpleNamespace(n_ctx=4))
    harness.text = SimpleNamespace(encode=lambda text: list(range(10)))
    harness._score = lambda each: [pairs.append(pair) or (1.0, True) for pair in each]
    assert harness.loglikelihood_rolling([Request(("",))]) == [3.0], "the sum over its windows"
    windows = [([*context, *predicted][:-1], predicted) for context, predicted in pairs]
    assert windows == [([99, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([5, 6, 7, 8], [8, 9])]
    harness.start, pairs[:] = [77], []
    harness.loglikelihood_rolling([Request(("",))])
    assert pairs == [([77], [0, 1, 2, 3]), ([77], [4, 5, 6, 7]), ([77, 6, 7], [8, 9])], "each window has a start token"
    text = "the cat sat on the mat"
    ids = [tokenizer.eos_id, *tokenizer.encode(text)]
    assert len(ids) <= model.config.n_ctx
    assert Harness(model).loglikelihood_rolling([Request((text,))]) == pytest.approx(
        [naive(model, ids, 1)[0]], abs=1e-4
    )
    long = Harness(model).loglikelihood_rolling([Request((text * 5,))])[0]
    assert math.isfinite(long)
    assert long < naive(model, ids, 1)[0]
    assert Harness(model).loglikelihood_rolling([Request(("",))]) == [0.0]


def test_generation_stops_at_a_text_and_at_the_context(model):
    harness = Harness(model)
    free = harness.generate_until([Request(("the cat", {"max_gen_toks": 12}))])[0]
    stop = free[3:5]
    cut = harness.generate_until([Request(("the cat", {"until": stop, "max_gen_toks": 12}))])[0]
    assert cut == free[: free.find(stop)]
    assert harness.generate_until([Request(("the cat sat " * 40, {"max_gen_toks": 300}))])[0]
    with pytest.raises(WorkbenchError, match="generation is greedy"):
        harness.generate_until([Request(("the", {"do_sample": True, "temperature": 0.7}))])


def test_what_cannot_be_asked_is_refused(model, tiny):
    with pytest.raises(BadData, match="no tokenizer"):
        Harness(tiny())
    with pytest.raises(BadData, match="exceeds the model's 24"):
        Harness(model).loglikelihood([Request(("the", " cat sat on the mat" * 9))])
    with pytest.raises(WorkbenchError, match="batch=0"):
        Harness(model, batch=0)


def test_without_the_harness_its_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.api.model", None)
    with pytest.raises(WorkbenchError, match=r"pip install 'value-residual-workbench\[harness\]'"):
        for_lm_eval(model)


def test_a_task_of_ones_own_runs_in_the_harness(model, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="the optional extra `harness` (lm-eval) is not installed")
    rows = [{"text": "the cat sat on the", "choices": [" mat", " dog"], "label": i % 2} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "label", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    lm = for_lm_eval(model)
    found = lm_eval.simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0)
    scores = [v for v, _ in lm.loglikelihood([Request((rows[0]["text"], choice)) for choice in rows[0]["choices"]])]
    assert scores[0] != scores[1]
    assert found["results"]["own"]["acc,none"] == 0.5  # the same answer six times, half of the labels
