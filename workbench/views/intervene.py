"""Change something inside a model and see what follows: one prompt before and after, every layer and head in turn."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import plots, prompts
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.views import patches  # noqa: F401  (views of this page)
from workbench.views.answers import Answers, alone, answers_of, likeliest, second
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source

if TYPE_CHECKING:
    from workbench.interventions import Edit

KIND = "values:how=zero"
"""The kind of edit that boxes begin with; nothing is edited where the link does not say."""
LEAKS = "later tokens flow in, so a loss can also fall"
"""What a figure says of edits that mix positions without regard to what comes first."""
OF = {
    "loss": ("nats", "change of the mean loss over the prompt; above 0: it was needed"),
    "logit": (
        "logits",
        "change of the chosen token's logit against the mean logit; below 0: it was pushed up from here",
    ),
    "probability": ("share", "change of the chosen token's probability"),
}
OVER: tuple[prompts.Over, ...] = ("layer", "layer x head")


def presets() -> dict[str, str]:
    """Edits to choose from, in words."""
    from workbench.interventions.edits.kinds import PRESETS  # with it comes torch, which the page announces

    return PRESETS


def kinds() -> dict[str, str]:
    """The same where the number of a coefficient is chosen beside them."""
    return {text: words.replace(" to 0", " to a number") for text, words in presets().items()}


def sweeps() -> dict[str, str]:
    """Those that can be made at each layer in turn."""
    return {text: words for text, words in presets().items() if not text.startswith("patch")}


def parsed(text: str) -> list[Edit]:
    """Edits from their text; raises what the parser refuses."""
    from workbench.interventions.edits.kinds import as_edits

    return as_edits(text)


def has_heads(kind: str) -> bool:
    """Whether a kind of edit can be made in some heads alone."""
    return all(edit.heads for edit in parsed(kind))


def compose(kind: str, layers: Sequence[int], heads: Sequence[int], value: float | None = None) -> str:
    """An edit as text from a kind and where it is made."""
    name, _, options = kind.partition(":")
    parts = {"layer": "/".join(map(str, sorted(layers))), "head": "/".join(map(str, sorted(heads)))}
    parts |= dict(part.split("=") for part in options.split(",") if part)
    if value is not None:
        parts["value"] = f"{value:g}"
    words = ",".join(f"{k}={v}" for k, v in parts.items() if v)
    return f"{name}:{words}" if words else name


def edits(link: Link) -> str:
    """The edits of a link; raises what the parser refuses."""
    text = link.text("edits") or ""
    parsed(text)
    return text


def takes_from_second(text: str) -> bool:
    """Whether any of these edits takes something from a second prompt; none does of a text that is no edits."""
    try:
        return any(edit.reads_other for edit in parsed(text))
    except WorkbenchError:
        return False


def _other(link: Link, text: str) -> str | None:
    """The second prompt, where the edits read one."""
    return second(link) if takes_from_second(text) else None


def _means(text: str) -> str | None:
    """The site whose table of means per token the edits read."""
    return next((edit.reads_means for edit in parsed(text) if edit.reads_means), None)


def _effects(source: Source, link: Link) -> Answers[prompts.Effect]:
    text, prompt = edits(link), source.prompt(link)
    other, means = _other(link, text), _means(text)
    return answers_of(
        source, link, lambda subject: source.query(prompts.edit_effect, subject, prompt, text, other=other, means=means)
    )


@view("intervene")
def effect(source: Source, link: Link) -> Drawing:
    """Loss of every token before and after the edits; as it is where there are none."""
    answers, refused = _effects(source, link)
    sentences, frames, edited = [], [], bool(parsed(edits(link)))
    bars: list[tuple[str, str, list[str], np.ndarray, Any]] = []
    for subject, e in answers:
        tokens = source.tokens(subject, source.prompt(link))[1:]
        names = [f"{i}:{t if len(t) <= 12 else t[:11] + '…'}" for i, t in enumerate(tokens, 1)]
        change = e.loss_after - e.loss_before
        drawn = change if edited else e.loss_before
        bars.append((subject.title, plots.colour(subject.series), names, drawn, (e.loss_before, e.loss_after)))
        columns = {"token": names, "before": e.loss_before, "after": e.loss_after, "change": change}
        frames.append(pd.DataFrame({"model": subject.title, **columns}))
        sentences.append(
            f"{subject.title}: loss {e.loss_before.mean():.3f} nats per token"
            if not edited
            else f"{subject.title}: loss {e.loss_before.mean():.3f} to {e.loss_after.mean():.3f} nats per token, change "
            f"{_mean(change)}; the next token's distribution moved by {e.divergence:.3f} nats (KL){_silenced(e.loss_after)}"
        )
    if len(bars) == 2 and bars[0][2] == bars[1][2]:
        minus = bars[0][3] - bars[1][3]
        bars.append((plots.MINUS, plots.colour(plots.MINUS), bars[0][2], minus, None))
        frames.append(pd.DataFrame({"model": plots.MINUS, "token": bars[0][2], "change": minus}))
        sentences.append(f"{plots.MINUS}: {_mean(minus)}, above 0: it costs A more")
    figure = _by_token(bars, "change of loss, nats" if edited else "loss, nats")
    what = "What the change costs, token by token" if edited else "What each token costs: nothing is changed yet"
    reading = f"{_words(edits(link))}; above 0: predicted worse than before" if edited else "higher: less expected"
    plots.dressed(figure, what, f"{alone(answers)}{reading}; one text", 320 if len(bars) < 3 else 480)
    return Drawing(figure, pd.concat(frames, ignore_index=True), ". ".join(sentences + refused) + ".")


def _mean(change: np.ndarray) -> str:
    """The mean of a change over the tokens of one text, and how far they scatter."""
    if len(change) < 2:
        return f"{change.mean():+.3f} nats (one token)"
    se = change.std(ddof=1) / np.sqrt(len(change))
    return f"{change.mean():+.3f} nats (standard error over the {len(change)} tokens of this one text: {se:.3f})"


def _by_token(bars: Sequence[tuple[str, str, list[str], np.ndarray, Any]], unit: str) -> go.Figure:
    """Bars (name, colour, tokens, numbers, losses): A and B in one panel, their difference beneath."""
    rows = 2 if bars[-1][0] == plots.MINUS else 1
    figure = make_subplots(rows, 1, shared_xaxes=True, vertical_spacing=0.08)
    for name, colour, tokens, change, losses in bars:
        ticks = [html.escape(t, quote=False) for t in tokens]
        row = rows if name == plots.MINUS else 1
        hover = "" if losses is None else "<br>before %{customdata[0]:.3f}, after %{customdata[1]:.3f} nats"
        figure.add_bar(
            x=ticks, y=change, name=name, marker_color=colour, row=row, col=1, showlegend=len(bars) > 1,
            customdata=None if losses is None else np.stack(losses, 1), hovertemplate=f"%{{x}}: %{{y:+.3f}}{hover}<extra></extra>",
        )  # fmt: skip
        every = max(1, -(-len(ticks) // 40))
        shown = {"tickvals": ticks[::every], "tickangle": -90, "tickfont_size": 10}
        figure.update_xaxes(type="category", **shown, row=row, col=1)
    figure.update_yaxes(title_text=unit, row=1, col=1)
    if rows == 2:
        figure.update_yaxes(title_text=f"nats, {plots.MINUS}", row=2, col=1)
    return figure


@view("intervene")
def next_token(source: Source, link: Link) -> Drawing:
    """The likeliest next tokens before and after the edits."""
    answers, refused = _effects(source, link)
    changed = edits(link)
    title = "What comes next, before and after" if changed else "What comes next: nothing is changed yet"
    return likeliest(answers, refused, title, _words(changed) if changed else "")


@view("intervene")
def sweep(source: Source, link: Link) -> Drawing:
    """One kind of change at every layer, or every layer and head, in turn."""
    kind, over = link.text("sweep", KIND) or "", _over(link)
    of = link.text("of", "loss") or "loss"
    if of not in OF:
        raise UnknownName("change of", of, OF)
    unit, about = OF[of]
    answer = link.whole("target")
    if of != "loss" and answer is None:
        raise BadData(f"the change of a token's {of} needs the token: choose one")
    other, means, prompt = _other(link, kind), _means(kind), source.prompt(link)
    answers, refused = answers_of(
        source, link,
        lambda subject: source.query(
            prompts.edit_sweep, subject, prompt, kind, over, answer=answer, other=other, means=means, progress=source.progress
        ),
    )  # fmt: skip
    parts, frames = [], []
    for subject, swept in answers:
        values = np.asarray(getattr(swept, of), dtype="float32")
        rows = [str(n) for n in range(len(values))]
        columns = [str(h) for h in range(values.shape[1])] if values.ndim == 2 else ["all"]
        head = "head" if len(columns) in (1, subject.entry.n_heads) else "key-value head"
        grid = plots.Grid(values.reshape(len(rows), -1), rows, columns, unit, "layer", head)
        parts.append((subject.title, grid))
        frames.append(plots.grid_table([(subject.title, grid)]).assign(n=swept.n, loss_before=swept.loss_before))
    if len(parts) == 2 and parts[0][1].values.shape == parts[1][1].values.shape:
        frames.append(plots.grid_table([(plots.MINUS, parts[0][1].minus(parts[1][1]))]).assign(n=answers[0][1].n))
    words = _words(kind)
    title = f"{words[:1].upper()}{words[1:]}, one place at a time"
    under = f"{alone(answers)}{about}; one text, no averaging"
    colours = [plots.colour(s.series) for s, _ in answers]
    figure = plots.grids(parts, title, under) if over == OVER[1] else _by_layer(parts, colours, title, under)
    return Drawing(figure, pd.concat(frames, ignore_index=True), ". ".join(refused))


def _over(link: Link) -> prompts.Over:
    over = link.text("over", OVER[0])
    if over not in OVER:
        raise UnknownName("sweep over", str(over), OVER)
    return OVER[OVER.index(over)]


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


def _silenced(losses: np.ndarray) -> str:
    """What a loss that no token differs in means: that of a guess among all tokens, which says nothing of the change."""
    same = len(losses) > 1 and float(np.ptp(losses)) < 1e-4
    return "; every token costs the same now: the model guesses, and its loss is no result" if same else ""


def _words(text: str) -> str:
    """Edits in words; what they let in of later tokens is sentences."""
    words = presets().get(text, text.replace(";", " and ")) or "nothing is changed"
    return html.escape(f"{words} ({LEAKS})" if "how=mean" in text or "how=shuffle" in text else words, quote=False)
