"""Decoders of somebody's own code as runs: a builder makes the module, the checkpoint fills it, the environment allows it."""

from __future__ import annotations

import json
import sys

import pytest
import strangers
import torch
from foreign import GPT as TIED

import workbench
from workbench.errors import BadCheckpoint, NotCovered, WorkbenchError
from workbench.importing import import_run
from workbench.runs import BUILDERS, Run

CODE = """
import strangers

def build(settings):
    return strangers.GPT([(0.4, {own})] * 3, last=True)
"""
IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def code(tmp_path, monkeypatch):
    """`code("text")`: a module `own_code` with that text, as in the folder a command is typed in."""

    def write(text):
        (tmp_path / "own_code.py").write_text(text)
        sys.modules.pop("own_code", None)

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two texts of one second and size are one to its cache
    write(CODE.format(own=0.6))
    yield write
    sys.modules.pop("own_code", None)


@pytest.fixture
def module():
    return strangers.large(strangers.GPT([(0.4, 0.6)] * 3))


@pytest.fixture
def mine(code, module, tmp_path):
    """A run of two steps of a module that mixes values by hidden numbers."""
    for step in (3, 9):
        with torch.no_grad():
            module.lm_head.weight.mul_(step / 3)
        torch.save({"model": module.state_dict(), "iter_num": step}, tmp_path / f"ckpt_{step}.pt")
    return import_run(str(tmp_path / "ckpt_*.pt"), tmp_path / "runs", name="mine", builder="own_code:build")


@torch.no_grad()
def test_a_run_of_own_code_computes_what_the_module_does_and_is_recognised(mine, module, monkeypatch):
    monkeypatch.setenv(BUILDERS, "another:one, own_code:build")
    model = mine.load("last")
    torch.testing.assert_close(model.everywhere(IDS), module(IDS)[0], atol=0, rtol=0)
    assert not torch.equal(mine.load("first").everywhere(IDS), module(IDS)[0])
    assert (mine.steps, mine.architecture, mine.info["observed"]["builder"]) == ([3, 9], "resformer", "own_code:build")
    assert mine.info["options"] == pytest.approx({"lambda_v1": 0.4, "lambda_own": 0.6}, abs=1e-6)
    found = workbench.measure(mine, ["loss", "importance_entropy"], IDS, steps="all")
    assert set(found["step"]) == {3, 9}


def test_a_name_in_a_file_runs_nothing(mine, code, tmp_path, monkeypatch):
    code("raise SystemExit('this code was run')")
    monkeypatch.delenv(BUILDERS, raising=False)
    with pytest.raises(NotCovered, match="WORKBENCH_BUILDERS=own_code:build"):
        mine.load()
    monkeypatch.setenv(BUILDERS, "own_code:built")
    with pytest.raises(NotCovered, match="code of somebody's own"):
        workbench.load(mine.path)
    assert "own_code" not in sys.modules


def test_code_that_computes_something_else_is_refused_and_an_edit_that_does_not_is_none(mine, code, monkeypatch):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    code("# a comment\n" + CODE.format(own=0.6))
    mine.load()
    code(CODE.format(own=0.5))
    with pytest.raises(BadCheckpoint, match=r"own_code:build computes something else now .* import it again"):
        mine.load()
    code("import torch\ndef build(settings):\n    return torch.nn.Embedding(61, 32)")
    with pytest.raises(BadCheckpoint, match="does not fill what own_code:build builds now"):
        mine.load()


@pytest.mark.parametrize(
    ("text", "builder", "told"),
    [
        (CODE.format(own=0.6), "own_code", "write package.module:function"),
        (CODE.format(own=0.6), "own_kode:build", "own_kode cannot be imported here"),
        (CODE.format(own=0.6), "own_code:biuld", "no function 'biuld'; did you mean build?"),
        ("def build(settings):\n    return {}", "own_code:build", "returned a dict; a torch.nn.Module is wanted"),
        ("def build(settings):\n    return settings['n']", "own_code:build", r"own_code:build\({}\) raised KeyError: 'n'"),
        ("import torch\ndef build(settings):\n    return torch.nn.Embedding(61, 32)", "own_code:build",
         "does not fill the Embedding of own_code:build: missing weight; .* unexpected transformer"),
    ],
)  # fmt: skip
def test_builders_that_cannot_be_used_are_refused_with_the_cause(code, module, tmp_path, text, builder, told):
    code(text)
    torch.save({"model": module.state_dict()}, tmp_path / "ckpt.pt")
    with pytest.raises(WorkbenchError, match=told):
        import_run(tmp_path / "ckpt.pt", tmp_path / "runs", name="mine", builder=builder)
    assert not list((tmp_path / "runs").glob("*"))


