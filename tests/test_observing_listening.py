"""Runs with hooks: edits in place, interrupts, threads, gradient checkpoints, and calls of the module itself meanwhile."""

import contextlib
import inspect
import os
import signal
import sys
import threading

import pytest
import torch
from observed import STRANGERS, see
from strangers import GPT, large
from torch._dynamo import eval_frame
from torch.utils.checkpoint import checkpoint

from workbench import Recorder
from workbench.errors import HooksNotCalled, WorkbenchError

POINTS = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.own.hook_v",
          "attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")  # fmt: skip


@pytest.fixture
def ids():
    return torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(1))


def half(x, hook=None):
    """Half of one head, or of one position, in place."""
    (x[:, :, 1] if x.ndim == 4 and x.shape[-1] != x.shape[-2] else x[:, 1]).mul_(0.5)
    return x


def silently(x, hook):
    half(x)


def past_autograd(x, hook):
    half(x.data)


def on_a_copy(x, hook):
    return half(x.clone())


def logits_with(observed, ids, *hooks):
    with observed.hooks(list(hooks)):
        return observed(ids)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("in place", torch.enable_grad),
        ("repeated heads", torch.inference_mode),
        ("torch.softmax", torch.inference_mode),
    ],
)
def test_what_hooks_edit_in_place_arrives_as_an_edited_copy_does(name, mode, ids):
    observed = see(large(STRANGERS[name]()), ids)
    with mode():
        plain = observed(ids)
        points = [f"blocks.1.{p}" for p in POINTS if f"blocks.1.{p}" in observed.hook_dict]
        assert len(points) > 6
        for point in points:
            expected = logits_with(observed, ids, (point, on_a_copy))
            assert not torch.equal(expected, plain), point
            for edit in (half, silently, past_autograd):
                assert torch.equal(logits_with(observed, ids, (point, edit)), expected), (point, edit.__name__)
            assert torch.equal(logits_with(observed, ids, (point, lambda x, hook: None)), plain), point
        assert torch.equal(observed(ids), plain), "no edit reaches a later run"


# ---- interrupts ------------------------------------------------------------------------------------------------------


def leftovers(observed):
    """What a run has left behind in PyTorch, in the module and in the observed model."""
    module, points, free = observed.foreign, observed.hook_points(), []

    def take():
        if observed.lock.acquire(blocking=False):
            observed.lock.release()
            free.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    found = {
        "mode": torch.overrides._len_torch_function_stack(),
        "gradients": not torch.is_grad_enabled(),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()),
        "hook points": sum(len(p._forward_hooks) + len(p.fwd_hooks) for p in points),
        "forward": sum("forward" in vars(m) for m in module.modules()),
        "fast path": not torch.backends.mha.get_fastpath_enabled(),
        "stance": eval_frame._stance.stance != "default",
        "autocast": torch.autocast_increment_nesting() - 1,
        "flags": observed.all_positions or observed.context_level,
        "lock": not free,
    }
    torch.autocast_decrement_nesting()
    return {name: value for name, value in found.items() if value}


def halved(observed, ids):
    names = ["blocks.0.attn.hook_row_entropy", "blocks.1.attn.hook_v"]
    with observed.hooks([("blocks.1.attn.hook_pattern", half)]):
        observed.run_with_cache(ids, names, return_type="loss")


@pytest.mark.slow
def test_an_interrupt_at_any_function_call_leaves_nothing(ids):
    """A trace function raises at one call of the run after the other: an interrupt arrives at no other place in Python code."""
    observed = see(large(STRANGERS["F.softmax"]()), ids)
    halved(observed, ids)

    def interrupted(at):
        """Whether the run has a call number `at`, and was interrupted there."""
        calls = 0

        def trace(frame, event, arg):
            nonlocal calls
            unraisable = frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_name in ("__del__", "remove")
            calls += not unraisable  # in what the garbage collector calls, an exception goes nowhere
            if calls == at and not unraisable:
                raise KeyboardInterrupt

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            halved(observed, ids)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return calls >= at

    at, kills = 1, 0
    while interrupted(at):
        kills += 1
        assert not (left := leftovers(observed)), (at, left)
        at += 97
    assert kills > 10


