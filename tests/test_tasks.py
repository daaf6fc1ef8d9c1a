"""Tasks with a known answer: repeats repeat, triggers copy, and a batch depends on seed and step alone."""

from pathlib import Path

import pytest
import torch

from workbench.data import data_sources
from workbench.data.data_sources import BackcopyData, RepeatedData, open_data
from workbench.data.synthetic import SHARPNESS, backcopy_tokens, repeated_tokens, task_generator
from workbench.errors import BadData, UnknownName


def test_the_second_half_repeats_the_first() -> None:
    ids = repeated_tokens(5, 7, 11, generator=torch.Generator().manual_seed(0))
    assert ids.shape == (5, 14)
    assert ids.dtype == torch.int64
    assert torch.equal(ids[:, :7], ids[:, 7:])
    assert ids.min() >= 0
    assert ids.max() < 11


def test_tokens_are_uniform() -> None:
    counts = torch.bincount(RepeatedData(4).batch(0, 400, 200, 0)[:, :100].flatten(), minlength=4)
    # 40,000 draws: standard error of each count is 87
    assert (counts - 10_000).abs().max() < 5 * 87


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    task = RepeatedData()
    first = task.batch(3, 8, 64, 1)
    torch.manual_seed(99)
    task.batch(4, 8, 64, 1)
    assert torch.equal(task.batch(3, 8, 64, 1), first)
    assert not torch.equal(task.batch(4, 8, 64, 1), first)
    assert not torch.equal(task.batch(3, 8, 64, 2), first)


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    RepeatedData().batch(0, 4, 64, 0)
    RepeatedData().sample(4, 64)
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_is_fixed_and_never_trained_on() -> None:
    task = RepeatedData(16)
    held_out = task.sample(32, 32).ids
    assert torch.equal(task.sample(32, 32).ids, held_out)
    assert not torch.equal(task.sample(32, 32, seed=1).ids, held_out)
    trained = {tuple(row) for step in range(50) for row in task.batch(step, 32, 32, 0).tolist()}
    assert not trained & {tuple(row) for row in held_out.tolist()}


def test_what_was_drawn_once_is_drawn_again() -> None:
    """Runs are resumed and compared across machines and years."""
    assert RepeatedData().batch(5, 2, 64, 7)[:, :8].tolist() == [
        [14, 48, 42, 20, 37, 27, 24, 45],
        [62, 33, 33, 47, 20, 51, 5, 9],
    ]


@pytest.mark.parametrize(("name", "value"), [("vocabulary", 1), ("vocabulary", 6.5), ("seed", 0.5)])
def test_nonsense_tasks_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadData, match=rf"{name} is {value}; give a whole number of at least"):
        RepeatedData(value if name == "vocabulary" else 64).batch(0, 2, 8, value if name == "seed" else 0)  # type: ignore[arg-type]


def test_nonsense_batches_are_refused() -> None:
    task = RepeatedData()
    for call in (lambda: task.batch(-1, 2, 8, 0), lambda: task.batch(0, 0, 8, 0), lambda: task.batch(0, 2, 8, -1)):
        with pytest.raises(BadData, match="give a whole number"):
            call()
    with pytest.raises(BadData, match="batch is 0"):
        task.sample(0, 8)


def test_drawn_periods_repeat_within_the_range() -> None:
    ids = repeated_tokens(200, 16, 1000, generator=torch.Generator().manual_seed(0), shortest=8)
    periods = [next(p for p in range(1, 32) if (row[p:] == row[:-p]).all()) for row in ids]
    assert ids.shape == (200, 32)
    assert min(periods) == 8
    assert max(periods) == 16


@pytest.mark.parametrize("shortest", [0, 33])
def test_a_shortest_period_outside_the_length_is_refused(shortest: int) -> None:
    with pytest.raises(BadData, match="32"):
        RepeatedData(shortest=shortest).batch(0, 2, 64, 0)


# ---- a bigram chain with triggers ------------------------------------------------------------------------------------


def test_a_certain_chain_copies_by_hand() -> None:
    """1 -> 2 -> 3 -> 1, start -> 1, and 3 is a trigger: what follows it is the 2 before it, then 3 again."""
    chain = torch.zeros(4, 4)
    for one, other in ((0, 1), (1, 2), (2, 3), (3, 1)):
        chain[one, other] = 1.0
    triggers = torch.tensor([False, False, False, True])
    ids = backcopy_tokens(2, 9, chain, triggers, generators=[torch.Generator().manual_seed(0)])
    assert ids.tolist() == [[[0, 1, 2, 3, 2, 3, 2, 3, 2]] * 2]
    assert ids.dtype == torch.int64


def test_copies_follow_triggers_and_the_rest_follows_the_chain() -> None:
    task = BackcopyData(6, 2)
    ids = task.batch(0, 400, 60, 1)
    assert (ids[:, 0] == 0).all()
    assert (ids[:, 1:] > 0).all()
    counts = torch.zeros(6, 6)
    for row in ids.tolist():
        for t in range(1, 59):
            if row[t] >= 4:
                assert row[t + 1] == row[t - 1] < 4
            else:
                counts[row[t], row[t + 1]] += 1
    followed = counts[1:4] / counts[1:4].sum(1, keepdim=True)
    # thousands of draws a row: five standard errors of a share of a half are below 0.05
    assert (followed - task.chain[1:4]).abs().max() < 0.05
    assert torch.allclose(task.chain.sum(1), torch.ones(6))


