"""Decoders as code bases write them: tables of values anywhere, norms and W_O as functions, gates, two vocabularies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from observed import see
from torch import nn

import workbench
from workbench.errors import BadData
from workbench.models.decomposition import decompose
from workbench.prompts import token_path
from workbench.reports.xray import xray

D, HEADS, V, LAYERS = 32, 4, 61, 3
IDS = torch.randint(V, (5, 22), generator=torch.Generator().manual_seed(0))


def matrix(width=D, out=D):
    return nn.Linear(width, out, bias=False)


def norm(x):
    return F.rms_norm(x, (D,))


class Add(nn.Module):
    """A module that adds the residual, as OLMo-core's."""

    def forward(self, residual, x):
        return torch.add(residual, x, alpha=1.0)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = matrix(out=2 * D), matrix(2 * D)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Attention(nn.Module):
    """Values may take a table's, or the first layer's; a gate may stand before W_O, which may be a function."""

    def __init__(self, w_o="module", gate=""):
        super().__init__()
        self.q, self.k, self.v, self.o, self.g = (matrix() for _ in range(5))
        self.form, self.gate = w_o, gate

    def forward(self, x, memory, table=None):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if table is not None:
            v = 0.4 * v + 0.6 * table.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if memory is not None:
            first = memory.setdefault("v", v)
            v = v if first is v else 0.5 * first + 0.5 * v
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        g = 3 * self.g(x).unflatten(-1, (HEADS, -1))
        if self.gate:
            form = {"head": g[..., :1].sigmoid(), "element": g.sigmoid(), "silu": F.silu(g)}
            z = F.rms_norm(z, (D // HEADS,)) if self.gate == "norm" else z * form[self.gate]
        return self.written(z)

    def written(self, z):
        if self.form == "linear":
            return F.linear(z.flatten(2), self.o.weight)
        if self.form == "einsum":
            return torch.einsum("bqhd,mhd->bqm", z, self.o.weight.unflatten(1, (HEADS, -1)))
        if self.form == "heads first":
            return torch.einsum("mhd,bhqd->bqm", self.o.weight.unflatten(1, (HEADS, -1)), z.transpose(1, 2))
        return z.flatten(2) @ self.o.weight.T if self.form == "matmul" else self.o(z.flatten(2))


class Block(nn.Module):
    def __init__(self, form="", mixes=False, bare=False, **attention):
        super().__init__()
        self.attn, self.mlp, self.form, self.mixes = Attention(**attention), MLP(), form, mixes
        self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(D) if "module" in form else norm for _ in range(4))
        self.add = Add() if "adds" in form else torch.add
        self.bare = bare

    def forward(self, x, memory, table=None):
        a = self.attn(self.n1(x), memory if self.mixes else None, table)
        if "sandwich" in self.form:
            a = self.n3(a)
        if "parallel" in self.form:
            return x + a + self.mlp(self.n2(x))
        if "scaled" in self.form:
            a = 0.3 * a
        x = self.add(x, a)
        if self.bare:
            return x + F.linear(F.silu(F.linear(self.n2(x), self.mlp.up.weight)), self.mlp.down.weight)
        m = self.mlp(self.n2(x))
        m = self.n4(m) if "sandwich" in self.form else 0.3 * m if "scaled" in self.form else m
        return self.add(x, m)


class Decoder(nn.Module):
    def __init__(self, tables="", skip=(), vocabulary=V, **block):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.tables, self.skip = nn.Embedding(V, D), tables, skip
        self.blocks, self.head = nn.ModuleList(Block(**block) for _ in range(LAYERS)), matrix(out=vocabulary)
        if tables:
            self.wide, self.low, self.raw = (
                nn.Embedding(V, LAYERS * D),
                nn.Embedding(V, 8),
                nn.Parameter(torch.randn(LAYERS * V, D)),
            )
            self.turned, self.project = (
                nn.Parameter(torch.randn(LAYERS * D, V)),
                nn.ModuleList(matrix(8) for _ in range(LAYERS)),
            )
        self.eval()

    def looked_up(self, ids):
        if self.tables == "chunks":
            return self.wide(ids).chunk(LAYERS, -1)
        if self.tables == "parameter":
            return self.raw.view(LAYERS, V, D)[:, ids]
        if self.tables == "rows":
            return [self.raw[: n * V + V][n * V :][ids] for n in range(LAYERS)]
        if self.tables == "columns":
            return self.turned[:, ids].movedim(0, -1).chunk(LAYERS, -1)
        if self.tables == "low rank":
            return [project(self.low(ids)) for project in self.project]
        if self.tables == "low rank by function":
            return [F.linear(self.low(ids), project.weight) for project in self.project]
        return [None] * LAYERS

    def forward(self, ids):
        tables = self.looked_up(ids)  # before the embedding, as in modded-nanogpt
        x, memory = norm(self.embed(ids)), {}
        for i, (block, table) in enumerate(zip(self.blocks, tables, strict=True)):
            x = block(x, memory, None if i in self.skip else table)
        return self.head(norm(x))


FORMS = ("parameter", "rows", "columns", "low rank", "low rank by function")


@pytest.mark.fast(2)
@pytest.mark.parametrize(("tables", "skip"), [(form, ((), (0,))[number % 2]) for number, form in enumerate(FORMS)])
@torch.no_grad()
def test_tables_of_values_are_found_by_their_ids_wherever_they_are_looked_up(tables, skip):
    module = Decoder(tables, skip).double()
    observed = see(module, IDS)
    assert observed.architecture == "value_embedding"
    assert observed.sites.query("site == 'own_v'")["found"].all()
    paths = observed.value_paths().query("layer == 1").set_index("source")["coefficient"]
    (name,) = (str(s) for s in paths.index if str(s).startswith("table"))
    assert (paths[name], paths["own"]) == pytest.approx((0.6, 0.4), abs=1e-9)
    logits, cache = observed.run_with_cache(IDS, ["hook_embed", "blocks.1.attn.table.hook_v"])
    assert torch.equal(cache["hook_embed"], module.embed(IDS))
    torch.testing.assert_close(cache["blocks.1.attn.table.hook_v"].flatten(2), module.looked_up(IDS)[1])
    assert torch.equal(logits, module(IDS))
    parts = decompose(observed, IDS, "logits", "value_path").parts
    torch.testing.assert_close(parts.sum(0), logits, atol=1e-9, rtol=0)


@torch.no_grad()
def test_an_edit_of_the_embedding_changes_no_table():
    module, other = Decoder("chunks"), Decoder("chunks")
    other.embed.weight.mul_(-1)
    observed = see(module, IDS)
    with observed.hooks([("hook_embed", lambda x, hook: -x)]):
        torch.testing.assert_close(observed(IDS), other(IDS))


# ---- names of ordinary decoders -----------------------------------------------------------------------------------------


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("form", "mixes"),
    [("sandwich", False), ("parallel", True), ("module scaled adds", False)],
)  # fmt: skip
def test_decoders_keep_their_name_however_norms_and_sums_are_written(form, mixes):
    observed = see(Decoder(form=form, mixes=mixes), IDS)
    assert (observed.architecture, observed.notes) == ("resformer" if mixes else "transformer", [])


