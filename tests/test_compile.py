"""Compiled models: whole graphs, the same numbers, and hooks heard whenever they come."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys

import pytest
import torch
from seams import TOGETHER

from workbench.errors import BadData
from workbench.models.hooked import next_token_loss

POINT = "blocks.1.attn.hook_v"
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile's own backend builds C++, and there is neither g++ nor clang++",
)
broken_graphs = pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch looks at .grad of what crosses a break


@pytest.fixture(autouse=True)
def fresh():
    """No graphs of other tests, nor counts of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ids():
    return torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def breaks():
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def erase(value, hook):
    return torch.zeros_like(value)


def erased(model, ids):
    with model.hooks([(POINT, erase)]):
        return model(ids)


def count_calls(call, model, ids):
    """Shapes that a hook saw in two passes under it and one after it."""
    seen = []
    with model.hooks([(POINT, lambda value, hook: seen.append(value.shape))]):
        call(ids)
        call(ids)
    call(ids)
    return seen


def check_hooks(call, model, ids):
    """Edits, reads, permanent hooks and their removal through `call`, twice over."""
    plain, without_values = model(ids), erased(model, ids)
    assert (plain - without_values).abs().max() > 1e-2
    torch.testing.assert_close(call(ids), plain)
    for _ in range(2):
        with model.hooks([(POINT, erase)]):
            torch.testing.assert_close(call(ids), without_values)
        torch.testing.assert_close(call(ids), plain)
        seen = count_calls(call, model, ids)
        assert seen == [(2, 16, 4, 8)] * 2
        model.add_hook(POINT, erase)
        torch.testing.assert_close(call(ids), without_values)
        model.reset_hooks()
        torch.testing.assert_close(call(ids), plain)


# ---- every architecture ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.slow) for name in (TOGETHER[0], *TOGETHER[1::3])]
)
def test_is_one_graph_that_hears_hooks_added_later(tiny, ids, architecture):
    model = tiny(architecture, config={"n_layers": 2})
    plain, without_values = model(ids), erased(model, ids)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), plain, atol=1e-5, rtol=1e-5)
    assert (graphs(), breaks()) == (1, 0)
    model.add_hook(POINT, erase)
    torch.testing.assert_close(compiled(ids), without_values, atol=1e-5, rtol=1e-5)
    model.reset_hooks()
    for _ in range(2):  # the first looks whether hooks are left, the second is the graph's again
        torch.testing.assert_close(compiled(ids), plain, atol=1e-5, rtol=1e-5)
    assert graphs() <= 2  # the second checks ids
    assert breaks() == 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["resformer", "cross_layer"])
def test_other_lengths_break_no_graph(tiny, architecture):
    model = tiny(architecture, config={"n_layers": 2, "n_ctx": 150})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (16, 33, 150):
        tokens = torch.randint(61, (2, length), generator=torch.Generator().manual_seed(length))
        torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-4, rtol=1e-4)
    assert breaks() == 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["resformer_learnable+denseformer", "cross_layer"])
def test_a_compiled_training_step_equals_the_uncompiled_one(tiny, ids, architecture):
    model = tiny(architecture)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for subject, run in ((model, model), (twin, compiled)):
        optimiser = torch.optim.SGD(subject.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            next_token_loss(run(ids), ids).backward()
            optimiser.step()
    for (name, true), found in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-5, msg=name)
        assert true.grad is None or (found.grad - true.grad).abs().max() < 1e-5 * max(1, true.grad.abs().max())


# ---- hooks, however the model was compiled ---------------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hooks_are_heard_without_a_graph_for_each(tiny, ids, fullgraph):
    model = tiny("resformer")
    check_hooks(torch.compile(model, backend="eager", fullgraph=fullgraph), model, ids)
    assert graphs() <= 2  # the second checks ids
    assert breaks() == 0