def test_a_chain_that_would_copy_the_start_is_refused() -> None:
    triggers = torch.tensor([False, False, True])
    for pair in ((1, 0), (0, 2)):
        chain = torch.zeros(3, 3)
        chain[pair] = 1.0
        with pytest.raises(BadData, match="START"):
            backcopy_tokens(1, 4, chain, triggers, generators=[torch.Generator()])
    for said, batch, T in (("batch is 0", 0, 4), ("T is 1", 1, 1)):
        with pytest.raises(BadData, match=said):
            backcopy_tokens(batch, T, torch.eye(3), torch.zeros(3, dtype=torch.bool), generators=[torch.Generator()])
    least = backcopy_tokens(
        1, 2, torch.tensor([[0, 1.0], [0, 1.0]]), torch.zeros(2, dtype=torch.bool), generators=[torch.Generator()]
    )
    assert least.tolist() == [[[0, 1]]]
    with pytest.raises(BadData, match="no next token"):
        backcopy_tokens(1, 4, torch.zeros(3, 3), triggers, generators=[torch.Generator()])


def test_the_chain_is_one_language_and_its_batches_are_drawn_by_seed_and_step() -> None:
    task, again = BackcopyData(), BackcopyData()
    assert torch.equal(task.chain, again.chain)
    assert torch.equal(task.batch(3, 8, 16, 1), again.batch(3, 8, 16, 1))
    assert not torch.equal(task.batch(3, 8, 16, 1), task.batch(4, 8, 16, 1))
    assert not torch.equal(task.batch(3, 8, 16, 1), task.batch(3, 8, 16, 2))
    assert torch.equal(task.sample(4, 16).ids, again.sample(4, 16).ids)
    assert task.hash != BackcopyData(triggers=5).hash
    odds = task.chain.double().log()[:, 1:]  # without the start token, which never follows
    spread = odds[odds.isfinite().all(1)].std(1)
    torch.testing.assert_close(spread.mean(), torch.tensor(SHARPNESS).double(), rtol=0.1, atol=0)
    with pytest.raises(BadData, match="leaves at most 61"):
        BackcopyData(triggers=62).batch(0, 2, 8, 0)


def test_without_a_start_token_sequences_begin_inside_the_chain(tmp_path: Path) -> None:
    with_start, without = (BackcopyData(6, 2), BackcopyData(6, 2, start=False))
    ids = without.batch(3, 8, 16, 1)
    assert (ids > 0).all()
    assert torch.equal(ids, with_start.batch(3, 8, 17, 1)[:, 1:])  # the same chain, drawn alike
    assert without.hash != with_start.hash
    data = BackcopyData(6, 2, start=False)
    assert open_data(data.describe(), tmp_path) == data


def test_losses_of_copies_and_of_the_chain_are_told_apart(tmp_path: Path) -> None:
    """Tokens 0 1 3 1 2 with the trigger 3: the third loss is the copy's, the other three the chain's."""
    data = BackcopyData(vocabulary=4, triggers=1)
    losses = torch.tensor([[1.0, 2.0, 4.0, 6.0]])
    found = data.readings(losses, torch.tensor([[0, 1, 3, 1, 2]]))
    assert found["copy_loss"].item() == 4.0
    assert found["chain_loss"].item() == 3.0
    assert open_data(data.describe(), tmp_path) == data


@pytest.mark.parametrize("data", [RepeatedData(), BackcopyData()], ids=["repeated", "backcopy"])
def test_a_task_has_one_domain(data):
    assert data.sample(2, 8, domain=data.kind).hash == data.sample(2, 8).hash
    with pytest.raises(UnknownName, match="unknown domain 'code'"):
        data.sample(2, 8, domain="code")


def test_batches_of_a_chain_equal_torch_multinomial_and_are_drawn_once_for_models_of_one_seed(monkeypatch) -> None:
    """Each next token is the draw of `torch.multinomial`, and a block of steps serves every model of the seed."""
    task, size, T = BackcopyData(12, 3), 5, 9
    for step in (0, 1, 17):
        generator, ids = task_generator("backcopy", 4, step), torch.zeros(size, T, dtype=torch.int64)
        for t in range(1, T):
            last = ids[:, t - 1]
            drawn = torch.multinomial(task.chain[last], 1, generator=generator)[:, 0]
            ids[:, t] = torch.where(last >= 9, ids[:, max(t - 2, 0)], drawn)
        assert torch.equal(task.batch(step, size, T, 4), ids)
    calls = []
    monkeypatch.setattr(
        data_sources, "backcopy_tokens", lambda *given, **more: calls.append(given) or backcopy_tokens(*given, **more)
    )
    for _ in range(2):
        for step in range(40):
            BackcopyData(13, 3).batch(step, size, T, 4)
    assert len(calls) == 3, "blocks of 16 steps, for two models"
