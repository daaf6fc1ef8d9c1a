"""Decoders of a user's own code as runs: a builder makes the module, the checkpoint fills it, the environment allows it."""

from __future__ import annotations

import json
import shutil
import sys

import dashboard
import pytest
import strangers
import torch
from app_pages import charts

import workbench
from workbench.environment import BUILDERS
from workbench.errors import ArchitectureAssumed, BadCheckpoint, NotCovered, WorkbenchError
from workbench.runs.checkpoint_import import import_run
from workbench.runs.run import Run
from workbench.views import Link, Source
from workbench.views.depth_weights import checkpoint_coefficients

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


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run of two steps of a module that mixes values by hidden numbers."""
    folder, module = tmp_path_factory.mktemp("imported"), strangers.large(strangers.GPT([(0.4, 0.6)] * 3))
    (folder / "own_code.py").write_text(CODE.format(own=0.6))
    for step in (3, 9):
        with torch.no_grad():
            module.lm_head.weight.mul_(step / 3)
        torch.save({"model": module.state_dict(), "iter_num": step}, folder / f"ckpt_{step}.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        run = import_run(str(folder / "ckpt_*.pt"), folder / "runs", name="mine", builder="own_code:build")
    sys.modules.pop("own_code", None)
    return run


@pytest.fixture
def mine(code, imported, module, tmp_path):
    """A copy of that run; `module` is its last step."""
    with torch.no_grad():
        module.lm_head.weight.mul_(3)
    return Run.open(shutil.copytree(imported.path, tmp_path / "runs" / "mine"))


@pytest.mark.slow
@torch.no_grad()
def test_a_run_of_own_code_computes_what_the_module_does_and_is_recognised(mine, module, monkeypatch):
    monkeypatch.setenv(BUILDERS, "another:one, own_code:build")
    model = mine.load("last")
    torch.testing.assert_close(model.everywhere(IDS), module(IDS)[0], atol=0, rtol=0)
    assert not torch.equal(mine.load("first").everywhere(IDS), module(IDS)[0])
    assert (mine.steps, mine.architecture, mine.info["observed"]["builder"]) == ([3, 9], "resformer", "own_code:build")
    assert mine.info["options"] == pytest.approx({"lambda_v1": 0.4, "lambda_own": 0.6}, abs=1e-6)
    torch.testing.assert_close(workbench.load(mine.step_folder(9)).everywhere(IDS), module(IDS)[0], atol=0, rtol=0)
    found = workbench.measure(mine, ["loss", "importance_entropy"], IDS, steps="all")
    assert set(found["step"]) == {3, 9}


def test_depth_weights_of_an_observed_module_are_those_that_are_fitted(mine, monkeypatch):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    drawing = checkpoint_coefficients(Source(mine.path.parent), Link("depth", {"weights": "1"}))
    assert "Fitted to the activations" in drawing.sentence
    values = drawing.table.set_index(["layer", "part"])["value"]
    assert values[1, "first"] == pytest.approx(0.4, abs=1e-5)
    assert values[2, "own"] == pytest.approx(0.6, abs=1e-5)


def test_a_name_in_a_file_runs_nothing(mine, code, tmp_path, monkeypatch):
    code("raise SystemExit('this code was run')")
    monkeypatch.delenv(BUILDERS, raising=False)
    with pytest.raises(NotCovered, match="WORKBENCH_BUILDERS=own_code:build"):
        mine.load()
    monkeypatch.setenv(BUILDERS, "own_code:built")
    with pytest.raises(NotCovered, match="code of its owner"):
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
    with pytest.raises(BadCheckpoint, match="does not fill the Embedding of own_code:build"):
        mine.load()


@pytest.mark.parametrize(
    ("text", "builder", "told"),
    [
        (CODE.format(own=0.6), "own_kode:build", r"own_kode cannot be imported from .* or as a package \(ModuleNotFoundError"),
        (CODE.format(own=0.6), "own_code:biuld", "no function 'biuld'; did you mean build?"),
        ("def build(settings):\n    return settings['n']", "own_code:build", r"own_code:build\({}\) raised KeyError: 'n'"),
        ("import torch\ndef build(settings):\n    return torch.nn.Embedding(61, 32)", "own_code:build",
         "does not fill the Embedding of own_code:build: missing weight; (.|\\n)*unexpected transformer"),
    ],
)  # fmt: skip
def test_builders_that_cannot_be_used_are_refused_with_the_cause(code, module, tmp_path, text, builder, told):
    code(text)
    torch.save({"model": module.state_dict()}, tmp_path / "ckpt.pt")
    with pytest.raises(WorkbenchError, match=told):
        import_run(tmp_path / "ckpt.pt", tmp_path / "runs", name="mine", builder=builder)
    assert not list((tmp_path / "runs").glob("*"))


OWN = "import strangers, torch\n"
"""The beginning of what the tests below write as a user's own code."""