@pytest.mark.slow
@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("gate", "w_o", "architecture", "note"),
    [
        ("", "einsum", "transformer", ""),
        ("head", "linear", "transformer", "a share of pattern x values"),
        ("element", "heads first", "gated_attention", "times a positive one (a gate)"),
        ("norm", "matmul", "transformer", "a share of pattern x values"),
        ("silu", "module", "unknown", "something changes the heads' outputs"),
    ],
)
@torch.no_grad()
def test_a_gate_before_w_o_is_seen_and_z_is_what_w_o_reads(w_o, gate, architecture, note):
    module = Decoder(w_o=w_o, gate=gate).double()
    observed = see(module, IDS)
    assert observed.architecture == architecture
    assert note in observed.sites.query("site == 'z'")["note"].iloc[0]
    assert set(observed.value_paths()["into"]) == {"value"}, "what no path explains is none"
    logits, cache = observed.run_with_cache(IDS, ["blocks.1.attn.hook_z", "blocks.1.hook_attn_out"])
    z = cache["blocks.1.attn.hook_z"]
    torch.testing.assert_close(z.flatten(2) @ module.blocks[1].attn.o.weight.T, cache["blocks.1.hook_attn_out"])
    with observed.hooks([("blocks.1.attn.hook_z", lambda z, hook: 0 * z)]):
        changed = observed(IDS)
    with observed.hooks([("blocks.1.hook_attn_out", lambda x, hook: 0 * x)]):
        assert torch.equal(observed(IDS), changed)
    assert not torch.equal(changed, logits)
    torch.testing.assert_close(decompose(observed, IDS, "logits", "head").parts.sum(0), logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("gate", "w_o"), [("head", "linear"), ("element", "heads first")])
