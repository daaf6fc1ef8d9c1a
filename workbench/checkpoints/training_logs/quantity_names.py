"""Quantities of training logs: their names in other code bases and ours, their units, and the averages that are left out."""

from __future__ import annotations

import re
from functools import lru_cache

UNITS = {
    "validation_loss": "nats", "train_loss": "nats", "validation_bits_per_byte": "bits per byte", "learning_rate": None,
    "estimated_train_loss": "nats", "total_gradient_norm": "loss per weight", "seconds_per_step": "s", "tokens_per_second": "tokens/s",
}  # fmt: skip
"""Our quantities that a log can hold, and their units."""
ESTIMATED = "estimated_train_loss"
"""nanoGPT's training loss over batches of its own, beside the loss of the batch: stored as a variant of `train_loss`."""
TRAIN_TIME, STEP_AVERAGE = "train_time", "step_avg"
"""Cumulative times of modded-nanogpt, from which the seconds per step are computed."""
PERPLEXITY = {"train_loss": "train_ppl", "validation_loss": "val_ppl"}
"""Perplexities, which tell whether the loss beside them is in nats or in bits."""

NAMES = {
    "validation_loss": "validation_loss", "val_loss": "validation_loss", "valid_loss": "validation_loss",
    "eval_loss": "validation_loss", "loss_val": "validation_loss", "loss_validation": "validation_loss",
    "loss_eval": "validation_loss",
    "train_loss": "train_loss", "training_loss": "train_loss", "loss_train": "train_loss", "loss": "train_loss",
    "train_loss_step": "train_loss", "loss_step": "train_loss",  # Lightning
    "estimated_train_loss": "estimated_train_loss",
    "val_bpb": "validation_bits_per_byte", "validation_bpb": "validation_bits_per_byte",
    "validation_bits_per_byte": "validation_bits_per_byte",
    "learning_rate": "learning_rate", "lr": "learning_rate", "train_learning_rate": "learning_rate", "train_lr": "learning_rate",
    "grad_norm": "total_gradient_norm", "gradient_norm": "total_gradient_norm", "train_grad_norm": "total_gradient_norm",
    "seconds_per_step": "seconds_per_step", "step_time": "seconds_per_step",
    "tokens_per_second": "tokens_per_second",
    "train_time": TRAIN_TIME, "step_avg": STEP_AVERAGE,
    "ppl": "train_ppl", "perplexity": "train_ppl", "train_ppl": "train_ppl", "train_perplexity": "train_ppl",
    "val_ppl": "val_ppl", "valid_ppl": "val_ppl", "validation_ppl": "val_ppl", "eval_ppl": "val_ppl",
    "val_perplexity": "val_ppl", "valid_perplexity": "val_ppl", "validation_perplexity": "val_ppl", "eval_perplexity": "val_ppl",
}  # fmt: skip
"""Their names, as `plain_name` spells them, and ours."""
IN_TEXT = {
    "tel": "val_loss", "trl": "train_loss", "norm": "grad_norm",  # llm.c
    "dt": "step_time",  # nanochat
}  # fmt: skip
"""Names with this meaning in lines of text only."""
AVERAGES = {
    "mfu", "tok_s", "tok_sec", "tok_per_sec", "avg_loss", "loss_avg", "ema_loss", "smooth_loss", "running_loss",
    "train_loss_epoch", "loss_epoch", "train_train_loss", "mean_train_loss",
}  # fmt: skip
"""Running means and means over an epoch or the whole training: no number of one step."""
STEPS = (
    "train_global_step", "trainer_global_step", "global_step", "step", "train_step", "training_step", "optimizer_step", "iteration",
    "iter", "_step",
)  # fmt: skip
"""Names of the optimiser step, the most reliable first: W&B's `_step` counts calls of `log`."""
RUNS = ("run", "run_id", "run_name", "seed")
"""Columns of a table that name a run; the first one present is used, and the seed beside it."""
SETTINGS = ("setting", "track", "record", "experiment", "group", "config", "model", "architecture", "arm")
"""Columns of a table that name the setting of a run, joined in the table's order."""
SPLITS = ("split", "phase", "mode", "stage", "subset", "partition")
"""Columns of a table whose cell, `train` or `val`, says which loss the row's `loss` is."""
FLAGS = {"is_eval": "eval", "is_val": "val", "is_validation": "validation", "is_test": "test"}
"""Columns whose cell is true in rows of that loss."""
SUMMARY = "train_runtime"
"""What only the last entry of transformers' Trainer has."""
SUMMARIES = {SUMMARY, "train_train_runtime", "train_train_loss"}
"""Its names in `trainer_state.json` and MLflow, and in W&B and TensorBoard."""
SUMMARY_REASON = "the last entry's train_loss is the mean over the training"
TIMES = (TRAIN_TIME, STEP_AVERAGE, "step_time")
"""Names that need a unit, as in `train_time_ms`."""
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0}


@lru_cache(4096)
def plain_name(name: str) -> str:
    """Return a quantity's name in lower case with underscores, as `val_loss` for `Val/loss`."""
    return re.sub(r"[\s/.\-]+", "_", name.strip().lower())


@lru_cache(4096)
def quantity(name: str) -> tuple[str | None, float, str]:
    """Return our quantity for a name in a log, the factor to our unit, and the reason to leave it out (else empty)."""
    plain, factor = plain_name(name), 1.0
    if plain in TIMES:
        return None, factor, f"{name} has no unit; name it {name}_s or {name}_ms"
    time, _, unit = plain.rpartition("_")
    if time in TIMES and unit in SECONDS:
        plain, factor = time, SECONDS[unit]
    if plain in AVERAGES:
        return None, factor, f"{name} is an average over many steps"
    ours = NAMES.get(plain)
    return ours, factor, "" if ours else f"{name} is no known quantity"
