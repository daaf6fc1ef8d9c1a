"""The X-ray: sentences derived from planted tables with known answers, a real page from a real run, a picture."""

from __future__ import annotations

import re

import pytest
import torch

from workbench import plots
from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.errors import BadData, WorkbenchError
from workbench.measurement import models_and_data
from workbench.models import Transformer
from workbench.plots.image_export import find_browser, screenshot
from workbench.reports import xray as xrays
from workbench.reports.xray_sentences import concentration_text, residual_text, sinks_text, token_share_text
from workbench.runs.records import records
from workbench.training.loop import train

IDS = torch.randint(61, (8, 40), generator=torch.Generator().manual_seed(0))
COMMON = {"run": "x", "architecture": "transformer", "seed": 0, "step": 100, "data": "validation", "T": 64, "n": 16}


def planted(rows, **common):
    return records(COMMON | {"se": 0.01} | common | row for row in rows)


def parts(layer, first, profile, content, **more):
    found = {None: first + profile + content, "first_position": first, "profile": profile, "content": content}
    return [
        {"metric": "concentration_parts", "layer": layer, "variant": k, "value": v} | more for k, v in found.items()
    ]


def test_concentration_names_the_layer_and_its_largest_part():
    said = concentration_text(planted([*parts(0, 0, 0.01, 0), *parts(2, 0.6, 0.1, 0.3)]))
    assert said.startswith("Concentrated: most in layer 2, 1.00 ± 0.01 nats")
    small = concentration_text(planted(parts(1, 0.004, 0.6, 0.396)))
    assert "60% on other positions (local attention), 40% on particular tokens." in small, "sums to 100 %"
    assert (
        said.index("60% on the first position")
        < said.index("30% on particular tokens")
        < said.index("10% on other positions")
    )
    assert "at random init" not in said


def test_concentration_stands_beside_random_init():
    said = concentration_text(planted([*parts(1, 0.3, 0, 0), *parts(1, 0.02, 0, 0, step=0)]))
    assert "0.02 at random init" in said


def test_uniform_attention_is_called_hardly_concentrated():
    assert concentration_text(planted(parts(0, 0.001, 0.0, 0.002))).startswith("Hardly")


def heads(*masses, layer=1):
    even = {"metric": "sink_mass", "layer": layer, "value": 0.05, "control": "uniform_causal"}
    return [*({"metric": "sink_mass", "layer": layer, "head": h, "value": m} for h, m in enumerate(masses)), even]


def drain(value, layer=1, se=0.01, **more):
    return {"metric": "value_drain", "site": "own_v", "layer": layer, "value": value, "se": se} | more


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [*heads(0.06, 0.04), drain(0.2)],
            r"no sink to drain: the strongest head \(layer 1, head 0\) gives the first token 6.0 ± 1.0%",
        ),
        ([*heads(0.7, 0.04), drain(0.2)], r"1 of 2 heads .* drained: .* 0.20 ± 0.01"),
        ([*heads(0.7, 0.04), drain(0.9)], r"not drained: .* 0.90"),
        ([*heads(0.7, 0.04), drain(0.45, se=0.1)], r"unresolved"),
        (
            [*heads(0.7, 0.6), drain(0.2, layer=3)],
            r"2 of 2 heads .* not measured",
        ),  # another layer's drain is no answer
        ([*heads(0.7, 0.6), drain(0.2), drain(0.97, step=0)], r"0.97 at random init"),
    ],
)
def test_sinks_are_counted_and_their_values_judged_with_their_error(rows, said):
    assert re.search(said, sinks_text(planted(rows)))


def test_uniform_attention_beside_a_head_is_that_of_its_layers_window():
    even = [
        {"metric": "sink_mass", "layer": n, "value": x, "control": "uniform_causal"}
        for n, x in ((0, 0.054), (1, 0.027))
    ]
    rows = [*heads(0.06, 0.04)[:2], *even]
    assert "uniform attention would give 2.7%" in sinks_text(planted(rows))
    dotted = [t for t in plots.sinks_figure(planted(rows), planted(rows).head(0)).data if t.mode == "lines"]
    assert [list(t.y) for t in dotted] == [[0.054, 0.027]]


