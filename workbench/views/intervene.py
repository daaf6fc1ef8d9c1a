"""Edits inside a model: one prompt before and after, one edit at every layer and head, and patching between two prompts."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import plots, prompts
from workbench.errors import BadData, WorkbenchError
from workbench.plots.attention_maps import percentage
from workbench.plots.heat_maps import safe
from workbench.plots.style import BARS, at_least, pale
from workbench.statistics.intervals import confidence, over_seeds
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import RunAtStep, Source, read_alike
from workbench.views.token_names import cell_names, number, quoted, signed_number
from workbench.views.tuned_lens import documents_of

if TYPE_CHECKING:
    from workbench.interventions import Edit

T = TypeVar("T")
Answers = tuple[list[tuple[RunAtStep, T]], list[str]]
KIND = "values:how=zero"
"""The kind of edit that boxes begin with; a link without edits edits nothing."""
DOCUMENTS, DOCUMENTS_OF = 32, {"own": "validation documents", "shipped": "documents of the shipped text"}
LEAKS = "later tokens leak in, so a loss can also fall"
OF = {
    "loss": ("nats", "change of the mean loss; above 0: the text is predicted worse with the edit, below 0: better"),
    "logit": ("logits", "change of the token's logit minus the mean logit; below 0: the place raised it"),
    "probability": ("share", "change of the token's probability"),
}
OVER: tuple[prompts.Over, ...] = ("layer", "layer x head")
PATCHED = {
    "stream": "residual stream", "attn_out": "attention output", "mlp_out": "MLP output", "v": "values", "z": "head outputs",
}  # fmt: skip
MAX_TOKENS, FEW_TOKENS = 14, 6  # next tokens that are drawn; beneath a map
AXIS, EACH = 80, 18  # pixels: of the axis below, of a token's bars
SMALL, LEAST = 5e-4, 3  # a probability that rounds to 0.0 %, and the fewest tokens drawn without regard to it
MAP = 240  # pixels of the patching map


# ---- edits as text ---------------------------------------------------------------------------------------------------


def presets() -> dict[str, str]:
    """Edits to choose from, in words."""
    from workbench.interventions.edits.kinds import PRESETS  # imports torch

    return PRESETS


def kinds() -> dict[str, str]:
    """The presets, for boxes with a slider for the coefficient."""
    return {text: words.replace(" to 0", " to a number") for text, words in presets().items()}


def sweeps() -> dict[str, str]:
    """The presets that can be applied at each layer in turn."""
    return {text: words for text, words in presets().items() if not text.startswith("patch")}


def parsed(text: str) -> list[Edit]:
    """Parse edits; raises `WorkbenchError` for invalid text."""
    from workbench.interventions.edits.kinds import as_edits

    return as_edits(text)


def has_heads(kind: str) -> bool:
    """Return True if a kind of edit can be restricted to heads."""
    return all(edit.heads for edit in parsed(kind))


def edit_text(kind: str, layers: Sequence[int], heads: Sequence[int], value: float | None = None) -> str:
    """An edit as text, from a kind, its layers and heads, and the value of a coefficient."""
    name, _, options = kind.partition(":")
    parts = {"layer": "/".join(map(str, sorted(layers))), "head": "/".join(map(str, sorted(heads)))}
    parts |= dict(part.split("=") for part in options.split(",") if part)
    if value is not None:
        parts["value"] = f"{value:g}"
    words = ",".join(f"{k}={v}" for k, v in parts.items() if v)
    return f"{name}:{words}" if words else name


def everywhere(edit: str) -> str:
    """An edit as text, without its layers and heads."""
    name, _, options = edit.partition(":")
    words = ",".join(part for part in options.split(",") if part.partition("=")[0] not in ("layer", "head"))
    return f"{name}:{words}" if words else name


def trained_coefficients(source: Source, link: Link, kind: str) -> list[tuple[str, int, float]]:
    """Return the trained coefficients (source, layer, value) on an edit's path in model A, without coefficients of single tokens."""
    options = dict(part.split("=") for part in kind.partition(":")[2].split(",") if part)
    return source.query(_trained, source.subjects(link)[0], source.prompt(link), options.get("path", ""))