def ended(*lines):
    return OWN + "def build(settings):\n" + "".join(f"    {line}\n" for line in lines)


def kept(tmp_path, module, name="ckpt.pt", **beside):
    torch.save({"model": module.state_dict(), **beside}, tmp_path / name)
    return import_run(tmp_path / name, tmp_path / "runs", name="mine", builder="own_code:build")


def test_two_tensors_of_a_file_never_become_one_of_the_module(code, tmp_path):
    """A head and an embedding that differ do not fill a module that ties them: one would be lost."""
    code(ended("m = strangers.GPT()", "m.lm_head.weight = m.transformer.wte.weight", "return m"))
    with pytest.raises(
        BadCheckpoint, match=r"tied to others in the module and different in the file: transformer.wte.weight"
    ):
        kept(tmp_path, strangers.large(strangers.GPT()))


@torch.no_grad()
def test_a_step_remembers_sums_of_logits_that_later_versions_work_out_alike(mine, module):
    """Another seed, position or scale would refuse every run that was imported before."""
    kept = json.loads((mine.step_folder(9) / "config.json").read_text())["workbench"]
    assert kept["example"] == {"vocabulary": 61, "length": 32}
    ids = torch.randint(61, (2, 96), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(61, 4, generator=torch.Generator().manual_seed(1)).double() / 61**0.5
    sums = module(ids)[0][:, [0, 48, 95]].double() @ weights
    assert kept["probe"] == pytest.approx(sums.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize("line", ["raise SystemExit('usage')"])
def test_code_that_ends_the_process_is_an_error(code, tmp_path, module, line):
    code(ended(line))
    with pytest.raises(WorkbenchError, match=r"own_code:build.* raised SystemExit"):
        kept(tmp_path, module)
    code(line)
    with pytest.raises(WorkbenchError, match=r"own_code cannot be imported from .*SystemExit"):
        kept(tmp_path, module)


def test_a_change_of_any_logit_is_noticed(mine, code, monkeypatch):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    changed = CODE.format(own=0.6).replace("return strangers.GPT(", "m = strangers.GPT(")
    code(changed + "    m.lm_head.register_forward_hook(lambda m, i, o: torch.cat([o[..., :40], 3 * o[..., 40:]], -1))\n    return m\n"
         .replace("torch.", "__import__('torch')."))  # fmt: skip
    with pytest.raises(BadCheckpoint, match="computes something else now"):
        mine.load()


@pytest.mark.parametrize("lacking", ["probe"])
def test_a_step_whose_description_is_damaged_says_so(mine, monkeypatch, lacking):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    path = mine.step_folder(9) / "config.json"
    description = json.loads(path.read_text())
    del description["workbench"][lacking]
    path.write_text(json.dumps(description))
    with pytest.raises(BadCheckpoint, match="no whole step of own_code:build: KeyError"):
        mine.load()


def test_a_buffer_that_the_file_lacks_is_told(code, tmp_path):
    code(ended("m = strangers.GPT()", "m.register_buffer('gain', torch.ones(3))", "return m"))
    with pytest.warns(ArchitectureAssumed, match="does not hold gain; what own_code:build makes of them is used"):
        kept(tmp_path, strangers.large(strangers.GPT()))


@pytest.mark.slow
@pytest.mark.parametrize(("page", "address", "figures"), dashboard.OF_OBSERVED[::4])
def test_pages_show_own_code_where_it_may_run_and_say_what_to_do_where_not(
    mine, browse, monkeypatch, page, address, figures
):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    at = browse(mine.path.parent, page, prompt="1 2 3 4 5 6 7 8", step="9", **address)
    assert len(charts(at)) == figures
    assert not [i.value for i in (*at.info, *at.warning, *at.error)]
    monkeypatch.delenv(BUILDERS)
    at = browse(mine.path.parent, page, prompt="1 2 3 4 5 6 7 8", step="3", **address)
    assert any("WORKBENCH" in i.value for i in at.info)
    assert not charts(at)


def test_the_self_check_asks_modules_that_give_the_last_logits_only_for_all_of_them(mine, monkeypatch):
    from workbench.prompts.self_check import check_model

    monkeypatch.setenv(BUILDERS, "own_code:build")
    found = check_model(mine.load(), IDS[:1]).set_index("check")["holds"]
    assert found["causality"]
    assert found["repeatability"]
    assert found["attention rows"]