def test_a_sink_in_the_first_layer_alone_is_judged_by_that_layers_values():
    said = sinks_text(planted([*heads(0.7, 0.04, layer=0), drain(0.2, layer=0), drain(0.9, layer=2)]))
    assert "drained: the first token's value has 0.20 ± 0.01 times the others' median norm in layer 0" in said


def test_a_model_that_has_learned_nothing_is_said_to():
    assert "nothing is learned yet" in concentration_text(planted(parts(0, 0.0, 0.0, 1e-6)))


def share(value, layer, **more):
    return {"metric": "token_identity_share", "site": "own_v", "layer": layer, "value": value} | more


def test_token_share_speaks_of_the_later_half_with_both_baselines():
    rows = [share(1.0, 0), share(0.5, 1), share(0.8, 2), share(0.7, 3), share(0.02, 3, control="shuffled")]
    said = token_share_text(planted([*rows, *(share(0.3, n, step=0) for n in range(4))]))
    assert said.startswith("70.0% to 80.0% (± at most 1.0%) of the variance of the own values in layers 2 to 3")
    assert "2% with shuffled ids, 30.0% at random init" in said


def test_the_shuffled_ids_beside_a_trained_model_are_its_own_and_not_those_at_random_init():
    rows = [
        share(0.5, 1),
        share(0.02, 1, control="shuffled"),
        share(0.4, 1, step=0),
        share(0.3, 1, step=0, control="shuffled"),
    ]
    assert "2% with shuffled ids, 40.0% at random init" in token_share_text(planted(rows))


def test_an_error_is_never_rounded_to_nothing():
    said = concentration_text(planted(parts(2, 0.3, 0, 0), se=0.0013))
    assert "0.300 ± 0.001 nats" in said
    assert "5.00 ± 0.02% of its attention" in sinks_text(planted(heads(0.05), se=0.0002))


def ablated(token, zero):
    both = {"token_mean": token, "zero": zero}
    return [{"metric": "value_ablation", "site": "own_v", "variant": k, "value": v} for k, v in both.items()]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([*ablated(0.01, 0.2), *heads(0.7)], r"More speaks for it; for: the token alone supplies 95%.*there are sinks"),
        ([*ablated(0.15, 0.2), *heads(0.05)], r"More speaks against it; for: nothing.*25%.*no sinks"),
        ([*ablated(0.01, 0.2), *heads(0.05)], r"Open; for: the token alone supplies 95%.*Against: there are no sinks"),
        ([*ablated(0.005, 0.015), *heads(0.05)], r"no more than its error"),
        (heads(0.05), r"Undecided"),
    ],
)
def test_the_last_sentence_weighs_both_sides(rows, said):
    found = residual_text(planted(rows))
    assert re.search(said, found)
    assert "±" in found or "Undecided" in found


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [*ablated(0.01, NAN), *heads(0.05)],
            r"Undecided: values cannot be zeroed here.*token's mean costs \+0\.010 ±",
        ),
        ([*ablated(NAN, 0.2), *heads(0.05)], r"Undecided: values cannot be replaced by their token's mean"),
        ([*({**row, "se": NAN} for row in ablated(0.01, 0.2)), *heads(0.7)], r"Undecided: one document gives no error"),
        (ablated(0.01, 0.2), r"More speaks for it; .*Against: nothing measured here"),
        ([*ablated(0.01, 0.2), *heads(NAN)], r"More speaks for it; .*Against: nothing measured here"),
        ([*ablated(0.01, -0.2), *heads(0.05)], r"removing later values lowers the loss"),
        ([*ablated(0.05, 0.2)[:1], drain(0.5)], r"Undecided: replacing all later layers' own values was not measured"),
    ],
)
def test_numbers_that_are_missing_decide_nothing(rows, said):
    found = residual_text(planted(rows))
    assert re.search(said, found)
    assert "nan" not in found


def test_value_paths_that_were_found_are_not_advised():
    rows = planted([*ablated(0.01, 0.2), *heads(0.7)], architecture="unknown")
    assert residual_text(rows, "layers 1, 2: values of the first layer").startswith(
        "It has a value path already (layers 1, 2"
    )
    assert residual_text(rows).startswith("Undecided: it is unknown whether the model has a value path already")
    assert residual_text(rows, "").startswith("More speaks for it")


