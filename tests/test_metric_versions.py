"""A metric or experiment whose numbers change has a new version: stored records depend on it."""

from __future__ import annotations

import copy
import math

import metric_outputs
import pytest

COMMAND = "python tests/metric_outputs.py"
FITTED = {
    "token_probe": 0.1,
    "previous_token_probe": 0.1,
    "token_probe_streamed": 1e-3,
    "previous_token_probe_streamed": 1e-3,
}
"""Relative tolerance of probes that are fitted in float32: the last digit of a vector changes the second of their accuracy."""


@pytest.fixture(scope="module")
def measured():
    return metric_outputs.measured(metric_outputs.MEASURES)


def compare(name, old, new):
    """Fail with what to do where an entry is missing or says something else than what is measured now."""
    if old is None:
        pytest.fail(f"{name} is new: keep its outputs with `{COMMAND}`")
    if old["version"] != new["version"]:
        pytest.fail(f"{name} went from version {old['version']} to {new['version']}: keep its outputs with `{COMMAND}`")
    told = f"{name} gives other numbers than its version {old['version']} did: raise its version where it is registered and `{COMMAND}`"
    assert new["rows"].keys() == old["rows"].keys(), told
    rel = FITTED.get(name, 1e-5)
    for group, numbers in new["rows"].items():
        kept = pytest.approx(_floats(old["rows"][group]), rel=rel, abs=rel * 1e-4, nan_ok=True)
        assert _floats(numbers) == kept, f"{told}\n{group}"


def _floats(numbers):
    return [math.nan if x is None else x for x in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(metric_outputs.MEASURES))
def test_numbers_change_only_with_the_version(measured, name):
    compare(name, metric_outputs.kept().get(name), measured[name])


def test_outputs_of_what_is_gone_are_gone():
    assert set(metric_outputs.kept()) <= set(metric_outputs.MEASURES)


def test_changed_numbers_a_new_metric_and_a_raised_version_each_say_what_to_do():
    old = metric_outputs.kept()["token_similarity"]
    changed, raised = copy.deepcopy(old), {**old, "version": old["version"] + 1}
    next(iter(changed["rows"].values()))[1] *= 1.0001
    with pytest.raises(AssertionError, match=r"token_similarity gives other numbers .* raise its version"):
        compare("token_similarity", old, changed)
    for before, after in ((None, old), (old, raised)):
        with pytest.raises(pytest.fail.Exception, match=r"python tests/metric_outputs\.py"):
            compare("token_similarity", before, after)