@broken_graphs
@pytest.mark.slow
@pytest.mark.parametrize("method", ["forward", "logits"])
def test_hooks_are_heard_by_a_compiled_method(tiny, ids, method):
    model = tiny("neutreno")
    check_hooks(torch.compile(getattr(model, method), backend="eager"), model, ids)


@broken_graphs
@pytest.mark.slow
def test_hooks_are_heard_by_blocks_compiled_alone(tiny, ids):
    model = tiny("denseformer")
    for block in model.blocks:
        block.compile(backend="eager")
    check_hooks(model, model, ids)


@pytest.mark.slow
@broken_graphs
def test_a_part_compiled_as_one_graph_refuses_hooks(tiny, ids):
    model = tiny("resformer")
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    model(ids)
    with (
        model.hooks([(POINT, erase)]),
        pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"raised exception WorkbenchError\('compiled graphs contain no hooks"
        ),
    ):
        model(ids)


@pytest.mark.slow
def test_backward_hooks_are_heard(tiny, ids):
    model, seen = tiny("resformer"), []
    compiled = torch.compile(model, backend="aot_eager")
    next_token_loss(compiled(ids), ids).backward()
    with model.hooks(bwd_hooks=[(POINT, lambda grad, hook: seen.append(grad.shape))]):
        next_token_loss(compiled(ids), ids).backward()
    assert seen == [(2, 16, 4, 8)]


@pytest.mark.slow
def test_caches_and_gradients_of_activations_are_those_of_the_model(tiny, ids):
    model = tiny("cross_layer")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(ids)
    (out, cache), (true_out, true_cache) = compiled.run_with_cache(ids), model.run_with_cache(ids)
    torch.testing.assert_close(out, true_out)
    assert cache.keys() == true_cache.keys()
    for name, value in true_cache.items():
        torch.testing.assert_close(cache[name], value)
    for found, true in zip(compiled.run_with_grads(ids, [POINT]), model.run_with_grads(ids, [POINT]), strict=True):
        torch.testing.assert_close(found, true)
    with compiled.hooks([(POINT, erase)]) as hooked:
        torch.testing.assert_close(compiled(ids), hooked(ids))


def test_a_copy_of_a_compiled_model_with_hooks_goes_its_own_way(tiny, ids):
    model = tiny("resformer")
    plain, without_values = model(ids), erased(model, ids)
    torch.compile(model, backend="eager")(ids)
    model.add_hook(POINT, erase)
    twin = copy.deepcopy(model)
    model.reset_hooks()
    torch.testing.assert_close(model(ids), plain)
    torch.testing.assert_close(twin(ids), without_values)
    torch.testing.assert_close(torch.compile(twin, backend="eager", fullgraph=True)(ids), without_values)


# ---- caches, losses, imports -----------------------------------------------------------------------------------------


def check_decoding(compiled, model, sizes, **options):
    """A prompt and what continues it, token by token and in chunks: logits, and what the cache holds, as uncompiled."""
    ids = torch.randint(61, (2, sum(sizes)), generator=torch.Generator().manual_seed(4))
    found, true = model.new_cache(2, **options), model.new_cache(2, **options)
    for new in ids.split(sizes, 1):
        torch.testing.assert_close(
            compiled(new, past_kv_cache=found), model(new, past_kv_cache=true), atol=1e-5, rtol=1e-5
        )
        assert (found.length, found.nbytes(), found.traffic()) == (true.length, true.nbytes(), true.traffic())
    assert found.entries.keys() == true.entries.keys()
    assert breaks() == 0


PASSING_BY = ("resformer_dense", "resformer", "neutreno+value_embedding", "neutreno+attention_residuals")
"""What they do beside a plain decoder, a cache hears nothing of: it is compiled above."""


@pytest.mark.slow
def test_cached_decoding_is_one_graph_for_many_steps(tiny):
    model = tiny("svformer", config={"n_layers": 2})
    check_decoding(torch.compile(model, backend="eager", fullgraph=True), model, [9, *[1] * 8])
    assert graphs() <= 3  # of the prompt, of the first step, and of any length


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in TOGETHER if name not in PASSING_BY][::2])
def test_cached_decoding_breaks_no_graph(tiny, architecture):
    model = tiny(architecture, config={"n_layers": 2})
    check_decoding(torch.compile(model, backend="eager", fullgraph=True), model, [9, 1], reserve=10)