@pytest.mark.slow
def test_real_interrupts_leave_nothing(ids):

    observed, before = see(large(STRANGERS["F.softmax"]()), ids), signal.getsignal(signal.SIGINT)

    def until_interrupted(delay):
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            halved(observed, ids)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for n in range(12):
            with contextlib.suppress(KeyboardInterrupt):
                until_interrupted(0.005 + n / 400)
            assert not (left := leftovers(observed)), left
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_at(number, event, is_there, run):
    """The KeyboardInterrupt that is raised at the event of the `number`-th frame that `is_there`; None if there are fewer."""
    left = number

    def local(frame, happened, arg):
        nonlocal left
        left -= happened == event
        if happened == event and left == 0:
            raise KeyboardInterrupt
        return local

    before = sys.gettrace()
    try:
        sys.settrace(lambda frame, _, arg: local(frame, "call", arg) if is_there(frame) else None)
        run()
    except KeyboardInterrupt as stopped:
        return stopped
    finally:
        sys.settrace(before)


def test_an_interrupt_while_a_module_is_observed_leaves_no_hook(ids):
    """It arrives when a hook is on the module, and before anybody has its handle."""
    module = large(GPT())
    observed = see(module, ids)
    registers = lambda frame: frame.f_code.co_name.startswith("register_forward")  # noqa: E731
    assert interrupted_at(2, "return", registers, lambda: see(module, ids))
    assert not leftovers(observed)


def test_an_interrupt_in_a_run_with_gradients_changes_no_mode_of_the_thread_now_or_later(ids):
    """What an interrupted `inference_mode` restores when it is freed may be long out of date."""
    observed, number, stopped = see(large(GPT()), ids), 0, True
    exits = lambda frame: frame.f_code.co_name == "__exit__" and "grad_mode" in frame.f_code.co_filename  # noqa: E731
    try:
        while stopped:
            number += 1
            torch.set_grad_enabled(False)
            stopped = interrupted_at(
                number, "call", exits, lambda: observed.run_with_grads(ids, "blocks.1.attn.hook_v")
            )
            assert not torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            stopped = stopped is not None  # its frames are freed
            assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert number > 1