def test_settings_of_our_decoder_do_not_go_with_a_builder(code, tmp_path, module):
    torch.save({"model": module.state_dict()}, tmp_path / "ckpt.pt")
    with pytest.raises(WorkbenchError, match="a builder makes the module itself"):
        import_run(tmp_path / "ckpt.pt", tmp_path / "runs", builder="own_code:build", architecture="resformer")


@torch.no_grad()
def test_settings_reach_the_builder_and_tied_weights_stay_tied(code, tmp_path, monkeypatch):
    """The file says `bias`, the command completes it; names are prefixed by a wrapper, and the head is the embedding."""
    code(
        "from foreign import GPT\ndef build(settings):\n    assert settings['n'] == 3\n    return GPT(bias=settings['bias'])"
    )
    gpt = TIED(bias=False).eval()
    tensors = {f"_orig_mod.{name}": t for name, t in gpt.state_dict().items() if name != "lm_head.weight"}
    settings = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "vocab_size": 61, "bias": False}
    torch.save({"model": tensors, "model_args": settings, "iter_num": 7}, tmp_path / "ckpt.pt")
    run = import_run(tmp_path / "ckpt.pt", tmp_path / "runs", name="mine", builder="own_code:build", config={"n": 3})
    monkeypatch.setenv(BUILDERS, "own_code:build")
    model = run.load()
    torch.testing.assert_close(model(IDS), gpt(IDS), atol=0, rtol=0)
    assert model.foreign.lm_head.weight.data_ptr() == model.foreign.transformer["wte"].weight.data_ptr()
    kept = json.loads((run.path / "step_000007" / "config.json").read_text())
    assert kept["settings"] == settings | {"n": 3}


def test_a_prefix_that_is_the_modules_own_is_put_back(code, tmp_path, monkeypatch):
    code(
        "import strangers, torch\nclass Own(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.model = strangers.GPT()\n    def forward(self, ids):\n        return self.model(ids)\n"
        "def build(settings):\n    return Own()"
    )
    inner = strangers.large(strangers.GPT())
    torch.save({f"model.{name}": t for name, t in inner.state_dict().items()}, tmp_path / "own.pt")
    run = import_run(tmp_path / "own.pt", tmp_path / "runs", name="mine", builder="own_code:build")
    monkeypatch.setenv(BUILDERS, "own_code:build")
    with torch.no_grad():
        torch.testing.assert_close(run.load().everywhere(IDS), inner(IDS)[0], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("page", "address", "figures"),
    [
        ("attention", {}, 0),
        ("prompt", {"show": "next"}, 2),
        ("prompt", {"show": "layers"}, 1),
        ("prompt", {"show": "carries"}, 2),
        ("intervene", {"edits": "values:layer=1,how=zero"}, 3),
    ],
)
def test_pages_show_own_code_where_it_may_run_and_say_what_to_do_where_not(
    mine, browse, monkeypatch, page, address, figures
):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    at = browse(mine.path.parent, page, prompt="1 2 3 4 5 6 7 8", step="9", **address)
    assert len(at.get("plotly_chart")) == figures
    assert not [i.value for i in (*at.info, *at.warning, *at.error)]
    monkeypatch.delenv(BUILDERS)
    at = browse(mine.path.parent, page, prompt="1 2 3 4 5 6 7 8", step="3", **address)
    assert any("WORKBENCH" in i.value for i in at.info)
    assert not at.get("plotly_chart")


def test_the_self_check_asks_modules_that_give_the_last_logits_only_for_all_of_them(mine, monkeypatch):
    from workbench.looks.checking import check

    monkeypatch.setenv(BUILDERS, "own_code:build")
    found = check(mine.load(), IDS[:1]).set_index("check")["holds"]
    assert found["causality"]
    assert found["repeatability"]
    assert found["attention rows"]


def test_the_command_under_a_figure_names_the_builder_too(mine, browse, monkeypatch):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    at = browse(mine.path.parent, "prompt", prompt="1 2 3 4 5 6 7 8", drawer="1")
    at.session_state["drawer"] = True
    at.run()
    assert any(c.value.startswith("WORKBENCH_BUILDERS=own_code:build workbench view ") for c in at.code)


def test_a_step_that_is_damaged_says_so(mine, monkeypatch):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    weights = mine.step_folder(9) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BadCheckpoint, match="step_000009"):
        Run.open(mine.path).load()
