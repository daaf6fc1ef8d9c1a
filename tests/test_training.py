"""The recipe in numbers, pairing across architectures, and what a training writes down."""

from __future__ import annotations

import json

import pytest
import torch
from training_runs import MODEL, PUBLISHED, RECIPE, start, telemetry, weights

from workbench.data.data_sources import RepeatedData, prepare
from workbench.errors import WorkbenchError
from workbench.file_io import read_json, write_json
from workbench.models import ARCHITECTURES, build
from workbench.runs.run import Run
from workbench.training.loop import checkpoint_steps, learning_rate, optimiser, train


@pytest.mark.parametrize(("warmup", "total"), [(120, 3.296), (1200, 3.264)])
def test_learning_rates_of_the_published_schedule(warmup, total):
    recipe = PUBLISHED.replace(warmup=warmup)
    rates = [learning_rate(t, recipe) for t in range(10_001)]
    assert rates[0] == 1e-7
    assert rates[warmup] == pytest.approx(6e-4, rel=1e-12)
    assert rates[10_000] == pytest.approx(6e-5, rel=1e-12)
    assert sum(rates[:10_000]) == pytest.approx(total, abs=5e-4)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert learning_rate(0, PUBLISHED.replace(warmup=0)) == pytest.approx(6e-4)


def test_checkpoints_are_even_in_the_logarithm():
    assert checkpoint_steps(300, 1) == [0, 8, 16, 32, 64, 128, 256, 300]
    assert checkpoint_steps(40, 2) == [0, 8, 11, 16, 23, 32, 40]
    assert checkpoint_steps(5, 1) == [0, 5]


def test_matrices_decay_and_gains_and_coefficients_do_not(some_architecture):
    model = build(some_architecture, MODEL.replace(n_heads=4))
    groups = optimiser(model, RECIPE).param_groups
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    for name, parameter in model.named_parameters():
        matrix = name.endswith("_proj.weight") or name in ("embed.weight", "unembed.weight")
        table = any(kind in name for kind in (".tables.", ".gates.", ".matrices."))
        assert (id(parameter) in decayed) == (matrix or table), name
    assert {g["weight_decay"] for g in groups} == {0.1, 0.0}


@pytest.mark.parametrize(
    ("architecture", "option", "coefficients"),
    [
        ("resformer_learnable", "decay_lambda", ["resformer_learnable.first", "resformer_learnable.own"]),
        (
            "resformer_learnable_plus",
            "decay_lambda",
            [f"resformer_learnable_plus.{x}" for x in ("own", "logits", "scale")],
        ),
        ("resformer_dense", "decay_lambda", ["resformer_dense.rows.1"]),
        ("value_embedding", "decay_lambda", ["value_embedding.own", "value_embedding.table"]),
        ("denseformer", "decay_alpha", ["dwa.alphas.0.weight", "dwa.alphas.1.weight"]),
    ],
)
def test_coefficients_decay_where_asked_for(architecture, option, coefficients):
    for asked in (True, False):
        model = build(architecture, MODEL, **{option: asked})
        decayed = {id(p) for g in optimiser(model, RECIPE).param_groups if g["weight_decay"] for p in g["params"]}
        own = f"{model.shortcuts[0].prefix}."
        found = {name: id(p) in decayed for name, p in model.named_parameters() if name.startswith(own)}
        assert {name: d for name, d in found.items() if ".tables." not in name} == dict.fromkeys(coefficients, asked)
        assert id(model.ln_final.weight) not in decayed


def test_the_first_step_is_adamw_by_hand(tmp_path):
    """One clipped step on all tokens' mean loss, against torch's own AdamW."""
    recipe = RECIPE.replace(steps=1, warmup=0, clip=0.05)
    told = []
    run = start(tmp_path, "transformer", recipe=recipe, seed=3, progress=lambda _, loss, __: told.append(loss))
    assert run.telemetry("metric == 'train_loss'")["value"].tolist() == told, "bit by bit"
    model = build("transformer", MODEL, seed=3).train()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    model(RepeatedData().batch(0, 4, 16, 3), return_type="loss").backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert total > 0.05
    reference.step()
    trained = dict(run.load().named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=1e-7)
    noted = run.telemetry("metric == 'gradient_norm' and part == 'all'")
    assert noted["value"].item() == pytest.approx(float(total), rel=1e-5)


