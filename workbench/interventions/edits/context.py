"""A model's forward pass with edits applied: `with edited(model, "sink:layer=3,head=1"): ...`.

Order: edits of one tensor apply in the listed order; edits of different tensors in the order of the forward pass. A later
edit of one coefficient wins. Activations from other layers, positions or prompts come from the unedited model.

Edits cost no T x T array, but for sinks of observed models, and `sink:how=keep` where a shortcut defines the attention. To
see the pattern under an edited sink, name it (`names_filter`, or a hook). A cache without a filter rebuilds patterns from
queries and keys, without the edit. Values that are edited where a layer makes them are edited for every later layer
that borrows or mixes them.

Source: activation patching as in Meng et al. (2022), ROME, and Wang et al. (2023), IOI; zero and mean ablation as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from workbench.interventions.edits.base import Hook, Inputs
from workbench.interventions.edits.kinds import Edit, Given, as_edits
from workbench.models.hooked import HookedModel


@contextmanager
def edited(
    model: HookedModel, edits: Given | Iterable[Given], *, tokens: Any = None, other: Any = None, means: Any = None
) -> Iterator[HookedModel]:
    """The model with all the edits (objects, dictionaries or texts) for as long as this is open; then it is as before.

    Args:
        tokens: the prompt, as ids [batch, pos], [pos] or text. Edits that read it need it (patches, token means, other
            layers' values), and then hold for runs on this prompt alone. Other edits hold for any run.
        other: a second prompt, for `patch` and `values:how=prompt`; one row, or as many as the prompt.
        means: a `TokenMeans` of `token_means`, or several by name, for `values:how=token_mean`.

    Raises, before anything changes: `UnknownName` and `WorkbenchError` for parts that the architecture lacks and for layers,
    heads and positions out of range, with the choices; `BadData` for missing prompts or tables, and unequal lengths.
    """
    inputs = Inputs.of(model, tokens, other, means)
    with applied(model, as_edits(edits), inputs):
        yield model


@contextmanager
def applied(model: HookedModel, edits: Sequence[Edit], inputs: Inputs) -> Iterator[None]:
    """Apply edits as `edited` does, and store their activations in `inputs` for the next call."""
    with model.lock, ExitStack() as stack:
        targets = [(edit, edit.layers(model)) for edit in edits]
        for edit, layers in targets:
            edit.check(model, inputs)
            edit.prepare(model, layers, inputs)
        # the embedding's hook does nothing: with it a compiled model runs where hooks and other methods count
        hooks: list[Hook] = [("hook_embed", lambda x, hook: None)] if "hook_embed" in model.hook_dict else []
        for edit, layers in sorted(targets, key=lambda target: target[0].outermost):
            for layer in layers:
                hooks += edit.apply(model, layer, inputs, stack)
        stack.enter_context(model.hooks(hooks))
        yield
