"""Single heads: the ranking is the records' own numbers, and the passages are where the model itself attends most."""

from __future__ import annotations

import json

import dashboard
import numpy as np
import pytest
import torch
from seams import ATTENDING

from workbench import prompts
from workbench.checkpoints.saving import save
from workbench.data.synthetic import SYMBOLS
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.models import build
from workbench.runs.records import records, write_parquet
from workbench.runs.run import Run
from workbench.views import Link, Source, attention, drawings, heads

SHAPE = {"n_layers": 2, "d_model": 64, "n_heads": 2, "d_mlp": 24, "d_vocab": 64, "n_ctx": 128}
LAYER, HEAD, TOKEN = 1, 1, 7
VALUES = {
    ("transformer", 20): [0.2, 0.7, 0.1, 0.7], ("resformer", 20): [0.7, 0.3, 0.05, 0.9], ("transformer", 0): [0.05, 0.06, 0.05, 0.04],
}  # fmt: skip
"""Of heads (0, 0), (0, 1), (1, 0), (1, 1)."""


def planted(seed=0):
    """A model one of whose heads gives all it can to the token 7: its keys alone point where all queries point."""
    model = build("transformer", SHAPE, seed=seed)
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(64) * 8)
        for block in model.blocks:
            block.attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        attn, at = model.blocks[LAYER].attn, 32 * HEAD + 15  # of the pair of dimensions that turns most slowly
        for projection in (attn.q_proj, attn.k_proj):
            projection.weight[32 * HEAD : 32 * (HEAD + 1)] = 0
        attn.q_proj.weight[at] = 1.0
        attn.k_proj.weight[at, TOKEN] = 1.0
    return model


def told(name, seed=0):
    """Records of sink_mass at the steps of `VALUES`, in no order."""
    rows = []
    for (architecture, step), values in VALUES.items():
        common = {"run": f"small-{architecture}-s{seed}", "architecture": architecture, "seed": seed, "step": step,
                  "metric": "sink_mass", "data": "validation", "T": 16, "n": 4, "unit": "share",
                  "provenance": dashboard.known(data="d", metric="sink_mass", version=1)}  # fmt: skip
        if architecture == name:
            places = [(layer, head) for layer in range(2) for head in range(2)]
            rows += [
                common | {"layer": n, "head": h, "value": v, "se": 0.01}
                for (n, h), v in zip(places, values, strict=True)
            ][::-1]
            rows += [common | {"layer": n, "control": "uniform_causal", "value": 0.125} for n in range(2)]
    return records(rows)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "runs"
    for name in ("transformer", "resformer"):
        run = f"small-{name}-s0"
        dashboard.run(folder, run, name, 0, "repeated", steps=())
        path = folder / run / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model": SHAPE}))
        write_parquet(told(name), folder / run / "records" / "aa-bb.parquet")
    path = folder / "small-transformer-s0"
    for step in (0, 20):
        save(planted(step), path / f"step_{step:06d}", seed=0, step=step, run=path.name)
    return dashboard.kept(folder)


def only(ask, link, name):
    ((_, drawing),) = drawings(ask, Link.parse(link), name)
    return drawing


# ---- the ranking ----


@pytest.mark.slow
def test_the_ranking_is_the_records_order_and_equal_heads_stand_by_run_layer_and_head(ask):
    table = only(ask, "heads?end=highest", "ranking").table
    assert table["name"].tolist() == [
        "ResFormer · s0 · L1 H1", "ResFormer · s0 · L0 H0", "Transformer · s0 · L0 H1", "Transformer · s0 · L1 H1",
        "ResFormer · s0 · L0 H1", "Transformer · s0 · L0 H0", "Transformer · s0 · L1 H0", "ResFormer · s0 · L1 H0",
    ]  # fmt: skip
    assert table["value"].tolist() == [0.9, 0.7, 0.7, 0.7, 0.3, 0.2, 0.1, 0.05]
    assert table["rank"].tolist() == [*range(1, 9)]
    assert table["init"].dropna().tolist() == [0.06, 0.04, 0.05, 0.05]  # of the Transformer alone
    lowest = only(ask, "heads?end=lowest", "ranking").table
    assert lowest["value"].tolist() == table["value"].tolist()[::-1]
    assert lowest["name"].tolist()[4:7] == table["name"].tolist()[1:4]


