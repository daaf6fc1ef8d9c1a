"""Controls of metrics are what the metrics say where there is nothing to find; and how short a sequence each may read."""

from __future__ import annotations

import pytest
import torch
from tensors import seeded

from workbench.errors import WorkbenchError
from workbench.kernels import attention_statistics
from workbench.measurement.measuring import measure, refuse_short
from workbench.metrics import METRICS

SHORTEST = {
    1: [
        "effective_keys", "hidden_norm", "importance_entropy", "massive_activations", "norm_weighted_importance",
        "sink_power", "token_identity_share", "token_importance", "top_importance", "value_norm", "value_weighted_importance",
    ],
    2: [  # a position beside the first, or a token to predict
        "cache_bytes", "cache_traffic", "concentration_parts", "effective_rank", "gradient_norm",
        "head_rank", "hidden_peak", "loss", "received_ratio", "row_entropy", "sink_contribution", "sink_mass", "spectrum", "token_probe",
        "token_probe_streamed", "value_drain",
    ],
    3: ["collapse_residual", "token_similarity", "value_bias"],  # a pair without the first
    4: ["induction_score", "previous_token_probe", "previous_token_probe_streamed"],  # something said twice
    16: ["found_sinks"],  # fewer rows show nothing significant
    64: ["sink_rate"],  # as published
}  # fmt: skip
LEAST = {name: T for T, names in SHORTEST.items() for name in names}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_reads_sequences_from_its_shortest_on(name):
    least = LEAST.get(name, METRICS[name].min_length)
    refuse_short(least, [name])
    with pytest.raises(WorkbenchError, match=f"{name} needs sequences of {least} tokens; these have {least - 1}"):
        refuse_short(least - 1, [name])


def test_the_shortest_sequences_give_numbers(tiny):
    model, ids = tiny("resformer"), torch.randint(61, (2, 64), generator=torch.Generator().manual_seed(0))
    ids[:, 2:4] = ids[:, :2]
    for T, names in SHORTEST.items():
        frame = measure(model, [name for name in names if "probe" not in name], ids[:, : max(T, 2)])
        frame = frame[frame["metric"] != "token_identity_share"] if T == 1 else frame  # it needs tokens that return
        assert frame["value"].notna().all()


# ---- controls --------------------------------------------------------------------------------------------------------


EVEN = [n for n, entry in METRICS.items() if entry.form == "per_sequence" and "uniform_causal" in entry.controls]


@pytest.mark.parametrize("name", EVEN)
def test_the_control_is_what_the_metric_says_of_even_attention(name):
    """Queries of zeros attend evenly to all they see; values of one length and an output matrix that keeps it."""
    T, entry = 64, METRICS[name]
    k, v = (torch.nn.functional.normalize(seeded(2, T, 2, 8, seed=s, dtype=torch.double), dim=-1) for s in (1, 2))
    q = torch.zeros(2, T, 4, 8, dtype=torch.double)
    given = vars(attention_statistics(q, k, v)[1]) | {
        "rot_q": q, "rot_k": k, "v": v, "W_O": torch.eye(8, 32, dtype=torch.double).expand(4, 8, 32),
        "tokens": torch.zeros(2, T, dtype=torch.long),
    }  # fmt: skip
    found = entry.function(*(given[argument] for argument in entry.arguments))
    expected = torch.as_tensor(entry.controls["uniform_causal"](T), dtype=torch.double)
    kept = found.mean(1) if "head" in entry.axes else found
    torch.testing.assert_close(kept.double(), expected.expand_as(kept), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["hidden_peak", "value_drain"])
def test_no_position_towers_over_or_is_drained_where_all_have_one_length(name):
    vectors = torch.nn.functional.normalize(seeded(2, 9, 3, 4), dim=(-2, -1))
    expected = METRICS[name].controls["none"](9)
    torch.testing.assert_close(METRICS[name].function(vectors), torch.full((2,), expected))
