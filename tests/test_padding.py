"""What `measure` averages over: the tokens of each document, without padding and without what else stands in its row."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench
from workbench.errors import BadData, NotMeasured, PaddingLeftOut, WorkbenchError
from workbench.interventions import edited
from workbench.metrics import METRICS
from workbench.runs.records import facts

D, HEADS, VOCAB, PAD = 16, 2, 23, 0
LENGTHS = (12, 7, 9)
COMPARED = ["metric", "site", "layer", "head", "position", "index", "variant", "control"]
METRICS_COMPARED = [
    "loss", "row_entropy", "importance_entropy", "token_importance", "sink_mass", "sink_contribution", "received_ratio", "hidden_peak",
    "collapse_residual", "value_drain", "top_importance", "value_weighted_importance",
]  # fmt: skip


class Decoder(nn.Module):
    """Two layers without positions, so that moving a document changes nothing; `fused` or step by step."""

    def __init__(self, *, fused=True, itself=True, dtype="bool"):
        super().__init__()
        self.fused, self.itself, self.dtype = fused, itself, dtype
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(self) for _ in range(2))

    def forward(self, ids, attention_mask=None, document=None, labels=None):
        T = ids.shape[1]
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None]
        if document is not None:
            seen = seen & (document[:, None, :, None] == document[:, None, None])
        if attention_mask is not None:
            seen = seen | (
                torch.eye(T, dtype=torch.bool) if self.itself else ~seen.any(-1, keepdim=True) & (torch.arange(T) < 1)
            )
        mask = (
            seen if self.dtype == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        )
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = [decoder]
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x, mask):
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.decoder[0].fused:
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.mT / (D // HEADS) ** 0.5
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -1e9)
            z = scores.softmax(-1) @ v
        x = x + self.o(z.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


def decoder(**how):
    torch.manual_seed(0)
    module = Decoder(**how).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    return module


def documents(lengths=LENGTHS):
    return [
        torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(lengths)
    ]


def padded(rows, side, length=14):
    table = torch.full((len(rows), length), PAD)
    for out, row in zip(table, rows, strict=True):
        start = {"left": length - len(row), "right": 0}[side]
        out[start : start + len(row)] = row
    return table


def with_mask(module, ids):
    return module(ids, attention_mask=(ids != PAD).long())


def observed(module, ids, call=None):
    return workbench.observe(module, ids, call=call, quiet=True)


def values(frame):
    return frame.set_index(COMPARED)[["value", "se", "n"]].astype(float).sort_index()


def mean_of(frames, weights):
    """Weighted means of equal rows of several tables; of positions, over those that have them."""
    rows = pd.concat([f.assign(weight=float(w), value=f["value"] * w) for f, w in zip(frames, weights, strict=True)])
    sums = rows.groupby(COMPARED, dropna=False)[["value", "weight"]].sum(min_count=1)
    return (sums["value"] / sums["weight"]).sort_index()


@pytest.fixture(scope="module")
def alone():
    """Each document measured by itself, without a mask."""
    ids = documents()[0][None]
    model = observed(decoder(), ids)
    return [workbench.measure(model, METRICS_COMPARED, row[None]) for row in documents()]


@pytest.mark.slow
@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("side", "how"),
    [
        ("right", {"itself": False}), ("right", {"fused": False}), ("left", {"dtype": "float"}),
    ],
    ids=["padding sees the first key", "eager", "fused, added"],
)  # fmt: skip
def test_padded_rows_equal_the_documents_by_themselves(alone, side, how):
    ids = padded(documents(), side)
    model = observed(decoder(**how), ids, with_mask)
    with pytest.warns(
        PaddingLeftOut, match=r"33\.3 % of positions left out \(padding\); 3 documents, each measured by itself"
    ):
        frame = workbench.measure(model, METRICS_COMPARED, ids, batch=2)
    found = frame.set_index(COMPARED)["value"].sort_index()
    pd.testing.assert_series_equal(
        found, mean_of(alone, [1, 1, 1]), atol=2e-5, rtol=2e-5, check_names=False, check_dtype=False
    )
    assert facts(frame["provenance"].iloc[0])["left_out"] == pytest.approx(1 / 3, abs=1e-6)
    by_position = frame[(frame["metric"] == "token_importance") & frame["control"].isna() & (frame["layer"] == 0)]
    assert by_position.sort_values("position")["n"].tolist() == [3] * 7 + [2] * 2 + [1] * 3
    assert frame["T"].unique().tolist() == [12]


@pytest.mark.slow
def test_accumulated_metrics_and_experiments_of_padded_rows_equal_those_of_the_text():
    text = torch.stack([documents((9,) * 8)[i] for i in range(8)])
    fitted = ("token_probe", "previous_token_probe")  # seconds; what they fit is gathered as for the streamed ones
    names = [n for n, m in METRICS.items() if m.form == "accumulated" and m.min_length <= 9 and n not in fitted]
    names += ["layer_similarity", "sublayer_removal"]
    ids = padded(text, "left")
    frames = []
    for tokens, call in ((text, None), (ids, with_mask)):
        model = observed(decoder(), tokens, call)
        frames.append(workbench.measure(model, names, tokens) if call is None else warned(model, names, tokens))
    plain, cut = (values(frame) for frame in frames)
    assert len(plain) > 100
    pd.testing.assert_frame_equal(cut, plain, atol=1e-4, rtol=1e-4)


def warned(*args, **kwargs):
    with pytest.warns(PaddingLeftOut):
        return workbench.measure(*args, **kwargs)


@pytest.mark.slow
def test_documents_packed_in_a_row_equal_themselves_weighted_by_their_tokens(alone):
    row = torch.cat(documents()[:2])[None]
    document = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]])
    model = observed(decoder(), row, lambda m, ids: m(ids, document=document))
    with pytest.warns(PaddingLeftOut, match="no padding; 2 documents, each measured by itself"):
        frame = workbench.measure(model, METRICS_COMPARED, row)
    found = frame.set_index(COMPARED)["value"].sort_index()
    wanted = mean_of(alone[:2], LENGTHS[:2])
    wanted["loss"] = mean_of(alone[:2], [length - 1 for length in LENGTHS[:2]])["loss"]  # of predicted tokens
    pd.testing.assert_series_equal(found, wanted, atol=2e-5, rtol=2e-5, check_names=False, check_dtype=False)


def test_an_xray_of_packed_rows_counts_their_documents():
    ids = torch.stack(documents((24,) * 8))
    halves = torch.tensor([[0] * 12 + [1] * 12])
    model = observed(decoder(), ids, lambda m, x: m(x, document=halves.expand(len(x), -1)))
    with pytest.warns(PaddingLeftOut):
        page = workbench.xray(model, ids).html()
    assert "8 documents in 4 rows, of at most 12 tokens in float32; ± is one standard error over rows" in page


def test_padding_within_a_row_is_left_out(alone):
    text = documents()[0]
    ids = torch.cat((text[:5], torch.full((3,), PAD), text[5:]))[None]
    frame = warned(observed(decoder(), ids, with_mask), METRICS_COMPARED, ids)
    found = frame.set_index(COMPARED)["value"].sort_index()
    pd.testing.assert_series_equal(
        found, mean_of(alone[:1], [1]), atol=2e-5, rtol=2e-5, check_names=False, check_dtype=False
    )


def test_labels_of_minus_100_do_not_count_in_the_loss():
    ids = torch.stack([documents((12, 12))[i] for i in range(2)])
    labels = ids.clone()
    labels[:, :5] = -100
    module = decoder()
    with pytest.warns(PaddingLeftOut, match="no padding"):
        frame = workbench.measure(observed(module, ids, lambda m, x: m(x, labels=labels)), "loss", ids)
    each = F.cross_entropy(module(ids)[:, 4:-1].detach().flatten(0, 1), ids[:, 5:].flatten())
    assert frame["value"].item() == pytest.approx(float(each), abs=1e-5)


def test_a_removed_sublayer_changes_the_loss_of_the_labelled_tokens():
    row = torch.cat(documents()[:2])[None]
    document = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]])
    labels = row.clone()
    labels[:, 1:9] = -100  # 3 of the first document count, 6 of the second
    call = lambda m, ids: m(ids, document=document, labels=labels)  # noqa: E731
    module, without = decoder(), decoder()
    torch.nn.init.zeros_(without.blocks[1].o.weight)
    with pytest.warns(PaddingLeftOut):
        removal = workbench.measure(observed(module, row, call), "sublayer_removal", row)
    shown = removal[(removal["layer"] == 1) & (removal["part"] == "attention")]["value"].item()
    each = [F.cross_entropy(call(m, row)[0, :-1], labels[0, 1:], reduction="none").detach() for m in (without, module)]
    counted = (labels[0, 1:] >= 0) & (document[0, 1:] == document[0, :-1])
    assert shown == pytest.approx(float((each[0] - each[1])[counted].mean()), abs=1e-5)


def test_rows_that_cannot_be_averaged_are_refused_by_name():
    ids = padded(documents(), "left")
    model = observed(decoder(), ids, with_mask)
    empty = ids.clone()
    empty[1] = PAD
    with pytest.raises(BadData, match="row 1 is padding alone"):
        workbench.measure(model, "loss", empty)
    with pytest.raises(BadData, match=r"skip_ablation reads complete rows, and 33\.3 %"):
        workbench.measure(model, "skip_ablation", ids)
    with pytest.raises(WorkbenchError, match="sink_rate needs documents of 64 tokens; the longest of row 0 has 12"):
        workbench.measure(model, "sink_rate", torch.cat([torch.zeros(3, 60, dtype=torch.long), ids], 1))
    with pytest.raises(BadData, match="concentration_parts compares positions"):
        workbench.measure(model, "concentration_parts", ids)
    for edit in ("head:how=mean", "sink", "sink:position=-1,how=keep"):  # position 0 of a padded row is no first token
        with edited(model, edit):
            assert model(ids.clamp(min=PAD + 1)).isfinite().all()
            with pytest.raises(BadData, match=f"{edit} mixes or counts"):
                model(ids)


def test_matrices_and_maps_of_padded_rows_are_refused():
    from workbench.sklearn import as_matrix

    ids = padded(documents(), "right")
    with pytest.raises(BadData, match="14 of 42 tokens are padding, and would count as tokens"):
        as_matrix(observed(decoder(), ids, with_mask), "v", ids, layer=1)


def test_a_metric_that_no_document_is_long_enough_for_is_told_beside_others():
    ids = torch.cat([torch.zeros(3, 60, dtype=torch.long), padded(documents(), "left")], 1)
    with pytest.warns(NotMeasured, match="sink_rate needs documents of 64 tokens"), pytest.warns(PaddingLeftOut):
        frame = workbench.measure(observed(decoder(), ids, with_mask), ["sink_rate", "loss"], ids)
    assert frame["metric"].unique().tolist() == ["loss"]
