"""Only what differs: settings, matrices with their directions by hand, and measures over seeds."""

from __future__ import annotations

import json
from types import SimpleNamespace

import dashboard
import numpy as np
import pandas as pd
import pytest
import test_cli
import torch
from foreign import SIZES, hugging_face

import workbench
from workbench.errors import BadCheckpoint, BadData, WorkbenchError
from workbench.models import build
from workbench.reports.diff_of_checkpoints import (
    diff,
    matrix_change,
    measure_differences,
    run_description,
    setting_differences,
    stored_rows,
    weight_changes,
)
from workbench.runs.records import records, write_parquet
from workbench.views import Link, Source, differences

FIVE = ("transformer", "resformer", "svformer", "denseformer", "attention_residuals")


def test_a_change_of_two_by_two_by_hand():
    change = matrix_change([[3.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [2.0, 1.0]], top=1)
    assert change.relative == pytest.approx(2 / 10**0.5)
    assert change.sizes == pytest.approx([2.0])
    assert np.abs(change.left[:, 0]) == pytest.approx([0, 1])  # writes the second axis
    assert np.abs(change.right[:, 0]) == pytest.approx([1, 0])  # reads the first axis
    assert change.shares == pytest.approx([1.0])
    assert change.overlap == pytest.approx(
        (0.0, 1.0), abs=1e-12
    )  # A's largest direction is the first axis on both sides
    assert change.chance == (0.5, 0.5)
    both = matrix_change([[3.0, 0.0], [0.0, 1.0]], [[4.0, 0.0], [0.0, 3.0]], top=2)
    assert both.shares == pytest.approx([0.8, 0.2])  # sizes 2 and 1
    assert both.overlap == pytest.approx((1.0, 1.0))


def test_directions_equal_a_full_decomposition_and_random_ones_overlap_by_chance():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, 60, generator=generator) for _ in range(2))
    change = matrix_change(a, b, top=3)
    d = (b.double() - a.double()).numpy()
    u, s, v = np.linalg.svd(d)
    assert change.sizes == pytest.approx(s[:3])
    assert np.abs((change.left * u[:, :3]).sum(0)) == pytest.approx(1, abs=1e-9)
    assert np.abs((change.right.T * v[:3]).sum(1)) == pytest.approx(1, abs=1e-9)
    random = []
    for _ in range(60):
        a, moved = (torch.randn(20, 30, generator=generator) for _ in "ab")
        random.append(matrix_change(a, a + moved, top=3))
    assert np.mean([r.overlap for r in random], axis=0) == pytest.approx(random[0].chance, rel=0.15)
    assert random[0].chance == (3 / 20, 3 / 30)


@pytest.mark.parametrize("name", FIVE)
def test_the_directions_of_our_models_sum_to_their_change(name, tmp_path):
    a, b = (build(name, dashboard.MODEL, seed=seed) for seed in (0, 1))
    table = weight_changes(*(dict(m.named_parameters()) for m in (a, b)), top=1)
    assert table["tensor"].tolist() == [n for n, _ in a.named_parameters()]
    one, other = (m.blocks[1].attn.o_proj.weight.detach() for m in (a, b))
    row = table.set_index("tensor").loc["blocks.1.attn.o_proj.weight"]
    assert row["relative"] == pytest.approx(float((other - one).norm() / one.norm()), rel=1e-5)
    change = matrix_change(one, other, top=min(one.shape))
    rebuilt = change.left * change.sizes @ change.right.T
    assert rebuilt == pytest.approx((other - one).numpy(), abs=1e-6)
    same = weight_changes(dict(a.named_parameters()), dict(a.named_parameters()))
    assert same["relative"].dropna().eq(0).all()
    assert same["top_share"].isna().all()


FAMILIES = ("Llama", "GPT2", "Qwen3", "OPT")