@torch.no_grad()
def test_the_path_of_a_token_has_the_gate_of_the_run(gate, w_o):
    module = Decoder(w_o=w_o, gate=gate).double()
    observed, ids, head, query = see(module, IDS), IDS[:1, :9], 2, 7
    _, cache = observed.run_with_cache(ids)
    attn, x = module.blocks[1].attn, norm(cache["blocks.1.hook_resid_pre"])
    gates = (3 * attn.g(x)).sigmoid().unflatten(-1, (HEADS, -1))[0, query, head]
    gates = gates[:1] if gate == "head" else gates
    last = cache["blocks.2.hook_resid_post"][0, query]
    logit_of = module.head.weight[5] / (last.square().mean() + torch.finfo(last.dtype).eps).sqrt()
    for key in (0, 3, 7):
        moved = cache["blocks.1.attn.hook_pattern"][0, head, query, key] * cache["blocks.1.attn.hook_v"][0, key, head]
        expected = (gates * moved) @ attn.o.weight.unflatten(1, (HEADS, -1))[:, head].T @ logit_of
        assert token_path(observed, ids, 1, head, query, key, 5).logits == pytest.approx(expected.item(), abs=1e-9)


@torch.no_grad()
def test_an_mlp_of_bare_products_is_found_and_replaced():
    module = Decoder(w_o="linear", bare=True)
    observed = see(module, IDS)
    assert (observed.architecture, observed.config.d_mlp) == ("transformer", 2 * D)
    with observed.hooks([("blocks.1.hook_mlp_out", lambda x, hook: 0 * x)]):
        changed = observed(IDS)
    module.blocks[1].mlp.down.weight.zero_()
    torch.testing.assert_close(changed, module(IDS))


# ---- the X-ray ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_xray_of_a_decoder_with_another_stream_names_its_value_path():
    class Scaled(Block):
        def forward(self, x, memory, table=None):
            return super().forward(0.9 * x + 0.2 * memory.setdefault("x", x), memory, table)

    module = Decoder(mixes=True)
    module.blocks = nn.ModuleList(Scaled(mixes=True) for _ in range(LAYERS))
    observed = see(module, IDS)
    assert observed.architecture == "unknown"
    said = xray(observed, IDS).answers[3].sentence
    assert said.startswith("It has a value path already (layers 1, 2: values of the first layer).")


def test_values_that_cannot_be_zeroed_decide_nothing():
    class Divided(Block):
        def forward(self, x, memory, table=None):
            a = self.attn(self.n1(x), None)
            return x + a / a.norm(dim=-1, keepdim=True)

    module = Decoder()
    module.blocks = nn.ModuleList(Divided() for _ in range(LAYERS))
    said = xray(see(module, IDS), IDS).answers[3].sentence
    assert said.startswith("Undecided: values cannot be zeroed here")
    assert "nan" not in said


# ---- two vocabularies -----------------------------------------------------------------------------------------------------


class Addition(nn.Module):
    """Twelve ids in, ten out; the embedding is W_E[:, ids] (Nanda et al. 2023, progress measures)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.W_E, self.head = nn.Parameter(torch.randn(D, 12)), matrix(out=10)
        self.blocks = nn.ModuleList(Block(w_o="einsum") for _ in range(2))
        self.eval()

    def forward(self, ids):
        x = torch.einsum("dbp->bpd", self.W_E[:, ids])
        for block in self.blocks:
            x = block(x, None)
        return self.head(x)


@torch.no_grad()
def test_ids_are_checked_against_the_embedding_and_next_tokens_against_the_logits():
    module, ids = Addition(), IDS % 12
    observed = see(module, ids)
    assert (observed.config.d_vocab, observed.structure.predicted) == (12, 10)
    assert len(workbench.measure(observed, ["importance_entropy"], ids))
    with pytest.raises(BadData, match="go up to 11 and logits to 9"):
        workbench.measure(observed, ["loss"], ids)
    with pytest.raises(BadData, match=r"12\.\.12 leave the vocabulary 0\.\.11"):
        observed(torch.full((2, 9), 12))
    assert "ids go up to 11, and the module gives 10 logits" in xray(observed, ids).answers[3].sentence


@torch.no_grad()
def test_an_indexed_parameter_is_read_and_replaced_as_the_embedding():
    module, ids = Addition(), IDS % 12
    observed = see(module, ids)
    _, cache = observed.run_with_cache(ids, "hook_embed")
    assert torch.equal(cache["hook_embed"], module.W_E[:, ids].movedim(0, -1))
    with observed.hooks([("hook_embed", lambda x, hook: 2 * x)]):
        changed = observed(ids)
    module.W_E.mul_(2)
    torch.testing.assert_close(changed, module(ids))