@pytest.mark.parametrize(
    ("sentence", "rows", "said"),
    [
        (sinks_text, [*heads(NAN, 0.04), drain(0.2)], r"strongest head \(layer 1, head 1\) gives the first token 4\.0"),
        (sinks_text, [*heads(0.7), drain(0.2, se=NAN)], r"unresolved: .* 0\.20 \(error unknown\)"),
        (
            sinks_text,
            [*heads(0.7), *heads(0.7, layer=2), drain(0.2), drain(0.9, layer=2)],
            r"1 of 2 layers with sinks are drained",
        ),
        (concentration_text, [*parts(0, 0.1, 0.1, NAN)], r"Not measured"),
        (token_share_text, [share(0.5, 1), share(NAN, 1, control="shuffled")], r"no baseline measured"),
    ],
)
def test_no_sentence_prints_or_rests_on_what_is_no_number(sentence, rows, said):
    found = sentence(planted(rows))
    assert re.search(said, found)
    assert "nan" not in found


# ---- the real thing --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A vanilla model after six steps on repeated tokens."""
    shape = ModelConfig(n_layers=2, d_model=16, n_heads=4, d_mlp=24, d_vocab=64, n_ctx=128)
    recipe = TrainConfig(steps=6, batch=4, T=64, warmup=2, validate_every=3, validation_sequences=8)
    root = tmp_path_factory.mktemp("runs")
    return train("transformer", RepeatedData(), name="x", runs=root, model=shape, train=recipe, device="cpu")


@pytest.mark.slow
def test_a_run_is_xrayed_into_one_offline_page(a_run, tmp_path):
    found = xrays.xray(a_run.path, n=8)
    assert [a.question[:4] for a in found.answers] == ["Conc", "Atte", "Toke", "Loss"]
    assert all(any(c.isdigit() for c in a.sentence) for a in found.answers)
    assert "at random init" in found.answers[0].sentence
    (page,) = found.save(tmp_path / "look.html", png=False)
    text = page.read_text()
    assert text.count("<section>") == 4
    assert "documents of 64 tokens in float32; " in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)  # nothing is fetched
    assert f"Reproduce: <code>workbench xray {a_run.path} --documents 8</code>" in text, "from any working directory"


@pytest.mark.slow
def test_ids_are_halved_between_the_table_and_the_measurement(tiny):
    model = tiny("resformer")
    ids = torch.randint(61, (12, 40), generator=torch.Generator().manual_seed(0))
    found = xrays.xray(model, ids)
    assert set(found.records["n"].dropna()) == {6}
    assert found.command == "", "no command can read ids in memory"
    assert found.answers[3].sentence.startswith("It has a value path already (ResFormer)")
    with pytest.raises(BadData, match="4 sequences or more"):
        xrays.xray(model, ids[:2])