def family_model(family):
    """A small model of transformers from its configuration, without a download."""
    import transformers

    sizes = dict(SIZES)
    if family in ("GPT2", "OPT"):
        sizes.pop("num_key_value_heads")
        sizes |= (
            {"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "OPT" else {"n_embd": 32, "n_layer": 2, "n_head": 4}
        )
    kind = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
    return hugging_face(kind, getattr(transformers, f"{family}Config"), **sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_other_families_are_compared_from_their_files(family, tmp_path):
    model = family_model(family)
    model.save_pretrained(tmp_path / "a")
    moved = next(n for n, p in model.named_parameters() if p.ndim == 2 and ".1." in n)
    with torch.no_grad():
        model.get_parameter(moved)[2, 5] += 0.5
    model.save_pretrained(tmp_path / "b")
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.settings["setting"].tolist() == []
    changed = result.weights[result.weights["relative"] > 0]
    assert len(changed) == 1
    assert moved.endswith(changed["tensor"].iloc[0])
    assert changed["top_share"].iloc[0] == pytest.approx(1)
    assert changed["layer"].tolist() == [1]
    table = result.weights.set_index("tensor")  # chance is k / outputs and k / inputs
    fan_in = [name for name in table.index if name.endswith(("c_fc.weight", "fc1.weight", "gate_proj.weight"))]
    assert len(fan_in) == 2
    assert (table.loc[fan_in, "chance_out"] < table.loc[fan_in, "chance_in"]).all()
    tokens = table.index[table.index.str.contains(r"wte|embed_tokens")]
    assert (table.loc[tokens, "chance_out"] > table.loc[tokens, "chance_in"]).all(), "the stream is narrower"


def test_tensors_of_other_shapes_are_refused_by_name():
    a = dict(build("transformer", dashboard.MODEL, seed=0).named_parameters())
    b = dict(build("transformer", dashboard.MODEL | {"d_mlp": 32}, seed=0).named_parameters())
    with pytest.raises(BadCheckpoint, match=r"blocks\.0\.mlp\.\w+\.weight is \[24, 16\] in A and \[32, 16\] in B"):
        weight_changes(a, b)
    gated = dict(build("gated_attention", dashboard.MODEL, seed=0).named_parameters())
    with pytest.raises(BadCheckpoint, match=r"A has parameters that B lacks: gated_attention\.gates\.0"):
        weight_changes(gated, a)
    with pytest.raises(BadData, match=r"\(2, 2\) and \(2, 3\)"):
        matrix_change(np.eye(2), np.ones((2, 3)))
    with pytest.raises(BadData, match="NaN"):
        matrix_change(np.eye(2), np.full((2, 2), np.nan))
    with pytest.raises(BadCheckpoint, match="quantised"):
        weight_changes({"w": torch.zeros(2, 2, dtype=torch.int8)}, {"w": torch.ones(2, 2, dtype=torch.int8)})
    with pytest.raises(WorkbenchError, match="1 runs"):
        diff("one")
    with pytest.raises(WorkbenchError, match="cannot compare a int"):
        diff(1, 2)


def test_settings_are_flattened_and_only_different_ones_are_left():
    table = setting_differences({
        "a": {"train": {"lr": 1e-3, "steps": 5}, "options": {}, "seed": 0},
        "b": {"train": {"lr": 2e-3, "steps": 5}, "options": {"layers": [1]}, "seed": 0},
    })  # fmt: skip
    assert table.to_dict("records") == [
        {"setting": "train.lr", "a": "0.001", "b": "0.002"}, {"setting": "options.layers", "a": "", "b": "[1]"},
    ]  # fmt: skip
    imported = SimpleNamespace(info={"seed": 0, "train": {"lr": 6e-4}, "imported": {}})
    assert run_description(imported) == {"seed": 0}, "the recipe of an import is a placeholder"


def rows(values, metric="loss"):
    return records([
        {"run": f"r{s}", "seed": s, "step": 1, "metric": metric, "layer": n, "value": v + n, "unit": "nats"}
        for s, v in values.items() for n in range(2)
    ])  # fmt: skip


def test_measures_are_paired_by_seed_and_one_seed_claims_nothing():
    table, sentence = measure_differences(rows({0: 1.0, 1: 2.0, 2: 3.0}), rows({2: 4.01, 1: 3.0, 0: 1.99, 7: 9.0}))
    row = table.iloc[0]
    assert (row["a"], row["b"], row["difference"], row["seeds"]) == pytest.approx((2.5, 3.5, 1.0, 3))
    assert row["low"] < 1 < row["high"]
    assert row["moved"]
    assert "1 of 1" in sentence
    table, sentence = measure_differences(rows({0: 1.0}), rows({0: 2.0}))
    assert not table["moved"].any()
    assert sentence.startswith("1 shared seed: nothing is claimed")
    table, _ = measure_differences(rows({0: 1.0, 1: 2.0, 2: 3.0}), rows({0: 3.0, 1: 0.0, 2: 3.1}))
    assert not table["moved"].any()
    assert "share no measure" in measure_differences(rows({0: 1.0}), rows({1: 1.0}))[1]


def test_layers_that_one_side_lacks_do_not_count():
    """SVFormer has own values in layer 0 alone: the mean over all layers of another model is no match for it."""
    a, b = rows({0: 1.0, 1: 2.0, 2: 3.0}), rows({0: 1.01, 1: 2.0, 2: 2.99})
    table, sentence = measure_differences(a, b[b["layer"] == 0])
    assert (table["a"].item(), table["difference"].item()) == pytest.approx((2.0, 0.0))
    assert not table["moved"].item()
    assert "For 1 of 1 measures, only the layers, heads, positions and documents that both have count" in sentence
    assert "that both have" not in measure_differences(a, b)[1]


def test_measures_of_other_documents_are_not_compared():
    a, b = (
        rows({0: 1.0, 1: 2.0, 2: 3.0}).assign(provenance=json.dumps({"data": documents})) for documents in ("64", "32")
    )
    assert measure_differences(a, a)[0]["seeds"].tolist() == [3]
    table, sentence = measure_differences(a, b)  # the same difference in every seed
    assert table.empty
    assert "no measure on the same documents" in sentence


def test_directions_beyond_the_rank_of_a_change_do_not_count():
    a = np.diag([4.0, 3.0, 2.0, 1.0])
    change = matrix_change(a, a + 0.1 * np.outer([1, 0, 0, 0], [0, 0, 0, 1]), top=2)  # rank 1
    assert change.sizes == pytest.approx([0.1, 0])
    assert change.overlap == pytest.approx((1, 0))
    assert change.chance == (0.5, 0.5)
    assert matrix_change(np.outer([1.0, 0], [1.0, 0]), np.eye(2), top=2).chance == (0.5, 0.5)  # A has rank 1


def test_a_matrix_that_only_one_side_ties_is_compared():
    w = torch.ones(3, 2)
    table = weight_changes({"embed": w, "unembed": w}, {"embed": w.clone(), "unembed": 2 * w})
    assert table.set_index("tensor")["relative"].to_dict() == {"embed": 0, "unembed": pytest.approx(1)}


def test_a_run_whose_log_ended_early_or_broke_has_no_last_loss():
    from types import SimpleNamespace

    def telemetry(values):
        return SimpleNamespace(rows=lambda *_: (records([
            {"run": run, "seed": i, "step": step, "metric": "validation_loss", "value": value}
            for i, (run, curve) in enumerate(values.items()) for step, value in curve.items()
        ]), {}))  # fmt: skip

    curves = {"ends": {0: 9.0, 10: 5.0}, "breaks": {0: 9.0, 10: 5.0, 20: float("nan")}, "good": {0: 9.0, 20: 4.0}}
    for step in (None, 22):
        assert stored_rows([], step, telemetry({}), telemetry(curves))["value"].tolist() == [4.0]
    assert set(stored_rows([], 12, telemetry({}), telemetry(curves))["run"]) == {"ends", "breaks"}


@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_two_checkpoints_of_one_seed_differ_beyond_the_noise_over_documents(noise):
    drift = torch.randn(24, generator=torch.Generator().manual_seed(0)).tolist()
    sides = [
        pd.DataFrame({"metric": "loss", "data": None, "site": None, "variant": None, "document": range(24), "provenance": "{}",
                      "value": [d + of + by * noise for d, by in zip(range(24), drift, strict=True)]})
        for of, drift in ((0.0, [0.0] * 24), (0.5, drift))
    ]  # fmt: skip
    for side in sides:
        side["data"] = ""
    table, sentence = measure_differences(rows({0: 1.0}), rows({0: 1.5}), sides)
    assert table["moved"].item() == (noise < 1)
    assert f"{int(noise < 1)} of 1 tested measures differ beyond the noise over documents" in sentence
    assert "1 shared seed: of these checkpoints" in sentence
    two = [pd.concat([rows(of), rows(of, "other")], ignore_index=True) for of in ({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.51})]
    table, sentence = measure_differences(*two, sides)
    assert "of 1 tested measures" in sentence, "two seeds are no noise"
    row = table.set_index("metric").loc["loss"]
    assert row["b"] - row["a"] == pytest.approx(row["difference"]) == pytest.approx(sum(drift) * noise / 24 + 0.5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        for name in ("transformer", "resformer"):
            common = dashboard.run(
                folder, f"text-{name}-s{seed}", name, seed, "text", steps=(0, 20) if seed == 0 else ()
            )
            write_parquet(records(dashboard.measured(common, "text")), folder / common["run"] / "records" / "a.parquet")
    return folder


@pytest.mark.slow
def test_two_runs_in_python_on_the_command_line_and_as_views(runs):
    a, b = (runs / f"text-{name}-s0" for name in ("transformer", "resformer"))
    result = workbench.diff(a, b)
    assert "architecture" in result.settings["setting"].tolist()
    assert result.measures["seeds"].eq(3).all()
    done = test_cli.run("diff", a, b, "--json")
    printed = json.loads(done.stdout)
    assert [row["tensor"] for row in printed["weights"]] == result.weights["tensor"].tolist()
    assert test_cli.run("diff", a, b, "--only", "settings").stdout.startswith(
        "setting\ttext-transformer-s0\ttext-resformer-s0\n"
    )
    source, link = (
        Source(runs),
        Link.parse("differences?a=text-transformer-s0&b=text-resformer-s0&step_b=0&quantity=overlap_in"),
    )
    drawn = {
        name: view(source, link)
        for name, view in (("settings", differences.settings), ("weights", differences.moved_weights))
    }
    assert len(drawn["settings"].table) == len(result.settings)
    texts = drawn["settings"].figure.data[1]
    assert (texts.y, texts.text, texts.customdata) == (
        ("architecture",),
        ("ResFormer",),
        (["architecture", "ResFormer"],),
    )
    keys = ("options.lambda_v1", "train.lr", "model.n_layers", "observed.hook_names")
    named = ["weight of the first layer's values", "learning rate", "layers", "hook names (observed)"]
    assert [differences.setting_label(key) for key in keys] == named
    expected = workbench.diff(a, b, step=["last", "first"]).weights
    assert sorted(drawn["weights"].table["relative"]) == pytest.approx(sorted(expected["relative"]), rel=1e-6)
    with pytest.raises(WorkbenchError, match="equal weights"):
        differences.moved_weights(source, link.but(step_b=20))
    assert "random directions" in drawn["weights"].figure.layout.title.subtitle.text
    assert "Two unrelated matrices of equal size differ by 1.41" in drawn["weights"].sentence
    title = drawn["weights"].figure.layout.title.text
    assert title == "Weights that differ"
    one_run = differences.moved_weights(
        source, Link.parse("differences?a=text-resformer-s0&b=text-resformer-s0&step_b=0")
    )
    assert one_run.figure.layout.title.text == "Weights that moved"
    assert "unrelated" not in one_run.sentence
    steps = workbench.diff(a, a, step=["first", "last"])
    assert steps.settings.empty
    assert steps.names == ("text-transformer-s0, step 0", "text-transformer-s0, step 20")
    assert len(workbench.diff(a, b, runs / "text-resformer-s1").settings.columns) == 4


def test_runs_of_one_name_in_two_folders_are_told_apart_and_models_are_compared(tmp_path):
    for folder, seed in (("one", 0), ("two", 1)):
        dashboard.run(tmp_path / folder, "text-a-s0", "transformer", seed, "text", steps=(20,))
    result = diff(tmp_path / "one" / "text-a-s0", tmp_path / "two" / "text-a-s0")
    assert result.names == ("text-a-s0 (1)", "text-a-s0 (2)")
    assert result.settings.to_dict("records") == [{"setting": "seed", "text-a-s0 (1)": "0", "text-a-s0 (2)": "1"}]
    assert result.weights["relative"].gt(0).any()
    models = [build(name, dashboard.MODEL, seed=0) for name in ("transformer", "resformer")]
    result = diff(*models)
    assert result.names == ("model transformer", "model resformer")
    assert result.weights["relative"].eq(0).all()
    assert "options.lambda_v1" in result.settings["setting"].tolist()
