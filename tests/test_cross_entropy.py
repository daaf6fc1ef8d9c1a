"""Losses from chunks of logits equal the plain ones, in values and gradients, and stand aside where somebody listens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from seams import TOGETHER
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.kernels import cross_entropy as kernel
from workbench.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from workbench.models import transformer
from workbench.models.hooked import next_token_loss


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """Whatever the kernel does not write shows as NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def in_chunks(monkeypatch):
    """Every model takes its loss from chunks of five positions."""
    monkeypatch.setattr(transformer, "MIN_LOGITS", 0)
    monkeypatch.setattr(kernel, "CHUNK", 0)
    monkeypatch.setattr(kernel, "MIN_ROWS", 5)


def draw(n, width=8, vocabulary=37, dtype=torch.float32, gain=1.0):
    generator = torch.Generator().manual_seed(n + vocabulary)
    x, weight = (torch.randn(rows, width, generator=generator, dtype=torch.double) for rows in (n, vocabulary))
    targets = torch.randint(vocabulary, (n,), generator=generator)
    return (x * gain).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(how, x, weight, targets, weights=None, **options):
    losses = how(x, weight, targets, **options)
    total = losses.mean() if weights is None else (losses * weights).sum()
    return losses.detach(), *torch.autograd.grad(total, (x, weight))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, out.numel() if isinstance(out, torch.Tensor) else 0)
        return out


def test_one_position_by_hand():
    """Logits ln 1, ln 2, ln 5: shares 1/8, 2/8, 5/8; the gradient of the second's loss is (1/8, -6/8, 5/8)."""
    x = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log().requires_grad_()
    loss, by_x, by_weight = gradients(cross_entropy, x, weight, torch.tensor([1]))
    assert loss.item() == pytest.approx(math.log(4))
    assert by_weight.flatten().tolist() == pytest.approx([1 / 8, -6 / 8, 5 / 8])
    assert by_x.item() == pytest.approx(-6 / 8 * math.log(2) + 5 / 8 * math.log(5))


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
def test_values_and_gradients_equal_the_reference(weighted):
    for n, chunk in itertools.product((1, 4, 5, 6, 23), (1, 5, 64)):
        weights = torch.linspace(-1, 2, n) if weighted else None
        found = gradients(cross_entropy, *draw(n), weights, chunk=chunk)
        x, weight, targets = draw(n, dtype=torch.double)
        true = gradients(cross_entropy_reference, x, weight, targets, None if weights is None else weights.double())
        for mine, exact in zip(found, true, strict=True):
            torch.testing.assert_close(mine.double(), exact, atol=1e-6, rtol=1e-5)
        assert found[0].dtype == torch.float32


def test_scores_of_a_thousand_neither_overflow_nor_vanish():
    x, weight, targets = draw(9, gain=300.0)
    found, true = (
        gradients(cross_entropy, x, weight, targets, chunk=4),
        gradients(cross_entropy_reference, x, weight, targets),
    )
    assert true[0].max() > 200, "beyond the range of exp in float32"
    for mine, exact in zip(found, true, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-6, rtol=1e-5)


def test_backward_twice_and_gradients_of_gradients():
    """The gathered gradients are scaled in place: a second backward pass must not scale them again."""
    x, weight, targets = draw(11)
    loss = cross_entropy(x, weight, targets, chunk=4).mean()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    for mine, before in zip(torch.autograd.grad(2 * loss, (x, weight)), kept, strict=True):
        torch.testing.assert_close(mine, 2 * before)
    x, weight, targets = draw(3, 4, 5, dtype=torch.double)
    assert torch.autograd.gradgradcheck(lambda a, b: cross_entropy(a, b, targets, chunk=2), (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_and_autocast_are_as_good_as_the_plain_form(dtype):
    x, weight, targets = draw(33, 16, 50, dtype)
    true = gradients(cross_entropy_reference, *(t.detach().double().requires_grad_() for t in (x, weight)), targets)
    plain, mine = (gradients(how, x, weight, targets) for how in (cross_entropy_reference, cross_entropy))
    assert [t.dtype for t in mine] == [t.dtype for t in plain]
    for a, b, exact in zip(mine, plain, true, strict=True):
        assert (a.double() - exact).abs().max() <= 1.5 * (b.double() - exact).abs().max() + 1e-7
    x, weight, targets = draw(33, 16, 50)
    with torch.autocast("cpu", dtype):
        plain, mine = (gradients(how, x, weight, targets) for how in (cross_entropy_reference, cross_entropy))
    for a, b in zip(mine, plain, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.fast(7)
@pytest.mark.parametrize(
    ("architecture", "per_token"),
    [*((name, True) for name in TOGETHER), ("transformer", False), ("denseformer", False)],
)
def test_a_model_s_loss_and_gradients_stay_the_same(tiny, architecture, in_chunks, monkeypatch, per_token):
    model = tiny(architecture, dtype=torch.double)
    ids = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(1))

    def run(how):
        model.zero_grad()
        loss = how()
        loss.square().mean().backward()  # not the mean itself: positions weigh differently
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run(lambda: next_token_loss(model(ids), ids, per_token=per_token))
    monkeypatch.setattr(model.unembed, "forward", None)
    mine = run(lambda: model(ids, return_type="loss", loss_per_token=per_token))
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_who_listens_to_the_unembedding_gets_all_logits(tiny, in_chunks):
    model, ids, seen = tiny(), torch.arange(20)[None], []
    handle = model.unembed.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    heard = model(ids, return_type="loss")
    handle.remove()
    assert seen == [(1, 20, 61)]
    torch.testing.assert_close(heard, model(ids, return_type="loss"))
    assert len(seen) == 1


@pytest.mark.slow
def test_no_tensor_holds_all_logits_where_there_are_many(tiny):
    model = tiny(config={"d_vocab": 70_000, "n_ctx": 512, "d_model": 8, "d_mlp": 8, "n_heads": 2})
    ids = torch.randint(70_000, (1, 400), generator=torch.Generator().manual_seed(2))
    with Largest() as chunks:
        loss = model(ids, return_type="loss")
        loss.backward()
    with Largest() as plain:
        expected = next_token_loss(model(ids), ids)
    assert plain.most == 400 * 70_000
    assert chunks.most == kernel.MIN_ROWS * 70_000
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