def _trained(model: Any, _: prompts.Prompt, path: str) -> list[tuple[str, int, float]]:
    from workbench.interventions import coefficients

    known = [(c.path, c.source, c.layer[0], c.value) for c in coefficients(model)]
    path = path or next((p for p in ("v", "output") if p in {p for p, *_ in known}), "")
    return [(of, layer, value) for p, of, layer, value in known if p == path]


def takes_from_second(text: str) -> bool:
    """Return True if an edit reads a second prompt; False for invalid text."""
    try:
        return any("other" in edit.reads for edit in parsed(text))
    except WorkbenchError:
        return False


def _second(link: Link) -> str:
    text = link.text("other")
    if not text:
        raise BadData("this edit reads a second prompt: enter one")
    return text


def _inputs(link: Link, text: str) -> dict[str, Any]:
    """Further inputs of the edits: the second prompt, and the site whose means per token they use."""
    means = next((edit.target for edit in parsed(text) if "means" in edit.reads), None)
    return {"other": _second(link) if takes_from_second(text) else None, "means": means}


def _words(text: str) -> str:
    """Edits in words, with a warning for edits that mix positions without regard to their order."""
    words = " and ".join(map(edit_in_words, filter(None, text.split(";")))) or "no edit"
    return html.escape(f"{words} ({LEAKS})" if "how=mean" in text or "how=shuffle" in text else words, quote=False)


def edit_in_words(edit: str) -> str:
    """A preset's words, with the edit's own value, layers and heads; the edit itself if no preset has its other options."""
    name, _, options = edit.partition(":")
    given = dict(part.partition("=")[::2] for part in options.split(",") if part)
    places = [f"{key} {given.pop(key)}" for key in ("layer", "head") if key in given]
    kind = ",".join(f"{key}={'0' if key == 'value' else value}" for key, value in given.items())
    words = presets().get(f"{name}:{kind}".rstrip(":"))
    return edit if words is None else ", ".join([words.replace(" to 0", f" to {given.get('value', 0)}"), *places])


# ---- answers of A and B ----------------------------------------------------------------------------------------------


def _answers(source: Source, link: Link, question: Callable[[RunAtStep], T]) -> Answers[T]:
    """The answers of A and B, and why one of them has none; raises if neither has."""
    answers, refused = list[tuple[RunAtStep, T]](), list[str]()
    subjects = source.subjects(link)
    for subject in subjects:
        try:
            answers.append((subject, question(subject)))
        except WorkbenchError as reason:
            if len(subjects) == 1 or len(refused) == 1:
                raise
            refused.append(f"{subject.title} is left out: {reason}")
    return answers, refused


def _alone(answers: Sequence[tuple[RunAtStep, Any]]) -> str:
    """The name of a single model, which no legend gives."""
    return f"{html.escape(answers[0][0].title)}; " if len(answers) == 1 else ""