@pytest.mark.slow
def test_compiled_decoding_hears_hooks_between_its_steps(tiny, ids):
    model = tiny("svformer", config={"n_layers": 2})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, true = model.new_cache(2), model.new_cache(2)
    for hooks, new in zip(([], [(POINT, erase)], []), ids.split([12, 2, 2], 1), strict=True):
        plain = model(new, past_kv_cache=true.clone())
        with model.hooks(hooks):
            expected = model(new, past_kv_cache=true)
            torch.testing.assert_close(compiled(new, past_kv_cache=found), expected)
        assert bool(hooks) == ((expected - plain).abs().max() > 1e-3)
    assert compiled.generate(ids[0], 4, temperature=0).tolist() == model.generate(ids[0], 4, temperature=0).tolist()


@pytest.mark.slow
def test_compiled_decoding_refuses_what_cannot_continue_a_cache(tiny, ids):
    """In a whole graph PyTorch's own error quotes ours, and its source line too, which is not to pass for it."""
    model = tiny("transformer")
    wrong = {"the cache holds 3 sequences, these are 2": 3, "this cache belongs to another model": 2}
    for said, batch in wrong.items():
        torch._dynamo.reset()
        cache = (model if batch == 3 else tiny("transformer")).new_cache(batch)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"raised exception BadData\('{said}"):
            torch.compile(model, backend="eager", fullgraph=True)(ids, past_kv_cache=cache)
        with pytest.raises(BadData, match=said):
            torch.compile(model, backend="eager")(ids, past_kv_cache=cache)


@pytest.mark.slow
def test_the_loss_is_part_of_the_graph(tiny, ids):
    model = tiny("gqa")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, "loss"), model(ids, "loss"))
    assert (graphs(), breaks()) == (1, 0)


@pytest.mark.slow
def test_hooks_of_before_the_compiler_is_imported_are_heard_or_refused_by_name():
    """Models import no compiler. A whole graph has no place for hooks, and this one has learned too late to step out of it."""
    code = f"""
import os, sys, torch, workbench
model = workbench.build("resformer", {{"n_layers": 2, "d_model": 16, "n_heads": 2, "d_mlp": 16, "d_vocab": 9, "n_ctx": 8}})
ids = torch.tensor([[1, 2, 3]])
model.run_with_cache(ids)
whole = os.fork() == 0  # imports once, compiles apart
with model.hooks([("{POINT}", lambda value, hook: torch.zeros_like(value))]):
    without_values = model(ids)
    assert "torch._dynamo" not in sys.modules
    try:
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=whole)(ids), without_values)
        assert not whole
    except torch._dynamo.exc.Unsupported as error:
        assert whole and "compile the model itself, torch.compile(model); if nothing" in str(error)
assert torch._dynamo.config.skip_nnmodule_hook_guards and torch.compiler.get_default_backend() == "inductor"
assert whole or os.wait()[1] == 0
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


# ---- PyTorch's own backend -------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_machine_code_decodes_as_the_model_does(tiny):
    model = tiny("svformer", config={"n_layers": 2})
    check_decoding(torch.compile(model, fullgraph=True), model, [9, 1], reserve=10)


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's backend uses what PyTorch deprecates
def test_machine_code_is_equal_in_both_directions_and_hears_hooks(tiny):
    model = tiny("cross_layer", std=0.02, config={"n_layers": 2, "d_model": 128, "d_mlp": 352, "d_vocab": 512})
    ids = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(5))
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids), atol=1e-5, rtol=1e-4)
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        next_token_loss(run(ids), ids).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for true, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-4)
    with model.hooks([(POINT, erase)]):
        torch.testing.assert_close(compiled(ids), model(ids))
    assert breaks() == 0
