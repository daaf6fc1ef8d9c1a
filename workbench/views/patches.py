"""Patching between two prompts: which activation of the first brings its answer back, and what comes next once one is put in."""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np

from workbench import plots, prompts
from workbench.errors import BadData, UnknownName
from workbench.views.answers import Answers, answers_of, likeliest, second
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.places import quoted
from workbench.views.source import Source

PATCHED, BESIDE = ("stream", "attn_out", "mlp_out", "v", "z"), 6
"""What can be patched; of how many tokens it is told what comes next."""
MAP = 240  # pixels of the map, so that what comes next is seen beneath it


def _swept(source: Source, link: Link) -> tuple[str, Answers[prompts.PatchSweep]]:
    """Where activations are patched, and what each brings back."""
    right, wrong, other = link.whole("target"), link.whole("against"), second(link)
    if right is None or wrong is None:
        raise BadData("patching compares two answers: the first prompt's token and the second's")
    site = link.text("site", PATCHED[0]) or PATCHED[0]
    if site not in PATCHED:
        raise UnknownName("site", site, PATCHED)
    return site, answers_of(
        source, link,
        lambda subject: source.query(
            prompts.patch_sweep, subject, source.prompt(link), other, (right, wrong), site, progress=source.progress
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One activation that is patched: a layer and a position, of so many layers; what each position brings back at most."""

    layer: int
    position: int
    layers: int
    restored: np.ndarray


def cell(source: Source, link: Link) -> Cell:
    """The chosen activation, that which brings most back unless the link says; raises `BadData` where there is none."""
    (_, first), *_ = _swept(source, link)[1][0]
    values = np.nan_to_num(first.restored, nan=-np.inf)
    best = np.unravel_index(values.argmax(), values.shape)
    layer, position = (link.whole(key, int(n)) for key, n in zip(("layer", "position"), best, strict=True))
    if layer not in range(len(values)) or position not in range(values.shape[1]):
        raise BadData(
            f"layer {layer}, position {position}: there are {values.shape[0]} layers and {values.shape[1]} positions"
        )
    return Cell(int(layer or 0), int(position or 0), len(values), values.max(0).clip(0))


@view("intervene")
def patching(source: Source, link: Link) -> Drawing:
    """Which activations of the first prompt bring its answer back when put into a run on the second."""
    (site, (answers, refused)), chosen = _swept(source, link), cell(source, link)
    parts, sentences = [], []
    for subject, patched in answers:
        tokens = source.tokens(subject, second(link))
        columns = [f"{i}:{t if len(t) <= 12 else t[:11] + '…'}" for i, t in enumerate(tokens)]
        values = np.asarray(patched.restored, dtype="float32")
        rows = [str(n) for n in range(len(values))]
        mark = (chosen.layer, chosen.position) if chosen.layer < len(rows) and chosen.position < len(columns) else None
        parts.append((subject.title, plots.Grid(values, rows, columns, "restored share", "layer", "token", mark=mark)))
        sentences.append(
            f"{subject.title}: the first answer leads by {patched.clean:+.2f} after the first text, {patched.corrupted:+.2f} after the "
            "second"
        )
    figure = plots.grids(
        parts, f"Patching {site.replace('_', ' ')} from the first prompt into the second",
        f"{'; '.join(map(html.escape, sentences))}; 1: it is fully back; one pair",
        height=MAP,
    )  # fmt: skip
    return Drawing(figure, plots.grid_table(parts), ". ".join(refused))


@view("intervene")
def patched(source: Source, link: Link) -> Drawing:
    """What comes after the second prompt, before and after the chosen activation is that of the first."""
    (site, _), chosen = _swept(source, link), cell(source, link)
    edit = f"patch:layer={chosen.layer},site={site},position={chosen.position}"
    first, other = source.prompt(link), second(link)
    answers, refused = answers_of(
        source, link, lambda subject: source.query(prompts.edit_effect, subject, other, edit, other=first)
    )
    token = source.tokens(source.subjects(link)[0], other)[chosen.position]
    what = f"{site.replace('_', ' ')} of layer {chosen.layer} at token {chosen.position}, {quoted(token)}"
    return likeliest(answers, refused, "What comes next after the second text", f"{what}, from the first text", BESIDE)