def test_rate_factors_of_some_parameters_are_adamw_by_hand(tmp_path):
    """Five times the rate for block 0, its decay with it, the rest at the schedule's."""
    recipe = RECIPE.replace(steps=2, warmup=0, lr_final=1.0, clip=0.0, lr_factors={"blocks.0.*": 5, "unembed.*": 0.5})
    run = start(tmp_path, "transformer", recipe=recipe, seed=3)
    model = build("transformer", MODEL, seed=3).train()
    groups = []
    for name, p in model.named_parameters():
        rate = 5e-2 if name.startswith("blocks.0.") else 5e-3 if name.startswith("unembed") else 1e-2
        groups.append({"params": [p], "lr": rate, "weight_decay": 0.1 if p.ndim == 2 else 0.0})
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(2):
        reference.zero_grad()
        model(RepeatedData().batch(step, 4, 16, 3), return_type="loss").backward()
        reference.step()
    trained = dict(run.load().named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=1e-6, msg=name)
    assert run.train.lr_factors == {"blocks.0.*": 5, "unembed.*": 0.5}
    assert start(tmp_path, "transformer", recipe=recipe, seed=3).finished


def test_a_run_from_before_a_key_came_is_still_its_own(tmp_path):
    path = start(tmp_path).path / "run.json"
    info = json.loads(path.read_text())
    del info["train"]["lr_factors"]
    path.write_text(json.dumps(info))
    assert start(tmp_path).finished
    with pytest.raises(WorkbenchError, match="exists with another train"):
        start(tmp_path, recipe=RECIPE.replace(lr_factors={"blocks.0.*": 2}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            {"device": "cuda", "float32_matmul": "high"},
            {"device": "cpu and cuda", "float32_matmul": "high and highest"},
        ),
        ({"device": "cpu", "float32_matmul": "highest"}, {"device": "cpu", "float32_matmul": "highest"}),
        (None, None),  # an older run, whose first device is unknown
    ],
)
def test_a_run_names_every_device_that_trained_it(tmp_path, before, after):
    def stop(step, *_):
        raise KeyboardInterrupt(step)

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "transformer", progress=stop)
    info = read_json(tmp_path / "transformer" / "run.json")
    assert info.pop("machine") == {"device": "cpu", "float32_matmul": "highest"}
    write_json(tmp_path / "transformer" / "run.json", info | ({"machine": before} if before else {}))
    run = start(tmp_path, "transformer")
    assert Run.open(run.path).info.get("machine") == run.info.get("machine") == after
    assert run.precision == (
        "float32 products of high and highest precision on cpu and cuda" if "cuda" in run.device else "float32"
    )
    assert start(tmp_path, "transformer").finished


@pytest.mark.slow
def test_architectures_of_one_seed_start_and_learn_from_the_same(tmp_path):
    models = {a: dict(build(a, MODEL.replace(n_heads=4), seed=5).named_parameters()) for a in ARCHITECTURES}
    for tensors in models.values():
        for name, tensor in tensors.items():
            if name in models["transformer"] and tensor.shape == models["transformer"][name].shape:
                assert torch.equal(tensor, models["transformer"][name]), name
    losses = [
        telemetry(start(tmp_path, a, recipe=RECIPE.replace(lr=1e-30, weight_decay=0.0, warmup=0)))
        for a in ("transformer", "denseformer")
    ]
    first, second = (frame[frame["metric"] == "train_loss"]["value"].to_numpy() for frame in losses)
    assert first == pytest.approx(second, rel=1e-5), "equal functions that do not learn see equal batches"
    assert len(set(first)) == RECIPE.steps


