"""Runs to measure: four architectures trained for a few steps on repeated tokens; and tables of records to compare."""

from __future__ import annotations

import pandas as pd
from metric_outputs import ELSEWHERE

from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.interventions import INTERVENTIONS
from workbench.metrics import METRICS
from workbench.runs.records import COLUMNS
from workbench.training.loop import train

MODEL = ModelConfig(n_layers=2, d_model=16, n_heads=4, n_key_value_heads=2, d_mlp=24, d_vocab=64, n_ctx=128)
RECIPE = TrainConfig(steps=6, batch=4, T=64, warmup=2, lr=1e-2, validate_every=3, save_every=3, validation_sequences=8)
EVERYTHING = [n for n in (*METRICS, *INTERVENTIONS) if n not in ELSEWHERE]


def trained(root):
    """One short run per architecture."""
    names = ("transformer", "svformer", "neutreno", "denseformer")
    return {a: train(a, RepeatedData(), name=a, runs=root, model=MODEL, train=RECIPE, device="cpu") for a in names}


def table(frame, *also):
    """Values by what they are of, in one order."""
    axes = [c for c in COLUMNS if c not in ("value", "se", "n", "unit", "provenance", *also)]
    return pd.DataFrame(frame).set_index(axes)[["value", "se"]].sort_index()
