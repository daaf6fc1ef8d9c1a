"""Change something inside a model and see what follows: one prompt before and after, every layer and head in turn, patching."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import BadData, UnknownName
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import LETTERS, Source, Subject

EDITS = "values:how=mean"
"""What is edited where the link does not say."""
KINDS = {
    "values:how=zero": "drop the values (zero)",
    "values:how=mean": "replace values by their mean over the prompt",
    "values:how=token_mean": "replace values by the mean of their token",
    "values:how=shuffle": "shuffle values among positions",
    "values:how=layer,from_layer=0": "replace values by the first layer's",
    "values:how=prompt": "replace values by the second prompt's",
    "values:site=arriving,how=zero": "cut the value shortcut (what arrives from other layers)",
    "coefficient:value=0": "set the shortcut's coefficient to a number",
    "sink": "cut attention to the first token",
    "sink:how=keep": "keep the attention, drop what the first token writes",
    "remove:part=attention": "remove an attention",
    "remove:part=mlp": "remove an MLP",
    "head:how=mean": "replace a head's output by its mean",
    "head": "silence a head (zero)",
    "patch:site=stream": "patch the stream from the second prompt",
}
SWEEPS = {k: v for k, v in KINDS.items() if not k.startswith("patch")}
OF = {
    "loss": ("nats", "change of the mean loss over the prompt; above 0: it was needed"),
    "logit": (
        "logits",
        "change of the chosen token's logit against the mean logit; below 0: it was pushed up from here",
    ),
    "probability": ("share", "change of the chosen token's probability"),
}
OVER = ("layer", "layer x head")
PATCHED = ("stream", "attn_out", "mlp_out", "v", "z")


def has_heads(kind: str) -> bool:
    """Whether a kind of edit can be made in some heads alone."""
    return kind.split(":")[0] in ("values", "sink", "head") or kind.startswith("patch:site=v")


def compose(kind: str, layers: Sequence[int], heads: Sequence[int], value: float | None = None) -> str:
    """An edit as text from a kind and where it is made."""
    name, _, options = kind.partition(":")
    parts = {"layer": "/".join(map(str, sorted(layers))), "head": "/".join(map(str, sorted(heads)))}
    parts |= dict(part.split("=") for part in options.split(",") if part)
    if value is not None:
        parts["value"] = f"{value:g}"
    told = ",".join(f"{k}={v}" for k, v in parts.items() if v)
    return f"{name}:{told}" if told else name


def edits(link: Link) -> str:
    """The edits of a link; raises what the parser refuses."""
    from workbench.interventions.edits import as_edits

    text = link.text("edits", EDITS) or ""
    as_edits(text)
    return text


def _asked(link: Link, text: str) -> dict[str, Any]:
    """What the edits need beside the prompt: a second one, a table of means."""
    needs: dict[str, Any] = {}
    if "how=prompt" in text or "patch" in text:
        needs["other"] = second(link)
    if "token_mean" in text:
        needs["means"] = "own_v" if "own_v" in text else "v"
    return needs


def second(link: Link) -> str:
    """The second prompt; raises `BadData` where there is none."""
    found = link.text("other")
    if not found:
        raise BadData("this edit takes something from a second prompt: give one")
    return found


def _effect(ask: Source, link: Link, subject: Subject) -> Any:
    text = edits(link)
    return ask.look("edits.effect", subject, ask.prompt(link), edits=text, **_asked(link, text))


@view("intervene")
def effect(ask: Source, link: Link) -> Drawing:
    """Loss of every token before and after the edits."""
    figure, frames, said = go.Figure(), [], []
    text = edits(link)
    for subject in ask.subjects(link):
        found = _effect(ask, link, subject)
        tokens = ask.tokens(subject, ask.prompt(link))[1:]
        ticks = [f"{i}:{t if len(t) <= 12 else t[:11] + '…'}" for i, t in enumerate(tokens, 1)]
        colour = plots.colour(subject.series)
        figure.add_bar(
            x=ticks, y=found.loss_after - found.loss_before, name=subject.title, marker_color=colour,
            customdata=np.stack([found.loss_before, found.loss_after], 1),
            hovertemplate="%{x}<br>before %{customdata[0]:.3f}, after %{customdata[1]:.3f} nats<extra></extra>",
        )  # fmt: skip
        columns = {"token": ticks, "before": found.loss_before, "after": found.loss_after}
        frames.append(pd.DataFrame({"model": subject.title} | columns))
        se = (
            float(np.std(found.loss_after - found.loss_before, ddof=1) / np.sqrt(found.n))
            if found.n > 1
            else float("nan")
        )
        said.append(
            f"{subject.title}: loss {found.loss_before.mean():.3f} to {found.loss_after.mean():.3f} nats per token, change "
            f"{found.change:+.3f} (standard error over the {found.n} tokens {se:.3f}; one text, so no more than this text's answer); "
            f"the next token's distribution moved by {found.divergence:.3f} nats (KL)"
        )
    every = max(1, -(-len(ticks) // 40))
    figure.update_xaxes(tickvals=ticks[::every], type="category", tickangle=-90, tickfont_size=10)
    figure.update_yaxes(title_text="change of loss, nats")
    plots.dressed(
        figure, "What the change costs, token by token", f"{_words(text)}; above 0: predicted worse than before", 320
    )
    return Drawing(figure, pd.concat(frames, ignore_index=True), ". ".join(said) + ".")


@view("intervene")
def next_token(ask: Source, link: Link) -> Drawing:
    """The likeliest next tokens before and after the edits."""
    figure, frames = go.Figure(), []
    for subject in ask.subjects(link):
        found = _effect(ask, link, subject)
        rows = pd.concat([found.top_before, found.top_after]).drop_duplicates("id").head(14)
        names = _readable(subject, rows)
        for when, opacity in (("before", 0.4), ("after", 1.0)):
            figure.add_bar(
                y=plots.unique(names), x=rows[when], orientation="h", name=f"{subject.title}, {when}",
                marker={"color": plots.colour(subject.series), "opacity": opacity},
                hovertemplate="%{y}: %{x:.2%}<extra></extra>",
            )  # fmt: skip
        frames.append(rows.assign(model=subject.title, text=names))
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(title_text="probability")
    plots.dressed(
        figure, "What comes next, before and after", "pale: before; full: after the change; probability, one text", 360
    )
    return Drawing(figure, pd.concat(frames, ignore_index=True))


def _readable(subject: Subject, rows: pd.DataFrame) -> list[str]:
    if subject.entry.kind not in LETTERS:
        return [html.escape(str(t)) for t in rows["text"]]
    from workbench.tasks import SYMBOLS

    return [SYMBOLS[i] if i < len(SYMBOLS) else f"#{i}" for i in rows["id"]]


@view("intervene")
def sweep(ask: Source, link: Link) -> Drawing:
    """One kind of change at every layer, or every layer and head, in turn."""
    kind, over = link.text("sweep", "values:how=mean") or "", link.text("over", OVER[0])
    if over not in OVER:
        raise UnknownName("sweep over", over, OVER)
    of = link.text("of", "loss") or "loss"
    if of not in OF:
        raise UnknownName("change of", of, OF)
    unit, about = OF[of]
    answer = link.whole("target")
    if of != "loss" and answer is None:
        raise BadData(f"the change of a token's {of} needs the token: choose one")
    parts, frames = [], []
    for subject in ask.subjects(link):
        options = _asked(link, kind) | ({} if answer is None else {"answer": answer})
        if ask.progress is not None:
            options["progress"] = ask.progress
        found = ask.look("edits.sweep", subject, ask.prompt(link), kind=kind, over=over, **options)
        values = np.asarray(getattr(found, of), dtype="float32")
        rows = [str(n) for n in range(len(values))]
        columns = [str(h) for h in range(values.shape[1])] if values.ndim == 2 else ["all"]
        grid = plots.Grid(values.reshape(len(rows), -1), rows, columns, unit, "layer", "head")
        parts.append((subject.title, grid))
        frames.append(plots.grid_table([(subject.title, grid)]).assign(n=found.n, loss_before=found.loss_before))
    title, under = (
        f"{_words(SWEEPS.get(kind, kind)).capitalize()}, one place at a time",
        f"{about}; one text, no averaging",
    )
    colours = [plots.colour(s.series) for s in ask.subjects(link)]
    figure = plots.grids(parts, title, under) if over == OVER[1] else _by_layer(parts, colours, title, under)
    return Drawing(figure, pd.concat(frames, ignore_index=True))


def _by_layer(parts: Sequence[tuple[str, plots.Grid]], colours: Sequence[str], title: str, under: str) -> go.Figure:
    """Bars over layers, and A - B beside them where both have as many layers."""
    figure = go.Figure()
    for (name, grid), colour in zip(parts, colours, strict=True):
        figure.add_bar(x=list(grid.rows), y=grid.values[:, 0], name=name, marker_color=colour)
    if len(parts) == 2 and len(parts[0][1].rows) == len(parts[1][1].rows):
        minus = parts[0][1].minus(parts[1][1])
        figure.add_bar(
            x=list(minus.rows), y=minus.values[:, 0], name=plots.MINUS, marker_color=plots.colour(plots.MINUS)
        )
    figure.update_xaxes(title_text="layer", type="category")
    figure.update_yaxes(title_text=f"change, {parts[0][1].unit}")
    return plots.dressed(figure, title, under, 320)


@view("intervene")
def patching(ask: Source, link: Link) -> Drawing:
    """Which activations of the first prompt bring its answer back when put into a run on the second."""
    right, wrong, other = link.whole("target"), link.whole("against"), second(link)
    if right is None or wrong is None:
        raise BadData("patching compares two answers: the first prompt's token and the second's")
    site = link.text("site", PATCHED[0]) or PATCHED[0]
    if site not in PATCHED:
        raise UnknownName("site", site, PATCHED)
    parts, said = [], []
    for subject in ask.subjects(link):
        options = {} if ask.progress is None else {"progress": ask.progress}
        found = ask.look(
            "edits.patch_sweep",
            subject,
            ask.prompt(link),
            corrupted=other,
            answers=(right, wrong),
            site=site,
            **options,
        )
        tokens = ask.tokens(subject, other)
        columns = [f"{i}:{t if len(t) <= 12 else t[:11] + '…'}" for i, t in enumerate(tokens)]
        values = np.asarray(found.restored, dtype="float32")
        rows = [str(n) for n in range(len(values))]
        parts.append((subject.title, plots.Grid(values, rows, columns, "restored share", "layer", "token")))
        said.append(
            f"{subject.title}: logit difference {found.clean:+.2f} on the first prompt, {found.corrupted:+.2f} on the second"
        )
    figure = plots.grids(
        parts, f"Patching {site.replace('_', ' ')} from the first prompt into the second",
        "0: as the second prompt, 1: the first one's answer is fully back; one pair of texts",
    )  # fmt: skip
    return Drawing(figure, plots.grid_table(parts), ". ".join(said) + ".")


def _words(text: str) -> str:
    return html.escape(KINDS.get(text, text).replace(";", " and "))
