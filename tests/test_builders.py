"""Decoders of a user's own code as runs: a builder makes the module, the checkpoint fills it, the environment allows it."""

from __future__ import annotations

import json
import sys

import dashboard
import pytest
import strangers
import torch
from app_pages import charts
from foreign import GPT as TIED

import workbench
from workbench.environment import BUILDERS
from workbench.errors import ArchitectureAssumed, BadCheckpoint, NotCovered, WorkbenchError
from workbench.runs.importing import import_run
from workbench.runs.run import Run

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
    torch.testing.assert_close(workbench.load(mine.step_folder(9)).everywhere(IDS), module(IDS)[0], atol=0, rtol=0)
    found = workbench.measure(mine, ["loss", "importance_entropy"], IDS, steps="all")
    assert set(found["step"]) == {3, 9}


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
        (CODE.format(own=0.6), "own_code", "write package.module:function"),
        (CODE.format(own=0.6), "own_kode:build", r"own_kode cannot be imported from .* or as a package \(ModuleNotFoundError"),
        (CODE.format(own=0.6), "own_code:biuld", "no function 'biuld'; did you mean build?"),
        ("def build(settings):\n    return {}", "own_code:build", "returned a dict; a torch.nn.Module is wanted"),
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


def test_a_bit_that_flipped_in_the_file_never_reaches_the_module(code, module, tmp_path):
    torch.save({"model": module.state_dict()}, tmp_path / "ckpt.pt")
    data = bytearray((tmp_path / "ckpt.pt").read_bytes())
    data[data.index(module.lm_head.weight.detach().numpy().tobytes()[:64]) + 40] ^= 1
    (tmp_path / "ckpt.pt").write_bytes(data)
    with pytest.raises(BadCheckpoint, match="Bad CRC-32"):
        import_run(tmp_path / "ckpt.pt", tmp_path / "runs", builder="own_code:build")