@pytest.mark.slow
def test_compared_runs_alone_are_ranked_each_at_its_own_step(ask):
    link = "heads?compare=1&a=small-transformer-s0&b=small-transformer-s0&step=20&step_b=0&end=highest"
    table = only(ask, link, "ranking").table
    assert len(table) == 8
    assert table["name"].tolist()[:3] == [
        "A: Transformer · s0 · L0 H1",
        "A: Transformer · s0 · L1 H1",
        "A: Transformer · s0 · L0 H0",
    ]
    with pytest.raises(UnknownName, match="end"):
        heads.head_options(ask, Link.parse("heads?end=middle"))


# ---- one head ----


def test_the_head_is_the_first_of_the_ranking_where_the_link_names_none(ask):
    def named(link):
        found = heads.head_of(ask, Link.parse(link))
        return found.entry.name, found.layer, found.head

    assert named("heads") == ("small-resformer-s0", 1, 1)
    assert named("heads?a=small-transformer-s0") == ("small-transformer-s0", 0, 1)
    assert named("heads?layer=0") == ("small-resformer-s0", 0, 0)
    assert named("heads?a=small-transformer-s0&layer=1&head=0") == ("small-transformer-s0", 1, 0)
    with pytest.raises(UnknownName, match="layer of small-transformer-s0"):
        named("heads?a=small-transformer-s0&layer=9&head=0")


# ---- passages ----


def test_a_planted_head_is_found_where_it_attends_with_the_models_own_weight(ask):
    link = f"heads?a=small-transformer-s0&layer={LAYER}&head={HEAD}"
    table = only(ask, link, "passages").table
    run = Run.open(ask.folder / "small-transformer-s0")
    model, ids = run.load(), run.data.sample(heads.DOCUMENTS, 16).ids
    _, cache = model.run_with_cache(ids)
    pattern = cache[f"blocks.{LAYER}.attn.hook_pattern"][:, HEAD].numpy()
    others = np.tril(np.ones((16, 16), dtype=bool), -1)
    others[:, 0] = False
    largest = np.where(others, pattern, -1).max((1, 2))
    assert table["weight"].to_numpy() == pytest.approx(np.sort(largest)[::-1][:10], abs=1e-4)
    first = table.iloc[0]
    assert first["weight"] > 0.9
    assert first["key token"] == SYMBOLS[TOKEN]
    assert first["distance"] == 1  # the query behind the token has the fewest others to look at
    inputs = ask.query(prompts.attention_inputs, ask.subjects(Link.parse(link))[0], first["prompt"])
    read = prompts.attention_map(inputs, LAYER, HEAD).weights  # the prompt, read as the Attention page reads it
    assert read[first["lock"], first["lock"] - 1] == pytest.approx(first["weight"], abs=1e-4)


@pytest.mark.parametrize("architecture", ATTENDING[::3])
def test_pairs_are_the_largest_weights_in_every_architecture(awake, architecture):
    model = awake(architecture)
    ids = torch.randint(61, (3, 19), generator=torch.Generator().manual_seed(1))
    pairs = prompts.sharpest_pairs(model, ids).set_index(["layer", "head", "document"])
    for document in range(3):
        inputs = prompts.attention_inputs(model, ids[document : document + 1])
        for layer in range(3):
            for head in range(4):
                weights = prompts.attention_map(inputs, layer, head).weights
                row = pairs.loc[(layer, head, document)]
                assert 0 < row["key"] < row["query"]
                past = [weights[q, k] for q in range(19) for k in range(1, q)]
                assert row["weight"] == pytest.approx(max(past), abs=1e-6)
                assert weights[int(row["query"]), int(row["key"])] == pytest.approx(row["weight"], abs=1e-6)
    with pytest.raises(BadData, match="at least 3"):
        prompts.sharpest_pairs(model, ids[:, :2])


def test_an_excerpt_of_text_reads_as_the_documents_own_tokens(populated):
    model = Run.open(populated / "text-resformer-s0").load()
    ids = model.tokenizer.encode("é = " + dashboard.PROSE)
    for query, key in ((2, 1), (60, 50), (len(ids) - 1, 3)):
        found = prompts.excerpt(model, ids, query, key)
        again = model.tokenizer.encode(found.text)
        assert 0 < len(found.text) <= 200
        assert again[: found.query + 1] == ids[query - found.query : query + 1]


def test_runs_without_weights_or_text_say_why_there_are_no_passages(ask, populated, tmp_path):
    with pytest.raises(WorkbenchError, match="ResFormer · s0 has no checkpoint, so it cannot read text"):
        only(ask, "heads", "passages")
    with pytest.raises(WorkbenchError, match="the training text of text-resformer-s0 is not on this machine"):
        only(dashboard.kept(populated), "heads?a=text-resformer-s0", "passages")
    folder = dashboard.copied(ask.folder, tmp_path / "runs")
    path = folder / "small-transformer-s0" / "run.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"data": {"kind": "imported", "domains": ["unknown"]}}))
    with pytest.raises(WorkbenchError, match="the training text of small-transformer-s0"):
        only(dashboard.kept(folder), "heads?a=small-transformer-s0", "passages")