@pytest.mark.slow
def test_batches_are_a_function_of_seed_and_step(tmp_path):
    text = "\n\n".join(f"line {i} of the book says {i * i % 97} and nothing more than that" for i in range(1500))
    (tmp_path / "book.txt").write_text(text)
    data, again = (prepare(texts=[tmp_path / "book.txt"], vocabulary=280) for _ in range(2))
    for source, other in ((data, again), (RepeatedData(), RepeatedData())):
        assert torch.equal(source.batch(7, 4, 16, 1), other.batch(7, 4, 16, 1))
        assert not torch.equal(source.batch(7, 4, 16, 1), source.batch(7, 4, 16, 2))
        assert not torch.equal(source.batch(7, 4, 16, 1), source.batch(8, 4, 16, 1))
    chunks = len(data.train.chunks(16))
    epoch = torch.cat([data.batch(step, 1, 16, 1) for step in range(chunks)])
    assert torch.equal(epoch[4:8], data.batch(1, 4, 16, 1)), "the order does not depend on the size of a batch"
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, data.train.chunks(16).tolist()))
    second = torch.cat([data.batch(step, 1, 16, 1) for step in range(chunks, 2 * chunks)])
    assert not torch.equal(second, epoch)


def test_what_is_written_down(uninterrupted):
    frame = uninterrupted.telemetry()
    assert [path.name for _, path in uninterrupted.telemetry_parts()] == ["000000-000008.parquet"], (
        "one part in the end"
    )
    assert set(frame["metric"]) >= {
        "train_loss", "validation_loss", "copy_loss", "learning_rate", "gradient_norm", "tokens_per_second", "coefficient",
    } - {"coefficient"}  # fmt: skip
    assert frame[frame["metric"] == "train_loss"]["step"].tolist() == list(range(8))
    validation = frame[frame["metric"] == "validation_loss"]
    assert validation["step"].tolist() == [0, 4, 8]
    assert (validation["n"] == 4).all()
    assert validation["se"].notna().all()
    of_loss = frame[(frame["metric"] == "gradient_norm") & frame["variant"].isna() & frame["layer"].notna()]
    assert set(of_loss["step"]) == set(frame[frame["metric"] == "learning_rate"]["step"]), (
        "at every step that is logged"
    )
    pace = frame[frame["metric"] == "tokens_per_second"]
    tokens = pace["step"].diff().fillna(pace["step"]) * uninterrupted.train.batch * uninterrupted.train.T
    assert 0 < (tokens / pace["value"]).sum() < 60, "seconds that so many tokens took"
    output = frame[(frame["metric"] == "gradient_norm") & (frame["variant"] == "output")]
    assert set(output["step"]) == {0, 4, 8}, "where it is validated"
    assert output["layer"].nunique() == uninterrupted.load().config.n_layers
    assert (output["unit"] == "logit per weight").all()
    assert uninterrupted.steps == [0, 8]
    assert uninterrupted.finished
    assert start(uninterrupted.path.parent).path == uninterrupted.path, "a finished run is not trained again"
    copied = frame[(frame["metric"] == "copy_loss") & (frame["variant"] == "validation")]
    validated = frame[frame["metric"] == "validation_loss"]
    assert copied["step"].tolist() == validated["step"].tolist()
    sample = uninterrupted.data.sample(uninterrupted.train.validation_sequences, uninterrupted.train.T).ids
    with torch.no_grad():
        each = uninterrupted.load()(sample, return_type="loss", loss_per_token=True)
    second = each[:, sample.shape[1] // 2 :]
    assert copied["value"].iloc[-1] == pytest.approx(float(second.mean()), rel=1e-5), (
        "the second half, of the last weights"
    )


@pytest.mark.slow
def test_precision_and_device_of_one_training_are_its_own(tmp_path, uninterrupted):
    half = start(tmp_path, recipe=RECIPE.replace(bf16=True))
    assert start(tmp_path, name="again").steps == [0, 8]
    assert weights(Run.open(tmp_path / "again")) == weights(uninterrupted)
    assert weights(half) != weights(uninterrupted)
    if not torch.cuda.is_available():
        with pytest.raises(WorkbenchError, match="device='cuda'"):
            train("transformer", RepeatedData(), name="gpu", runs=tmp_path, model=MODEL, train=RECIPE, device="cuda")