@torch.no_grad()
def test_a_step_remembers_sums_of_logits_that_later_versions_work_out_alike(mine, module):
    """Another seed, position or scale would refuse every run that was imported before."""
    kept = json.loads((mine.step_folder(9) / "config.json").read_text())["workbench"]
    assert kept["example"] == {"vocabulary": 61, "length": 32}
    ids = torch.randint(61, (2, 96), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(61, 4, generator=torch.Generator().manual_seed(1)).double() / 61**0.5
    sums = module(ids)[0][:, [0, 48, 95]].double() @ weights
    assert kept["probe"] == pytest.approx(sums.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize("line", ["import sys; sys.exit(0)", "raise SystemExit('usage')"])
def test_code_that_ends_the_process_is_an_error(code, tmp_path, module, line):
    code(ended(line))
    with pytest.raises(WorkbenchError, match=r"own_code:build.* raised SystemExit"):
        kept(tmp_path, module)
    code(line)
    with pytest.raises(WorkbenchError, match=r"own_code cannot be imported from .*SystemExit"):
        kept(tmp_path, module)


def test_a_name_of_the_workbench_is_no_builder(code, tmp_path, module):
    torch.save(module.state_dict(), tmp_path / "ckpt.pt")
    with pytest.raises(WorkbenchError, match="app is a name of the workbench's own"):
        import_run(tmp_path / "ckpt.pt", tmp_path / "runs", builder="app:build")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch.compile's own, at its first use
@torch.no_grad()
def test_a_compiled_module_is_taken_off_its_wrapper(code, tmp_path, monkeypatch):
    code(ended("return torch.compile(strangers.GPT())"))
    plain = strangers.large(strangers.GPT())
    run = kept(tmp_path, torch.nn.ModuleDict({"_orig_mod": plain}))
    monkeypatch.setenv(BUILDERS, "own_code:build")
    torch.testing.assert_close(run.load().everywhere(IDS), plain(IDS)[0], atol=0, rtol=0)


def test_how_many_tokens_it_reads_is_in_the_settings_where_the_module_does_not_say(code, tmp_path, monkeypatch):
    code(
        OWN + "class Places(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.zeros(96, 32))\n    def forward(self, at):\n        return self.weight[at]\n"
        "def build(settings):\n    m = strangers.GPT()\n    del m.block_size\n    m.transformer.wpe = Places()\n    return m"
    )
    module = strangers.large(strangers.GPT())
    assert kept(tmp_path, module, model_args={"block_size": 48}).model.n_ctx == 48
    unsaid = import_run(
        tmp_path / "ckpt.pt", tmp_path / "runs", name="said", builder="own_code:build", config={"n_ctx": 40}
    )
    assert unsaid.model.n_ctx == 48, "what stands first among the names counts"
    torch.save(module.state_dict(), tmp_path / "bare.pt")
    bare = import_run(tmp_path / "bare.pt", tmp_path / "runs", name="bare", builder="own_code:build")
    monkeypatch.setenv(BUILDERS, "own_code:build")
    with pytest.raises(WorkbenchError, match=r"GPT cannot read 97 tokens, and nothing says how many.*--config n_ctx=N"):
        bare.load()(torch.zeros(1, 97, dtype=torch.long))


def test_a_change_of_any_logit_is_noticed(mine, code, monkeypatch):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    changed = CODE.format(own=0.6).replace("return strangers.GPT(", "m = strangers.GPT(")
    code(changed + "    m.lm_head.register_forward_hook(lambda m, i, o: torch.cat([o[..., :40], 3 * o[..., 40:]], -1))\n    return m\n"
         .replace("torch.", "__import__('torch')."))  # fmt: skip
    with pytest.raises(BadCheckpoint, match="computes something else now"):
        mine.load()


@pytest.mark.parametrize("lacking", ["probe", "example", "origin"])
def test_a_step_whose_description_is_damaged_says_so(mine, monkeypatch, lacking):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    path = mine.step_folder(9) / "config.json"
    description = json.loads(path.read_text())
    del description["workbench"][lacking]
    path.write_text(json.dumps(description))
    with pytest.raises(BadCheckpoint, match="no whole step of own_code:build: KeyError"):
        mine.load()


@torch.no_grad()
def test_buffers_that_are_views_of_one_tensor_are_kept(code, tmp_path, monkeypatch):
    views = ["m = strangers.GPT()", "both = torch.arange(8.0).view(4, 2)",
             "m.register_buffer('cos', both[:, 0])", "m.register_buffer('sin', both[:, 1])", "return m"]  # fmt: skip
    code(ended(*views))
    module = strangers.large(strangers.GPT())
    module.register_buffer("cos", torch.ones(4))
    module.register_buffer("sin", torch.zeros(4))
    run = kept(tmp_path, module)
    monkeypatch.setenv(BUILDERS, "own_code:build")
    model = run.load()
    assert (model.foreign.cos.tolist(), model.foreign.sin.tolist()) == ([1.0] * 4, [0.0] * 4)
    assert model.source["sha256"].keys() == {"ckpt.pt"}
    assert run.load(dtype=torch.bfloat16).everywhere(IDS).dtype == torch.bfloat16


def test_a_buffer_that_the_file_lacks_is_told(code, tmp_path):
    code(ended("m = strangers.GPT()", "m.register_buffer('gain', torch.ones(3))", "return m"))
    with pytest.warns(ArchitectureAssumed, match="does not hold gain; what own_code:build makes of them is used"):
        kept(tmp_path, strangers.large(strangers.GPT()))


def test_what_is_read_off_values_is_read_off_the_last_step(code, tmp_path, monkeypatch):
    """Mixing that begins at zero looks like an ordinary transformer at step 0."""
    code(
        OWN + "class Mixed(strangers.GPT):\n    def __init__(self):\n        super().__init__([(0.0, 1.0)] * 3)\n"
        "        self.mix = torch.nn.Parameter(torch.zeros(1))\n    def forward(self, idx, targets=None):\n"
        "        for block in self.transformer.h:\n            block.attn.lambdas = (self.mix, 1 - self.mix)\n"
        "        return super().forward(idx, targets)\ndef build(settings):\n    return Mixed()"
    )
    import own_code

    module = strangers.large(own_code.build({}))
    for step, mix in ((0, 0.0), (9, 0.25)):
        with torch.no_grad():
            module.mix.fill_(mix)
        torch.save({"model": module.state_dict(), "iter_num": step}, tmp_path / f"ckpt_{step}.pt")
    run = import_run(str(tmp_path / "ckpt_*.pt"), tmp_path / "runs", name="mine", builder="own_code:build")
    assert (run.architecture, run.info["options"]) == ("resformer", {"lambda_v1": 0.25, "lambda_own": 0.75})


def test_a_folder_of_one_checkpoint_is_that_checkpoint(code, tmp_path, module):
    (tmp_path / "out").mkdir()
    torch.save({"model": module.state_dict(), "iter_num": 12}, tmp_path / "out" / "ckpt.pt")
    assert import_run(tmp_path / "out", tmp_path / "runs", builder="own_code:build").steps == [12]


def test_coefficients_of_own_code_are_not_offered(mine, browse, monkeypatch):
    monkeypatch.setenv(BUILDERS, "own_code:build")
    for show, key in (("effect", "w_kind"), ("sweep", "w_sweep")):
        at = browse(mine.path.parent, "intervene", prompt="1 2 3 4 5 6 7 8", show=show)
        assert not any("coefficient" in option for option in at.selectbox(key=key).options)


def test_a_module_of_short_texts_is_looked_at_on_what_it_reads(code, tmp_path, monkeypatch):
    code("import strangers\ndef build(settings):\n    strangers.CONTEXT = 16\n    return strangers.GPT()")
    monkeypatch.setattr(strangers, "CONTEXT", 16)
    short = strangers.large(strangers.GPT())
    torch.save(short.state_dict(), tmp_path / "short.pt")
    run = import_run(tmp_path / "short.pt", tmp_path / "runs", name="mine", builder="own_code:build")
    monkeypatch.setenv(BUILDERS, "own_code:build")
    assert (run.model.n_ctx, run.load().source["example"]) == (16, {"vocabulary": 61, "length": 16})


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


@pytest.mark.parametrize(("page", "address", "figures"), dashboard.OF_OBSERVED[::2])
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