def test_a_recorder_over_an_observed_module_leaves_nothing_after_an_interrupt(ids, tmp_path):
    module = large(GPT())
    observed = see(module, ids)

    def interrupt(*_):
        raise KeyboardInterrupt

    with Recorder(observed, 1, tmp_path / "r", quantities=["row_entropy", "gradient_norm"]):
        handle = module.transformer.h[1].attn.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            module(ids)
        handle.remove()
        assert torch.overrides._len_torch_function_stack() == 0
        with pytest.raises(ZeroDivisionError):  # errors of hooks are not the recorder's to take
            logits_with(observed, ids, ("blocks.1.attn.hook_v", lambda x, hook: 1 / 0))

    assert not leftovers(observed)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_in_several_threads_and_plain_calls_of_the_same_module_meanwhile_are_their_own(ids):
    models = [see(large(STRANGERS[name]()), ids) for name in ("fused", "F.softmax")]
    plain = [observed.foreign(ids)[0].detach() for observed in models]
    halves = [logits_with(o, ids, ("blocks.1.attn.hook_v", half)).detach() for o in models]
    wrong = []

    def compare(run, expected):
        for _ in range(30):
            try:
                wrong.extend([] if torch.equal(run(), expected) else ["another output"])
            except Exception as error:  # in a thread it would be lost
                wrong.append(repr(error))

    threads = []
    for observed, same, other in zip(models, plain, halves, strict=True):
        run = lambda o=observed: logits_with(o, ids, ("blocks.1.attn.hook_v", half))  # noqa: E731
        threads.append(threading.Thread(target=compare, args=(run, other)))
        threads.append(threading.Thread(target=compare, args=(lambda o=observed: o.foreign(ids)[0], same)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any(map(leftovers, models))


def test_process_wide_switches_are_restored_by_the_last_run_that_needs_them(ids):

    models = [see(large(GPT()), ids) for _ in range(2)]
    first_runs, second_runs, first_ended = threading.Event(), threading.Event(), threading.Event()

    def wait(mine, other):
        return lambda x, hook: (mine.set(), other.wait(20), None)[2]

    def first():
        logits_with(models[0], ids, ("blocks.0.attn.hook_v", wait(first_runs, second_runs)))
        first_ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_runs.wait(20)
    logits_with(models[1], ids, ("blocks.0.attn.hook_v", wait(second_runs, first_ended)))
    thread.join()
    assert first_ended.is_set()
    assert not any(map(leftovers, models))


# ---- gradient checkpoints --------------------------------------------------------------------------------------------


class Checkpointed(GPT):
    """Blocks, or attentions alone, are computed again in the backward pass."""

    part, options = "block", None

    def forward(self, idx, targets=None):
        saved = []
        for block in self.transformer.h if self.options else ():
            module = block if self.part == "block" else block.attn
            saved.append(module)
            module.forward = _again(module.forward, self.options)
        try:
            return super().forward(idx, targets)
        finally:
            for module in saved:
                del module.forward


def _again(forward, options):
    return lambda *args: checkpoint(forward, *args, **options)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("point", "part", "reentrant"),
    [
        ("attn.hook_v", "block", False), ("attn.own.hook_v", "block", True), ("attn.hook_pattern", "attention", True),
        ("hook_attn_out", "attention", False),
    ],
)  # fmt: skip
def test_a_checkpoint_computes_again_what_the_hooks_changed(part, reentrant, point, ids):
    gradients = []
    for options in (None, {"use_reentrant": reentrant}):
        module = large(Checkpointed())
        observed = see(module, ids)
        module.part, module.options = part, options  # `forward` is wrapped after observing, as when training begins
        loss = logits_with(observed, ids, (f"blocks.1.{point}", half)).square().mean()
        loss.backward()  # the hooks are gone by now
        gradients.append([p.grad for p in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)


def test_gradients_of_activations_under_a_checkpoint_are_exact_or_refused(ids):
    module = large(Checkpointed())
    observed, names = see(module, ids), ["blocks.1.attn.hook_v", "blocks.1.attn.hook_pattern"]
    _, _, expected = observed.run_with_grads(ids, names)
    module.options = {"use_reentrant": False}
    _, _, gradients = observed.run_with_grads(ids, names)
    for name in names:
        torch.testing.assert_close(gradients[name], expected[name], atol=1e-8, rtol=1e-5)
    module.options = {"use_reentrant": True}
    with pytest.raises(WorkbenchError, match="computed without a graph"):
        observed.run_with_grads(ids, names)


class WithoutGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, *args):
        return module(*args)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient, None


def test_edits_inside_an_autograd_function_that_is_no_checkpoint_are_refused(ids):
    module = large(GPT())
    observed = see(module, ids)
    attention, attend = module.transformer.h[1].attn, module.transformer.h[1].attn.forward
    attention.forward = lambda *args: WithoutGraph.apply(attend, *args)
    with pytest.raises(WorkbenchError, match="WithoutGraphBackward runs a part of GPT without its graph"):
        logits_with(observed, ids, ("blocks.1.attn.hook_v", half))
    logits, cache = observed.run_with_cache(ids, ["blocks.1.attn.hook_v"])
    assert torch.equal(logits, observed(ids))
    assert len(cache) == 1
    with torch.no_grad():
        assert not torch.equal(logits_with(observed, ids, ("blocks.1.attn.hook_v", half)), logits)


# ---- calls of the module itself --------------------------------------------------------------------------------------


def test_a_call_of_the_module_itself_while_hooks_are_open_is_warned_of(ids):
    module = large(GPT())
    observed, plain = see(module, ids), module(ids)[0]
    with observed.hooks([("blocks.1.attn.hook_v", half)]):
        with pytest.warns(HooksNotCalled, match=r"hook_v do not fire: GPT was called itself") as issued:
            output = module(ids)[0]
        assert [w.filename for w in issued] == [__file__], "the caller's line"
        assert torch.equal(output, plain)
        module(ids)  # once is enough
        assert not torch.equal(observed(ids), plain)
    with (
        observed.hooks([("blocks.1.attn.hook_v", half)]),
        pytest.warns(HooksNotCalled, match=r"a part of GPT was called"),
    ):
        module.forward(ids)  # passes no hook of the module
    with observed.hooks([("blocks.1.attn.hook_v", lambda x, hook: module(ids) and None)]):
        observed(ids)  # a hook's own calls are its own matter
    module(ids)


@pytest.mark.slow
def test_a_compiled_call_of_the_module_while_hooks_are_open_is_warned_of_too(ids):
    module = large(GPT())
    observed, compiled = see(module, ids), torch.compile(module, backend="eager")
    plain = compiled(ids)[0]
    with (
        observed.hooks([("blocks.1.attn.hook_v", half)]),
        pytest.warns(HooksNotCalled, match=r"hook_v do not fire: GPT was called itself"),
    ):
        assert torch.equal(compiled(ids)[0], plain)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    with pytest.raises(WorkbenchError, match="use_cache=False"):
        observed.generate(ids, 2, use_cache=True)
    assert not leftovers(observed)
