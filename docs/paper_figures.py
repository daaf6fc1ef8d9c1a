"""Figures and tables of the papers with the commands that reproduce them, for `docs/figures.md`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shown:
    """A figure or table of a paper, our command with its output, and the study that trains the runs."""

    where: str
    command: str
    shows: str
    claims: tuple[str, ...] = ()
    study: str = ""


VRL, LATER = "Zhou et al. 2024 (value residual)", "Zhou et al. 2025 (value residual, last version)"
_ANALYSIS = "python -m analyses.{} RUN..."
_MEASURE = "workbench measure RUN... -m {}"


FIGURES: tuple[Shown, ...] = (
    Shown(f"{VRL}: table of validation losses by domain at 82M, 180M, 468M", _ANALYSIS.format("lower_loss_and_efficiency"),
          "absolute losses, then paired differences over seeds and over documents, at one rate and at each model's "
          "best", ("lower_loss",), "mini"),
    Shown(f"{VRL}: loss over parameters", _ANALYSIS.format("lower_loss_and_efficiency"),
          "savings by every form of the curve side by side, with intervals from seeds", ("fewer_parameters",), "sizes"),
    Shown(f"{VRL}: loss over training tokens", _ANALYSIS.format("lower_loss_and_efficiency"),
          "the same on the axis of tokens; refused for points inside one decaying schedule", ("fewer_tokens",)),
    Shown(f"{VRL}: relative loss of ResFormer, NeuTRENO and DenseFormer", _ANALYSIS.format("lower_loss_and_efficiency"),
          "final losses with intervals; absolute curves with seed bands", ("ahead_of_relatives", "same_cost")),
    Shown(f"{VRL}: zero-shot accuracies", _ANALYSIS.format("lower_loss_and_efficiency"),
          "why small models cannot check it; larger ones go through the evaluation harness", ("downstream_gains",)),
    Shown(f"{VRL}: relative loss of value, key and query residuals; {LATER}: attention and hidden state",
          _ANALYSIS.format("where_the_residual_belongs"), "all five tensors with seeds", ("value_path_is_the_place",)),
    Shown(f"{VRL}: sources of the residual", _ANALYSIS.format("where_the_residual_belongs"),
          "the loss with each later layer as the source", ("first_layer_is_the_source",), "source_layer"),
    Shown(f"{LATER}: residual in some layers, trained coefficients by depth", _ANALYSIS.format("where_the_residual_belongs"),
          "late against early layers; growth of the coefficients over layers", ("late_layers_profit",), "target_layers"),
    Shown(f"{VRL}: weight of the first layer's values", _ANALYSIS.format("where_the_residual_belongs"),
          "every weight against vanilla, and where the best lies", ("robust_to_its_weight",), "lambda"),
    Shown(f"{VRL}: learning rates; {LATER}: gradient norms by matrix", _ANALYSIS.format("easier_optimisation"),
          "each rate, each model's best rate, and vanilla with a faster first layer", ("not_merely_easier_optimisation",), "learning_rate"),
    Shown(f"{VRL}: importance entropy by layer, trained and at random init", _ANALYSIS.format("concentration"),
          "deficit from uniform causal attention at the same length, its three parts, equal step and equal loss",
          ("concentration_is_learned", "less_concentration_in_deep_layers")),
    Shown(f"{VRL}: importance of the 1st, 2nd, 3rd and 10th token", _MEASURE.format("top_importance"),
          "the ten largest, plain and cumulative, beside uniform causal attention"),
    Shown(f"{VRL}: first token's importance, value norm and hidden norm by layer", _ANALYSIS.format("sinks_and_drains"),
          "the three measured apart, own and effective values, gated on sinks in five seeds",
          ("sinks_drains_and_peaks_vanish_together", "start_token_decides_the_sinks"), "sinks"),
    Shown(f"{VRL}: norms over positions and layers", _MEASURE.format("value_norm -m hidden_norm"), "maps over positions and layers"),
    Shown(f"{VRL}: similarity and entropy of Llama 8B and Mistral 7B by layer", _ANALYSIS.format("oversmoothing"),
          "rank correlation over layers and models, with and without position 0", ("smoothing_and_concentration_are_linked",)),
    Shown("Nguyen et al. 2023 (NeuTRENO): similarity of tokens by layer", _ANALYSIS.format("oversmoothing"),
          "trained minus random init, where part of the difference is already there", ("neutreno_smooths_less",)),
    Shown(f"{VRL}: eigenvalues of values", _ANALYSIS.format("richer_values"),
          "normalised by the trace; the scale beside it", ("richer_values",)),
    Shown(f"{LATER}: principal components for 99 % of the variance", _MEASURE.format("effective_rank"), "variant pcs_99 of "
    "hidden states, values and outputs"),
    Shown(f"{LATER}: own values of deep layers, attention or MLP removed", _ANALYSIS.format("richer_values"),
          "likeness and norms of own values, cost of each sublayer, against vanilla", ("deep_layers_learn_a_correction",)),
    Shown(f"{VRL}: cosine of cross-layer attention with its approximations; training with them", _ANALYSIS.format("cross_layer"),
          "both approximations and the layer's own output as the baseline", ("same_key_averaging_approximates",)),
    Shown(f"{LATER}: token information (stated, no probe published)", _ANALYSIS.format("token_retention"),
          "bits by a linear probe, beyond random init and at equal loss", ("token_information_is_preserved",)),
    Shown("Bank of Values (arXiv 2606.02780): values looked up by token", _ANALYSIS.format("deep_values"),
          "share of the token's identity, and what its mean keeps of what zero costs", ("deep_values_need_little_context",)),
    Shown(f"{VRL}: SVFormer's relative loss by sequence length, rate, warm-up; critical points", _ANALYSIS.format("svformer"),
          "early lead and crossing of every seed and length", ("fast_at_first_then_overtaken",), "lengths"),
    Shown(f"{VRL}: SVFormer against GQA and CLA; cache", _ANALYSIS.format("svformer"),
          "bytes counted, penalty beside that of other ways to the same cache",
          ("half_the_cache_for_a_small_penalty", "better_than_grouped_heads_at_length")),
    Shown(f"{VRL}: queries, keys or values shared between layers", _ANALYSIS.format("svformer"),
          "pairs of layers, with seeds", ("sharing_values_hurts_least",)),
    Shown("Pagliardini et al. 2024 (DenseFormer): weights of the averages, perplexities", _ANALYSIS.format("learned_coefficients"),
          "structure of the weights with intervals over seeds", ("denseformer_weights_have_structure",)),
    Shown("Olsson et al. 2022 (induction heads): formation over training", _ANALYSIS.format("race_to_induction"),
          "formation steps of every architecture and rate", ("value_paths_speed_up_induction",)),
    Shown("Gu et al. 2024 (sinks): sink rate at 64 "
    "tokens", _MEASURE.format("sink_rate -m sink_mass"), "rate and mass, beside uniform attention"),
    Shown("Sun et al. 2024 (massive activations): largest over median "
    "entry", _MEASURE.format("massive_activations"), "the ratio, and the published criterion"),
    Shown("one model at a glance (ours)", "workbench xray RUN", "concentration, sinks, values and what a value residual would meet"),
    Shown("all claims at once (ours)", "workbench analyze RUN...", "one page: what the runs decide in front, the rest folded "
    "with its reason"),
)  # fmt: skip