# ---- where Attention opens ----


def test_attention_opens_on_the_head_with_most_attention_to_the_first_token_at_all_steps(ask):
    link = Link("attention", {"a": "small-transformer-s0", "prompt": "abchdefgij"})  # h is the token 7
    for step in (20, 0):
        found = attention.attention_options(ask, link.but(step=step))
        rows = attention.seen(ask, link.but(step=20))[1][0].overview.statistics
        assert (found.layer, found.head) == tuple(rows.loc[rows["sink_mass"].idxmax(), ["layer", "head"]])
    assert attention.attention_options(ask, link.but(layer=0)).layer == 0
    assert attention.attention_options(ask, link.but(head=0)).head == 0


def test_heads_have_the_type_that_their_measures_stored_at_the_step_give(populated, tmp_path):
    source = dashboard.kept(dashboard.copied(populated, tmp_path / "runs"))
    common = {
        "run": "text-resformer-s0",
        "architecture": "resformer",
        "seed": 0,
        "step": 20,
        "unit": "share",
        "provenance": dashboard.known(),
    }
    planted = {("sink_mass", None): [[0.9, 0.1], [0.1, 0.1]], ("induction_score", None): [[0.9, 0.8], [0.1, 0.1]],
               ("induction_score", "previous"): [[0.1, 0.1], [0.7, 0.1]]}  # fmt: skip
    rows = [common | {"metric": m, "variant": v, "layer": n, "head": h, "value": values[n][h]}
            for (m, v), values in planted.items() for n in range(2) for h in range(2)]  # fmt: skip
    rows += [row | {"step": 0, "value": 0.1} for row in rows if row["metric"] == "sink_mass"]
    path = source.folder / "text-resformer-s0" / "records"
    for file in path.glob("*.parquet"):
        file.unlink()
    write_parquet(records(rows), path / "dd.parquet")
    entry = source.catalogue().entry("text-resformer-s0")
    types = heads.head_types(source, [entry])
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [types[entry.name, 20, n, h] for n, h in places] == ["sink", "induction", "previous token", "other"]
    table = heads.ranked(source, Link.parse("heads?metric=sink_mass&end=type&models=resformer&find=s0"))
    by_type = [(kind, layer, head) for kind, layer, head in table[["type", "layer", "head"]].itertuples(index=False)]
    assert by_type == [("sink", 0, 0), ("previous token", 1, 0), ("induction", 0, 1), ("other", 1, 1)]
    before = heads.ranking(source, Link.parse("heads?metric=sink_mass&end=type&models=resformer&find=s0&step=0"))
    assert set(before.table["type"]) == {"other"}, "none was a sink at step 0"


def test_parts_of_the_sink_sum_to_the_scores_of_every_checkpoint(populated):
    source = Source(populated)
    drawing = heads.sink(source, Link.parse("heads?a=race-svformer-s0&layer=1&head=0"))
    entry = source.catalogue().entry("race-svformer-s0")
    assert set(drawing.table["step"]) == set(entry.steps)
    ids, name = heads.validation_ids(entry, heads.SINK_DOCUMENTS), "blocks.1.attn.hook_attn_scores"
    for step, rows in drawing.table.groupby("step"):
        scores = Run.open(entry.path).load(int(step)).run_with_cache(ids, names_filter=[name])[1][name][:, 0].double()
        contrast = [scores[:, i, 0] - scores[:, i, 1 : i + 1].mean(-1) for i in range(1, ids.shape[1])]
        expected = float(torch.stack(contrast).mean())
        sums = rows.groupby("side")["score"].sum()
        assert sums.to_numpy() == pytest.approx([expected, expected], abs=1e-5 * float(scores.tril().abs().max()))


def test_attention_says_whether_the_strongest_head_is_a_sink_and_finds_a_query_that_looks_at_the_first_token(ask):
    link = Link("attention", {"a": "small-transformer-s0", "prompt": "abchdefgij"})
    _, (seen,) = attention.seen(ask, link)
    mass = seen.overview.statistics["sink_mass"].max()
    assert ("no sink" in attention.strongest_sink(seen)) == (mass <= heads.SINK_MASS)
    query = attention.query_of_the_first(ask, link)
    choice, (first,) = attention.seen(ask, link.but(keys="0-0"))
    column = first.window.weights[1:, 0]
    assert query == 1 + int(column.argmax()) in range(1, choice.length)
