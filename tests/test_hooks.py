"""Hooks: free when absent, exact when present, gone afterwards; edits; threads."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from hooked import WIDE, listening, tokens

from workbench.errors import UnknownName
from workbench.models.hook_points import HookPoint

# ---- absent hooks ----------------------------------------------------------------------------------------------------


def test_without_hooks_no_hook_point_is_called(some_architecture, tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(HookPoint, "__call__", lambda self, x: calls.append(self.name) or x)
    model = tiny(some_architecture)
    model(tokens(9), return_type="loss").backward()
    assert calls == []
    with model.hooks([("blocks.1.attn.hook_v", lambda v, hook: None)]):
        model(tokens(9))
    assert calls == ["blocks.1.attn.hook_v"]


def test_hooks_are_gone_after_a_run_and_after_an_error(tiny):
    model = tiny("resformer")

    def fail(x, hook):
        raise RuntimeError("mid-run")

    edits = [("blocks.0.hook_resid_mid", lambda x, hook: None), ("blocks.1.attn.hook_z", fail)]
    with pytest.raises(RuntimeError, match="mid-run"):
        model.run_with_hooks(tokens(4), fwd_hooks=edits)
    assert listening(model) == []
    with pytest.raises(UnknownName, match=r"did you mean blocks\.0\.hook_resid_mid"):
        model.run_with_hooks(tokens(4), fwd_hooks=[("hook_embed", fail), ("blocks.0.hook_resid_mi", fail)])
    assert listening(model) == []
    with pytest.raises(RuntimeError, match="loss"):
        model.run_with_grads(tokens(4), "hook_embed", fail_loss)
    assert listening(model) == []
    model.run_with_cache(tokens(4))
    model.run_with_grads(tokens(4), None)
    assert listening(model) == []
    taken = []
    thread = threading.Thread(target=lambda: taken.append(model.lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert taken == [True]


def fail_loss(logits, ids):
    raise RuntimeError("loss")


def test_a_hook_put_on_a_point_itself_is_heard_until_it_is_removed(some_architecture, tiny):
    model = tiny(some_architecture)
    plain = model(tokens(5))
    assert not model.hook_state.enabled
    for name in ("hook_embed", "blocks.1.ln2.hook_normalized", "blocks.2.attn.hook_pattern", "unembed.hook_in"):
        heard = []
        model.hook_dict[name].add_hook(lambda x, hook, heard=heard: heard.append(hook.name))
        torch.testing.assert_close(model(tokens(5)), plain, atol=1e-4, rtol=1e-4)
        assert heard == [name]
        model.reset_hooks()
        assert torch.equal(model(tokens(5)), plain)
        assert heard == [name]
        assert not model.hook_state.enabled
    slopes = []
    model.hook_dict["blocks.0.hook_resid_mid"].add_hook(lambda grad, hook: slopes.append(grad), dir="bwd")
    model(tokens(5), return_type="loss").backward()
    assert slopes[0].abs().max() > 0


# ---- edits -----------------------------------------------------------------------------------------------------------


def test_an_edit_where_a_tensor_is_read_stays_with_its_reader(tiny, some_architecture):
    """Whatever a layer borrows or mixes: earlier layers and the other readers keep what they had, its own output moves."""
    model = tiny(some_architecture, dtype=WIDE)
    ids, points = tokens(5), ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k")
    layers = [
        [n for n in model.hook_dict if n.startswith(f"blocks.{i}.attn.") and n.endswith(points)] for i in range(3)
    ]
    _, before = model.run_with_cache(ids)
    for layer in (1, 2):
        for name in layers[layer]:
            if name.count(".") == 3:
                continue  # the layer's own points; branches have a part of their own
            with model.hooks([(name, lambda x, hook: x * torch.linspace(0.5, 2, 5, dtype=WIDE)[:, None, None])]):
                _, after = model.run_with_cache(ids)
            assert all(torch.equal(before[other], after[other]) for i in range(layer) for other in layers[i]), name
            borrowed = [other for other in layers[layer] if other.count(".") > 3 and other != name]
            assert all(torch.equal(before[other], after[other]) for other in borrowed), name
            assert not torch.allclose(before["z", layer], after["z", layer]), name


def test_own_and_mix_edits_by_hand(tiny):
    """Zero own values and coefficients (3, 1): the effective value is three times the first layer's."""
    model = tiny("resformer")
    edits = [
        ("blocks.1.attn.own.hook_v", lambda v, hook: v * 0),
        ("blocks.1.attn.hook_v_mix", lambda mix, hook: torch.tensor([3.0, 1.0])),
    ]
    with model.hooks(edits):
        _, cache = model.run_with_cache(tokens(5))
    torch.testing.assert_close(cache["v", 1], 3 * cache["v", 0])


# ---- threads ---------------------------------------------------------------------------------------------------------


def wrong_caches(model, rounds=12):
    """Two threads cache one model at once; how many of their caches are not what one thread alone gets."""
    inputs = [tokens(16, seed=1), tokens(16, seed=2)]
    names = ["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"]
    true = [model.run_with_cache(ids, names_filter=names)[1] for ids in inputs]
    wrong, start = [], threading.Barrier(2)

    def work(mine):
        start.wait()
        for _ in range(rounds):
            try:
                cache = model.run_with_cache(inputs[mine], names_filter=names)[1]
                wrong.append(any(not torch.equal(cache[name], true[mine][name]) for name in names))
            except Exception:
                wrong.append(True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 2 * rounds
    return sum(wrong)


def test_one_lock_keeps_two_threads_apart(tiny, monkeypatch):
    model = tiny()
    real = model.logits

    def slow(ids):  # hooks are state of the module: whoever runs while another's stand is caught in them
        time.sleep(2e-3)
        return real(ids)

    monkeypatch.setattr(model, "logits", slow)
    assert wrong_caches(model) == 0
    monkeypatch.setattr(model, "lock", nullcontext())
    assert wrong_caches(model) > 0