def test_values_are_replaced_by_the_means_of_the_given_ids_and_not_of_an_earlier_call(tiny, monkeypatch):
    model = tiny()
    ids = torch.randint(61, (12, 40), generator=torch.Generator().manual_seed(0))
    other = torch.cat((ids[:6], ids[6:] // 2))
    shown = [xrays.xray(model, data).records for data in (ids, other)]
    monkeypatch.setattr(models_and_data, "_memory", {})
    shown.append(xrays.xray(model, other).records)
    found = [frame.query("metric == 'deep_value_ablation' and variant == 'zero'")["value"].item() for frame in shown]
    assert found[0] != found[1] == found[2]


def test_a_model_without_tokenizer_and_data_is_refused_in_words(tiny):
    with pytest.raises(BadData, match="without a tokenizer and without data"):
        xrays.xray(tiny())


@pytest.mark.slow
def test_without_a_browser_the_page_is_there_and_the_picture_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_BROWSER", str(tmp_path / "none"))
    ids = torch.randint(61, (8, 12), generator=torch.Generator().manual_seed(0))
    found = xrays.xray(tiny(), ids)
    with pytest.raises(WorkbenchError, match="no Chrome, Chromium or Edge"):
        found.save(tmp_path / "look.html")
    assert (tmp_path / "look.html").exists()


@pytest.mark.slow
def test_the_picture_is_a_real_drawing_of_the_page(tmp_path):
    if find_browser() is None:
        pytest.skip("no Chrome, Chromium or Edge on this machine")
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><body style='margin:0;background:#f00'><p>text</p>")
    drawn = screenshot(page, tmp_path / "page.png", width=200, height=100).read_bytes()
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(drawn[16:20]) == 400  # twice the CSS pixels


# ---- what a model does not show, and what looking costs ---------------------------------------------------------------


def test_what_was_not_measured_is_an_empty_answer_with_its_reason_and_the_rest_is_shown(tmp_path):
    frame = planted([{"metric": "loss", "value": 5.0}, share(0.9, 1), drain(0.5)])
    found = xrays.answers(frame, {"concentration": " Why: it is custom."})
    assert found[0].sentence.endswith("gives no statistics. Why: it is custom.")
    assert found[2].sentence.startswith("90.0%")
    assert found[3].sentence.startswith("Undecided")
    page = xrays.XRay("x", tuple(found), frame, "workbench xray x").html()
    assert page.count("<section>") == 4
    assert page.count("nothing to draw") == 3 * 2  # title and alternative text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run"])
def test_the_model_runs_seven_times_at_most_and_the_cost_is_said_before(tiny, a_run, monkeypatch, kind):
    read, told, forward = [], [], Transformer.forward

    def counted(self, tokens, *args, **options):
        read.append(tokens.numel())
        return forward(self, tokens, *args, **options)

    monkeypatch.setattr(Transformer, "forward", counted)
    subject, data, tokens = (a_run, None, 10 * 64) if kind == "run" else (tiny(), IDS, 4 * 40)
    found = xrays.xray(subject, data, n=10, announce=lambda cost: told.append((cost, sum(read))))
    assert sum(read) <= 6 * tokens
    assert re.match(r"[67] passes at most over (4|10) documents of (40|64) tokens", told[0][0])
    assert told[0][1] <= 40
    assert "by their token's mean costs" in found.answers[3].sentence


@pytest.mark.slow
def test_layer_by_layer_is_asked_for(tiny):
    frame = xrays.xray(tiny(), IDS, layers=True).records
    assert set(frame.loc[frame["metric"] == "value_ablation", "layer"].dropna()) == {0, 1, 2}
    assert set(frame.loc[frame["metric"] == "token_identity_share", "site"]) == {"own_v", "v"}


def found_sinks(total, layer=1, head=0, **parts):
    parts = {None: total} | {name.replace("_", " "): share for name, share in parts.items()}
    return [{"metric": "found_sinks", "layer": layer, "head": head, "variant": k, "value": v} for k, v in parts.items()]


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            found_sinks(0.5, position_0=0.28, position_1=0.22, first_token_1=0.28, first_token_2=0.22),
            r"The first token is no sink: .* At any position: 1 of 1 heads rest on .*: positions 0 and 1\); their values",
        ),
        (
            found_sinks(0.5, position_9=0.2, position_7=0.15, first_token_10=0.44, token_11=0.06),
            r"no sink: .*layer 1, head 0: the first token 10\).*Later in a document, sinks are token 11 \(up to 6% of a head\)",
        ),
        (found_sinks(0.5, position_9=0.1, token_10=0.2, token_11=0.1), r"There is no sink .*: token 10, token 11 and others; these differ"),
        (found_sinks(0.1, position_9=0.1), r"There is no sink .* No other position is one either: .* at most 10.0 ± 1.0%"),
        ([*found_sinks(0.5, position_3=0.5), drain(0.2, variant="found")], r"position 3\); drained: values there have 0.20 ± 0.01"),
    ],
)  # fmt: skip
def test_sinks_at_any_position_are_named(rows, said):
    frame = planted([*heads(0.06), *rows])
    assert re.search(said, sinks_text(frame)), sinks_text(frame)


def test_a_sink_off_the_first_position_speaks_for_a_value_residual_and_tokens_found_again_do_not():
    spread = planted([*ablated(0.01, 0.2), *heads(0.05), *found_sinks(0.5, position_0=0.3, position_1=0.2)])
    assert "there are sinks" in residual_text(spread)
    copies = planted([*ablated(0.01, 0.2), *heads(0.05), *found_sinks(0.5, token_10=0.2, token_11=0.1)])
    assert "there are no sinks" in residual_text(copies)
