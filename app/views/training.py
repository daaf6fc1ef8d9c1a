"""Training: losses, learning rate, gradients, coefficients and speed, as training wrote them down."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app import state, url
from workbench import plots

ELSEWHERE = (
    "train_loss", "validation_loss", "copy_loss", "gradient_norm", "coefficient", "learning_rate", "tokens_per_second",
    "seconds_per_step", "recorder_share",
)  # fmt: skip
MOST_LAYERS = 12


def draw() -> None:
    st.title("Training")
    entries, _ = state.listing()
    if not entries:
        st.info("No runs here yet: `make demo` trains some, `workbench train` your own.")
        return
    runs = state.choose_models(state.choose_set(entries))
    if not runs:
        return
    log = url.switch("Steps on a logarithmic axis", "log")
    live = state.being_written(runs)
    st.fragment(_figures, run_every=5 if live else None)(runs, log, live)


def _figures(runs: Sequence[state.Entry], log: bool, was_live: bool) -> None:
    """Everything that was written down; drawn anew every five seconds while somebody writes."""
    if was_live and not state.being_written(runs):
        st.rerun()
    frame = state.table(runs, "telemetry")
    if frame.empty:
        st.info("These runs have written nothing yet. Telemetry appears a few seconds after training starts.")
        return
    by = {str(metric): rows for metric, rows in frame.groupby("metric")}
    st.header("Loss")
    st.markdown(
        "Lower is better: the loss is the surprise per token, in nats, on text the model has not been trained on. Bands span the "
        "seeds. Curves whose bands overlap are not told apart."
    )
    if "validation_loss" in by:
        loss = by["validation_loss"]
        state.show(lambda: plots.plot(loss, log_x=log), loss, "validation", download=True)
        if "transformer" in set(loss["architecture"]) and loss["architecture"].nunique() > 1:
            st.markdown("The same, minus the Transformer of the same seed: below zero is better than the Transformer.")
            paired = state.paired(loss)
            state.show(
                lambda: plots.plot(paired, log_x=log, title="Validation loss minus the Transformer's"),
                paired,
                "relative",
            )
    if "train_loss" in by:
        loss = by["train_loss"]
        state.show(lambda: plots.plot(loss, log_x=log, smooth=15), loss, "train")
    if "copy_loss" in by:
        copy = by["copy_loss"]
        st.markdown("On repeated tokens only the second half can be predicted; this is the loss there.")
        state.show(lambda: plots.race(copy, log_x=log), copy, "copy")
    st.header("Gradients")
    st.markdown(
        "How strongly the loss pulls on each weight matrix (W_Q, W_K, W_V, W_O of attention, then the MLP's) in each layer. "
        "Dark: hardly any pull. A strong pull on the first layer's W_V is expected where later layers use its values too."
    )
    if "gradient_norm" in by:
        norms = by["gradient_norm"]
        if (norms["variant"] == "clipped").any():
            st.markdown("Recorded inside a Trainer that clips first: these are the norms after clipping.")
            norms = norms.assign(variant=norms["variant"].where(norms["variant"] != "clipped"))
        state.show(lambda: plots.gradient_map(norms), norms, "gradients")
    if "coefficient" in by:
        st.header("Coefficients")
        st.markdown(
            "Numbers the shortcut itself learns: with what weight each earlier output enters what the next block reads."
        )
        for series, rows in by["coefficient"].groupby("architecture"):
            state.show(lambda rows=rows: plots.coefficients(rows), rows, f"coefficients_{series}")  # type: ignore[misc]
    _inside(by, log)
    st.header("Pace")
    if "learning_rate" in by:
        rate = by["learning_rate"]
        state.show(lambda: plots.plot(rate, log_x=log), rate, "learning_rate")
    if "tokens_per_second" in by:
        pace = by["tokens_per_second"]
        st.markdown("Tokens per second on this machine, with other work beside it; for a fair comparison train alone.")
        state.show(lambda: plots.pace(pace), pace, "pace")
    if "seconds_per_step" in by:
        spent = by["seconds_per_step"]
        state.show(lambda: plots.plot(spent, log_x=log), spent, "seconds")
    if "recorder_share" in by:
        share = by["recorder_share"]
        st.markdown("The part of the loop's time that recording itself took, writing included: 0.01 is one per cent.")
        state.show(lambda: plots.plot(share, log_x=log, title="What recording costs"), share, "share")


def _inside(by: dict[str, pd.DataFrame], log: bool) -> None:
    """Quantities that a recorder took in the loop: one at a time, a panel for each layer."""
    others = sorted(name for name in by if name not in ELSEWHERE)
    if not others:
        return
    st.header("Inside the model")
    st.markdown("What a recorder took from the batches trained on, mean over heads where there are several.")
    first, second = st.columns(2)
    with first:
        quantity = url.choose("Quantity", "quantity", others, "update_ratio", show=lambda m: m.replace("_", " "))
    rows = by[quantity]
    axis = "part" if rows["part"].notna().any() else "site"
    with second:
        places = sorted(rows[axis].dropna().unique())
        place = url.choose("Where", "where", places, show=plots.site)
    rows = rows if place is None else rows[rows[axis] == place]
    layers = sorted(rows["layer"].dropna().unique())
    kept = layers[:: -(-len(layers) // MOST_LAYERS)] if layers else []
    rows = (rows[rows["layer"].isin(kept)] if kept else rows).assign(head=float("nan"))
    state.show(lambda: plots.plot(rows, form="steps", log_x=log), rows, "inside", download=True)


if __name__ == "__main__":
    draw()