def _likeliest(answers: Answers[prompts.Effect], title: str, change: str, most: int = MAX_TOKENS) -> Drawing:
    """Bars of the `most` likeliest next tokens per model, before and after `change` (in words, may be empty)."""
    effects, refused = answers
    tops = [[e.top_before.head(most - most // 3), e.top_after, e.top_before] for _, e in effects]
    own = [pd.concat(top).drop_duplicates("id").head(most) for top in tops]
    lengths = {len(e.before) for _, e in effects}
    alike = len(effects) == 2 and len(lengths) == 1 and read_alike(*(s.entry for s, _ in effects))
    if alike:  # the same tokens for both, so that they can be compared
        both = pd.concat([r.head(most // 2) for r in own]).drop_duplicates("id")
        own = [both.assign(before=e.before[both["id"]], after=e.after[both["id"]]) for _, e in effects]
    large = [(rows[["before", "after"]] >= SMALL).any(axis=1).to_numpy() for rows in own]
    large = [large[0] | large[1]] * 2 if alike else large
    own = [rows[shown | (np.arange(len(rows)) < LEAST)] for rows, shown in zip(own, large, strict=True)]
    panels = [(s.title, s.series, rows.assign(model=s.title)) for (s, _), rows in zip(effects, own, strict=True)]
    if alike:
        a, b = (rows[["before", "after"]] for _, _, rows in panels)
        panels.append((plots.MINUS, plots.MINUS, panels[0][2].assign(model=plots.MINUS, **(a - b))))
    top = max(rows[["before", "after"]].to_numpy(float).max() for name, _, rows in panels if name != plots.MINUS)
    figure = make_subplots(
        1, len(panels), subplot_titles=[html.escape(p[0]) for p in panels] if len(panels) > 1 else None,
        horizontal_spacing=0.04 if alike else 0.16,
    )  # fmt: skip
    for column, (name, series, rows) in enumerate(panels, 1):
        names = plots.unique([safe(t) for t in rows["text"]])
        bars = {"before": pale(series, 0.4), "after": plots.colour(series)}
        minus = name == plots.MINUS  # a difference of probabilities is in percentage points
        scale, unit = (100, f"probability, {plots.MINUS} (points)") if minus else (1, "probability")
        before, after = ([percentage(p, minus) for p in rows[when]] for when in ("before", "after"))
        for when, colour in bars.items() if change else [("after", bars["after"])]:
            figure.add_bar(
                y=names, x=scale * rows[when], orientation="h", name=f"{name}, {when}", showlegend=False,
                marker={"color": colour, "line": {"color": bars["after"], "width": 1}},
                hovertemplate=f"%{{y}}: %{{x:{'.2f' if minus else '.2%'}}} {when * bool(change)}<extra></extra>", row=1, col=column,
            )  # fmt: skip
        ends = scale * rows[["before", "after"]].max(axis=1).clip(lower=0)  # right of both bars
        shares = [f"{b} → {a}" for b, a in zip(before, after, strict=True)] if change else after
        figure.add_scatter(
            y=names, x=ends, text=[f" {s}" for s in shares], mode="text", textposition="middle right", textfont_size=11, cliponaxis=False,
            hoverinfo="skip", showlegend=False, row=1, col=column,
        )  # fmt: skip
        matched = {"matches": "x"} if column > 1 and not minus else {}
        low, high = min(0.0, 1.1 * scale * rows[["before", "after"]].to_numpy(float).min()), float(ends.max())
        span = [low, high + 0.8 * (high - low)] if minus else [0, 1.5 * top]
        figure.update_xaxes(
            title_text=unit, tickformat="" if minus else ".0%", range=span, row=1, col=column, **matched
        )
        figure.update_yaxes(showticklabels=column == 1 or not alike, row=1, col=column)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    legend = f"upper bar: before; lower bar: after; {change}; " if change else ""
    plots.dressed(figure, title, f"{_alone(effects)}{legend}one text", AXIS + EACH * max(len(p[2]) for p in panels))
    figure.update_yaxes(ticksuffix="  ")
    if len(panels) > 1:
        at_least(figure, BARS * len(panels))
    table = pd.concat([rows for _, _, rows in panels], ignore_index=True)
    return Drawing(figure, table, ". ".join(refused))


# ---- edits -----------------------------------------------------------------------------------------------------------


def _effects(source: Source, link: Link) -> tuple[str, Answers[prompts.Effect]]:
    text, prompt = link.text("edits") or "", source.prompt(link)
    inputs = _inputs(link, text)
    return text, _answers(source, link, lambda s: source.query(prompts.edit_effect, s, prompt, text, **inputs))


@view("intervene")
def effect(source: Source, link: Link) -> Drawing:
    """Loss of every token before and after the edits; the plain loss without edits."""
    edits, (answers, refused) = _effects(source, link)
    sentences, frames, edited = [], [], bool(parsed(edits))
    bars: list[tuple[str, str, list[str], np.ndarray, Any]] = []
    for subject, e in answers:
        names = cell_names(source.tokens(subject, source.prompt(link))[1:], 1)
        change = e.loss_after - e.loss_before
        drawn = change if edited else e.loss_before
        bars.append((subject.title, plots.colour(subject.series), names, drawn, (e.loss_before, e.loss_after)))
        columns = {"token": names, "before": e.loss_before, "after": e.loss_after, "change": change}
        frames.append(pd.DataFrame({"model": subject.title, **columns}))
        before, after = e.loss_before.mean(), e.loss_after.mean()
        sentences.append(
            f"{subject.title}: mean loss {number(before)} to {number(after)} nats, change {_mean(change)}; "
            f"KL divergence of the distribution after the last token {e.divergence:.3g} nats"
            if edited
            else f"{subject.title}: mean loss {number(before)} nats per token"
        )
    if len(bars) == 2 and bars[0][2] == bars[1][2]:
        minus = bars[0][3] - bars[1][3]
        bars.append((plots.MINUS, plots.colour(plots.MINUS), bars[0][2], minus, None))
        frames.append(pd.DataFrame({"model": plots.MINUS, "token": bars[0][2], "change": minus}))
        sentences.append(
            f"{plots.MINUS}: {_mean(minus)}, above 0: {'a larger change' if edited else 'a larger loss'} in A"
        )
    if edited:
        sentences.append(_one_text(len(answers[0][1].loss_after)))
    figure = _by_token(bars, "loss change (nats)" if edited else "loss (nats)")
    title = "Loss change per token" if edited else "Loss per token, no edit"
    reading = f"{_words(edits)}; above 0: predicted worse than before" if edited else "higher: less expected"
    plots.dressed(figure, title, f"{_alone(answers)}{reading}; one text", 320 if len(bars) < 3 else 480)
    return Drawing(figure, pd.concat(frames, ignore_index=True), ". ".join(sentences + refused) + ".")


def _one_text(tokens: int) -> str:
    count = f"{tokens} predicted token{'s' * (tokens != 1)}"
    return f"This is one text with {count}: on other texts the change can differ in size and sign"


def _mean(change: np.ndarray) -> str:
    """Mean change over the tokens of one text, with its standard error."""
    if len(change) < 2:
        return f"{change.mean():+.3g} nats (one token)"
    se = change.std(ddof=1) / np.sqrt(len(change))
    return f"{change.mean():+.3g} nats (SE over the {len(change)} tokens of this text: {se:.3g})"


def _by_token(bars: Sequence[tuple[str, str, list[str], np.ndarray, Any]], unit: str) -> go.Figure:
    """Bars (name, colour, tokens, numbers, losses): A and B in one panel, their difference beneath."""
    rows = 2 if bars[-1][0] == plots.MINUS else 1
    figure = make_subplots(rows, 1, shared_xaxes=True, vertical_spacing=0.08)
    for name, colour, tokens, change, losses in bars:
        ticks = [html.escape(t, quote=False) for t in tokens]
        row = rows if name == plots.MINUS else 1
        hover = "" if losses is None else "<br>before %{customdata[0]:.3g}, after %{customdata[1]:.3g} nats"
        figure.add_bar(
            x=ticks, y=change, name=name, marker_color=colour, row=row, col=1, showlegend=len(bars) > 1,
            customdata=None if losses is None else np.stack(losses, 1), hovertemplate=f"%{{x}}: %{{y:+.3g}}{hover}<extra></extra>",
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
    edits, answers = _effects(source, link)
    return _likeliest(
        answers, "Next token, before and after" if edits else "Next token", _words(edits) if edits else ""
    )


@view("intervene")
def on_documents(source: Source, link: Link) -> Drawing:
    """Change of the mean loss under the edits on documents, with the interval of its mean."""
    edits, figure, frames = link.text("edits") or "", go.Figure(), []
    if not parsed(edits) or takes_from_second(edits):
        raise BadData("documents are read for edits of one text: choose an edit that reads no second text")
    answers, sentences = _answers(source, link, lambda subject: changes_on_documents(source, subject, edits))
    measured = [(s.title, s.series, changes, DOCUMENTS_OF[text]) for s, (_, text, changes) in answers]
    if len(answers) == 2 and answers[0][1][0] == answers[1][1][0]:  # the same documents
        measured.append((plots.MINUS, plots.MINUS, measured[0][2] - measured[1][2], measured[0][3]))
    for name, series, changes, text in measured:
        mean = over_seeds(changes)
        figure.add_scatter(
            x=changes, y=[name] * len(changes), mode="markers", marker={"color": pale(series, 0.4), "size": 7}, showlegend=False,
            customdata=np.arange(len(changes)), hovertemplate="document %{customdata}: %{x:+.3g} nats<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=[mean.value], y=[name], mode="markers", marker={"color": plots.colour(series), "size": 9, "symbol": "diamond"},
            error_x={"array": [mean.high - mean.value], "thickness": 2}, showlegend=False,
            hovertemplate="mean: %{x:+.3g} nats<extra></extra>",
        )  # fmt: skip
        frames.append(pd.DataFrame({"model": name, "document": np.arange(len(changes)), "change": changes}))
        sentences.append(
            f"{name}: mean change {signed_number(mean.value)} nats ({confidence()} interval {number(mean.low)} to {number(mean.high)}, "
            f"{mean.n} {text})"
        )
    figure.update_xaxes(title_text="change of the mean loss (nats)", zeroline=True)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    under = f"dot: a document; diamond: mean, whisker: {confidence()} interval; above 0: predicted worse"
    plots.dressed(figure, "Loss change on documents", f"{_words(edits)}; {under}", AXIS + 50 * len(measured))
    return Drawing(figure, pd.concat(frames, ignore_index=True), ". ".join(sentences) + ".")


def changes_on_documents(source: Source, subject: RunAtStep, edits: str) -> tuple[list[list[int]], str, np.ndarray]:
    """Ids of the documents, their text, and the change of the mean loss of each."""
    entry, means = subject.entry, _inputs(Link("intervene", {}), edits)["means"]

    def measure() -> Any:
        ids, text = documents_of(source, subject, None, None)
        ids, model, changes = [list(map(int, row)) for row in ids[:DOCUMENTS]], source.model(subject), []
        for document in ids:
            changes.append(prompts.edit_effect(model, document, edits, means=means, top=1).change)
            if source.progress is not None:
                source.progress(len(changes), len(ids))
        return ids, text, np.array(changes)

    ids, text, changes = source.keep(("edit on documents", entry.path, entry.stamp, subject.step, edits), measure)
    return ids, text, changes


# ---- sweeps ----------------------------------------------------------------------------------------------------------


@view("intervene")
def sweep(source: Source, link: Link) -> Drawing:
    """One kind of edit at every layer, or at every layer and head, in turn."""
    kind, of, answer = link.text("sweep", KIND) or "", link.choice("of", OF, kind="change of"), link.whole("target")
    over: prompts.Over = "layer" if link.choice("over", OVER, kind="sweep over") == "layer" else "layer x head"
    unit, about = OF[of]
    if of != "loss" and answer is None:
        raise BadData(f"the change of a token's {of} needs the token: choose one")
    inputs, prompt = _inputs(link, kind), source.prompt(link)
    answers, refused = _answers(
        source, link,
        lambda subject: source.query(
            prompts.edit_sweep, subject, prompt, kind, over, answer=answer, progress=source.progress, **inputs
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
    alike = len(parts) == 2 and parts[0][1].values.shape == parts[1][1].values.shape
    if alike:
        frames.append(plots.grid_table([(plots.MINUS, parts[0][1].minus(parts[1][1]))]).assign(n=answers[0][1].n))
    words = _words(kind)
    title, under = f"{words[:1].upper()}{words[1:]}, one place at a time", f"{_alone(answers)}{about}; one text"
    if over == OVER[1]:
        figure = plots.grids(parts, title, under)
    else:
        bars = [(name, grid, plots.colour(s.series)) for (name, grid), (s, _) in zip(parts, answers, strict=True)]
        bars += [(plots.MINUS, parts[0][1].minus(parts[1][1]), plots.colour(plots.MINUS))] if alike else []
        figure = go.Figure(
            [go.Bar(x=list(g.rows), y=g.values[:, 0], name=name, marker_color=colour) for name, g, colour in bars]
        )
        figure.update_xaxes(title_text="layer", type="category")
        plots.dressed(figure.update_yaxes(title_text=f"change ({unit})"), title, under, 320)
    sentences = [*refused, _one_text(answers[0][1].n)]
    names = [name for subject, _ in answers for name in source.model(subject).hook_dict]
    read = {
        m[2]
        for name in names
        if (m := re.fullmatch(r"blocks\.(\d+)\.attn\.source\.(\d+)\.hook_v", name)) and m[1] != m[2]
    }
    if read and kind.startswith("values"):
        sentences.append(
            f"Later layers read the values of layer {', '.join(sorted(read))} too, so its change includes theirs"
        )
    return Drawing(figure, pd.concat(frames, ignore_index=True), ". ".join(sentences) + ".")


# ---- patching --------------------------------------------------------------------------------------------------------


def _patch_sweep(source: Source, link: Link) -> tuple[str, Answers[prompts.PatchSweep]]:
    """The patched site, and the share of the answer that each activation restores."""
    right, wrong, other = link.whole("target"), link.whole("against"), _second(link)
    if right is None or wrong is None:
        raise BadData("patching compares two answers: choose a token for each prompt")
    site = link.choice("site", PATCHED)
    return site, _answers(
        source, link,
        lambda subject: source.query(
            prompts.patch_sweep, subject, source.prompt(link), other, (right, wrong), site, progress=source.progress
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class PatchedActivation:
    """A layer and a position; the number of layers, and the largest share that each position restores."""

    layer: int
    position: int
    layers: int
    restored: np.ndarray


def patched_activation(source: Source, link: Link) -> PatchedActivation:
    """The link's activation, else the one that restores most."""
    (_, first), *_ = _patch_sweep(source, link)[1][0]
    values = np.nan_to_num(first.restored, nan=-np.inf)
    best = np.unravel_index(values.argmax(), values.shape)
    layer, position = (link.whole(key, int(n)) for key, n in zip(("layer", "position"), best, strict=True))
    if layer not in range(len(values)) or position not in range(values.shape[1]):
        raise BadData(
            f"layer {layer}, position {position}: there are {values.shape[0]} layers and {values.shape[1]} positions"
        )
    return PatchedActivation(int(layer or 0), int(position or 0), len(values), values.max(0).clip(0))


@view("intervene")
def patching(source: Source, link: Link) -> Drawing:
    """The share of the first answer that each activation restores when it is patched into the second prompt."""
    (site, (answers, refused)), at = _patch_sweep(source, link), patched_activation(source, link)
    parts, leads = [], []
    for subject, result in answers:
        columns = cell_names(source.tokens(subject, _second(link)))
        values = np.asarray(result.restored, dtype="float32")
        rows = [str(n) for n in range(len(values))]
        mark = (at.layer, at.position) if at.layer < len(rows) and at.position < len(columns) else None
        parts.append((subject.title, plots.Grid(values, rows, columns, "restored share", "layer", "token", mark=mark)))
        leads.append(
            f"{subject.title}: {result.clean:+.2f} after the first text, {result.corrupted:+.2f} after the second"
        )
    answer, other = map(quoted, answers[0][1].answers)
    under = f"logit difference of {answer} and {other}; {'; '.join(map(html.escape, leads))}; 1: fully restored"
    under += f"; row {len(rows) - 1}: the final norm's input" if site == "stream" else ""
    figure = plots.grids(parts, f"Patching: {PATCHED[site]}", f"{under}; one pair of texts", height=MAP)
    return Drawing(figure, plots.grid_table(parts), ". ".join(refused))


@view("intervene")
def patched(source: Source, link: Link) -> Drawing:
    """The likeliest tokens after the second prompt, before and after one activation is patched."""
    (site, _), at = _patch_sweep(source, link), patched_activation(source, link)
    edit = f"patch:layer={at.layer},site={site},position={at.position}"
    first, other = source.prompt(link), _second(link)
    answers = _answers(source, link, lambda s: source.query(prompts.edit_effect, s, other, edit, other=first))
    token = source.tokens(source.subjects(link)[0], other)[at.position]
    where = f"{PATCHED[site]} of layer {at.layer} at token {at.position}, {quoted(token)}, from the first text"
    return _likeliest(answers, "Next token of the second text", where, FEW_TOKENS)
