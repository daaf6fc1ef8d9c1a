"""Start: the main result, one model at a glance, the runs of the folder, verdicts on claims, and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from workbench import plots
from workbench.claims import QUESTIONS, STATUSES
from workbench.claims.verdict import in_one_sentence, judged_by_seed
from workbench.errors import WorkbenchError
from workbench.models.architecture_names_and_colours import ARCHITECTURES, architecture_label
from workbench.places import absent_studies, module
from workbench.plots.style import with_signs
from workbench.runs.catalogue import Entry
from workbench.statistics.copying_and_sink_steps import SINK, formation_steps, sink_steps
from workbench.statistics.intervals import confidence
from workbench.statistics.sink_thresholds import SINK_MASS
from workbench.views import Link, Source, main_result, pins, start, start_runs
from workbench.views.page_links import PAGES
from workbench.views.registered_views import ONE_SEED
from workbench.views.source import run_name

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import background_tasks
from .. import url_widgets as widgets
from ..cached_source import cached_source, root
from ..elements.figure import Point
from ..figure_menu import Drawn, show
from ..import_and_measure import measure_box, open_box
from ..model_selection import choose_link
from ..page_layout import FIGURE_PX, controls, figures_side_by_side, page, toolbar, wait_for_own_runs
from ..tables import number_columns, table_buttons

ABOUT = (
    "How transformers use **values** (what attention carries from token to token), and what a value residual changes. Every page "
    "shows the model selected in its header, or two models side by side."
)
WORDS = {
    "Value": "what attention carries from one token to a later one; the attention weight says how much of it.",
    "Value residual": "a shortcut that adds the first layer's values, made from the tokens alone, to the values of deeper layers.",
    "Copying": "predicting a repeated sequence by attending to what followed last time (an *induction head*).",
    "Attention sink": "a head that attends to the first token when it has nothing to do, because its weights must sum to 1.",
    "Paired seeds": "models with equal initial weights and equal batches, compared seed by seed.",
    "Unresolved": "the seeds cannot tell the models apart; this does not prove them equal.",
}
VERDICTS = (
    "Published claims about value residuals, and what the runs here say of each. Click a claim to read it. Only stored records are "
    "judged; nothing is measured. A verdict needs three seeds, and is Holm-corrected over all claims."
)
XRAY = "Each answer has its number, the number at random init or under a baseline, and its standard error over documents (±)."
BOXES = "".join(
    f'<rect x="{110 + 90 * i}" y="14" width="66" height="26" rx="4" fill="none" stroke="#808080"/>'
    f'<text x="{143 + 90 * i}" y="31" text-anchor="middle" fill="#767676">{n}</text>'
    f'<path d="M{176 + 90 * (i - 1)} 27 h24" stroke="#808080"/>'
    + (f'<path d="M143 40 V58 H{143 + 90 * i} V44" fill="none" stroke="#CC5700" stroke-width="2"/>' if i else "")
    for i, n in enumerate(("layer 0", "layer 1", "…", "last"))
)
DIAGRAM = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="90 0 400 84" width="440" height="92" font-family="sans-serif" font-size="12">'
    '<title>The values of the first layer are mixed into the values of every later layer</title>'  # grey: on light and dark pages
    f'{BOXES}<text x="110" y="76" fill="#767676">first values, mixed into every later layer</text></svg>'
)  # fmt: skip
INTRODUCTION = (
    "Attention carries **values** from earlier tokens to later ones. A **value residual** (ResFormer) mixes the values of the "
    "first layer, which are made from the tokens alone, into the values of every later layer; these pages show what that changes."
)
NEW = dict.fromkeys(("set", "a", "b", "step", "step_b", "compare", "find", "models", "by", "claim", "alone", "shipped"))
"""What the first card leaves behind: it shows the default experiment."""
CARDS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("See a result", "Loss of models with and without the shortcut, seed by seed.", "start", NEW | {"show": "finding"}),
    ("Look into a model", "Attention, predictions and values of a trained model on a text of yours.", "attention", {}),
    ("Open yours", "A checkpoint from this machine: measure it and compare it with the models here.", "start", {"show": "here"}),
)  # fmt: skip
LIVE = 2  # seconds between looks at a running demo
OF_STUDIES = "The studies that ship with the project, in place of the runs of your folder"
LONG = 300  # characters of a verdict, beyond which the demo has one sentence of it
OVERVIEW_PX, COMPARED_PX = 640, 900  # least width of the overview of claims, of a figure of two models


def start_page(link: Link) -> None:
    parts, first = _parts()
    with controls():
        shown = widgets.segments("Part", "show", parts, first, show=main_result.PARTS.__getitem__)
    if "show" not in st.query_params:
        words, picture = st.columns([3, 2], vertical_alignment="center")
        words.markdown(INTRODUCTION)
        picture.image(
            DIAGRAM, width=440, alt="The values of the first layer are mixed into the values of every later layer"
        )
        of_demo = start.only_demo(cached_source())  # whose own runs say nothing of ResFormer
        losses = (
            e.group for e in cached_source().shipped().entries if of_demo and e.name.startswith("losses140_tuned-")
        )
        result = {"set": next(losses, None)}
        for column, (title, text, page_name, changes) in zip(st.columns(3), CARDS, strict=True):
            with column.container(border=True):
                changes = changes | result if changes.get("show") == "finding" else changes
                widgets.page_link(page_name, title, ":material/arrow_forward:", **changes)
                st.caption(text)
    draw = {"finding": _finding, "model": _model, "here": _runs, "verdicts": _verdicts, "demo": _demo}[shown]
    draw(link.but(show=shown))


def _select(name: str) -> Link | None:
    """Draw the selection that the shown part uses: models for one model, an experiment for the main result."""
    if not cached_source().catalogue().entries:
        return None
    parts, first = _parts()
    asked = st.query_params.get("show")
    shown = asked if asked in parts else first
    if shown in ("here", "demo") or (shown == "verdicts" and st.query_params.get("alone") != "1"):
        return choose_link(name, uses="nothing")
    # verdicts are about the experiment of the main result, unless the address names a model
    of_result = shown == "finding" or (shown == "verdicts" and "a" not in st.query_params)
    result = _main_result() if of_result else None
    return choose_link(
        name, uses="models" if shown == "model" else "experiment", experiment=result.group if result else None
    )


def _parts() -> tuple[list[str], str]:
    """The parts that have something to show, and the one shown first."""
    source = cached_source()
    status = start.demo_status(source.folder)
    parts = [p for p in main_result.PARTS if p != "demo" or status or start.demo_models(source, "sinks")]
    if (status and status.running) or start.only_demo(source):
        return parts, "demo"
    if _main_result():
        return parts, "finding"
    return parts, "model" if any(e.steps for e in source.listed()) else "here"


def _main_result() -> main_result.Finding | None:
    try:
        return main_result.finding(cached_source(), widgets.current_link("start"))
    except WorkbenchError:
        return None


def _glossary(architectures: set[str]) -> None:
    with st.expander("Glossary"):
        models = {a.label: f"{a.plain}." for name, a in ARCHITECTURES.items() if name in architectures}
        st.markdown("\n".join(f"- **{word}**: {meaning}" for word, meaning in (WORDS | models).items()))


# ---- main result -----------------------------------------------------------------------------------------------------


def _finding(link: Link) -> None:
    result = main_result.finding(cached_source(), link)
    st.header(widgets.escaped(main_result.headline(result)), anchor=False)
    if result.seeds[1] < 2:
        st.badge(ONE_SEED, icon=":material/warning:", color="orange")
    with figures_side_by_side():
        for view in (main_result.finding_differences, main_result.finding_curves):
            with st.container():
                show(view, link)
    compared = result.runs
    rows = main_result.logged_rows(cached_source(), compared, [result.outcome.quantity])
    st.session_state["drawn"].append(Drawn(link, rows, {}))
    with st.container(horizontal=True, key="next"):
        widgets.page_link("training", "Training curves", ":material/trending_down:", set=result.group)
        widgets.page_link("attention", "Attention maps", ":material/grid_on:")
        shipped, words = "1" if all(e.shipped for e in compared) else None, "Verdicts on all claims"
        claim = "lower_loss" if result.outcome is main_result.LOSS else None
        widgets.page_link(
            "start", words, ":material/gavel:", set=result.group, show="verdicts", shipped=shipped, claim=claim
        )
    _glossary({name.split(" ")[0] for name in result.intervals})


# ---- one model -------------------------------------------------------------------------------------------------------


def _model(link: Link) -> None:
    source = cached_source()
    subjects = source.subjects(link)
    absent = [(subject, names) for subject in subjects if (names := start.missing(source, subject))]
    for subject, names in absent:  # where it can be seen, then a button and the command that measure the rest
        entry, words = subject.entry, ", ".join(map(widgets.spaced, names))
        with st.container(horizontal=True, vertical_alignment="center", key=f"opened_{subject.tag}"):
            counts = f"{entry.n_layers} layers, {entry.n_heads} heads"
            opened = "Opened: " if entry.imported else ""
            st.markdown(f"{opened}**{widgets.escaped(subject.name)}**, {counts}.", width="content")
            for name in ("attention", "prompt", "depth"):
                icon, step = f":material/{PAGES[name].icon}:", str(subject.step)
                widgets.page_link(name, PAGES[name].title, icon, set=entry.group, a=entry.name, step=step)
        st.markdown(f"**Measure it.** This page shows {words}, which are not measured yet.")
        plan = start.xray_plan(entry, subject.step)
        if measure_box(f"{entry.name}_{subject.step}", [entry], plan, "Measure", start.xrays.DOCUMENTS):
            st.rerun()
        st.caption("Shipped runs are read-only. Measure it in a terminal:" if entry.shipped else "Or in a terminal:")
        st.code(start.xray_command(entry, subject.step), language=None, wrap_lines=True)
    if not absent:
        with figures_side_by_side(COMPARED_PX if len(subjects) > 1 else FIGURE_PX):
            for answer in start.XRAY.values():
                with st.container(border=True):
                    show(answer, link, about=XRAY)


# ---- runs ------------------------------------------------------------------------------------------------------------


def _runs(link: Link) -> None:
    source = cached_source()
    catalogue, table = source.catalogue(), start_runs.runs_table(source)
    writing = int((table["state"] == "being written now").sum())
    absent = ", ".join(absent_studies())
    lacking = f"; {absent} are not installed, `workbench data` adds them" if absent else ""
    where = f"in `{root()}`" if source.own() else f"shipped with the project (`{root()}` has none{lacking})"
    st.markdown(
        f"**{len(table)} runs** {where}{f', {writing} being written now' if writing else ''}. "
        "Select a row for its pages, two rows to compare them."
    )
    if source.own() and (ready := [e for e in catalogue.entries if e.shipped and e.steps]):
        with st.container(horizontal=True, vertical_alignment="center", key="shipped_models"):
            st.markdown("Shipped models, on all pages and not in the table:", width="content")
            for e in ready:
                label, icon = f"{run_name(e)} (text)", ":material/radiology:"
                widgets.page_link("start", label, icon, set=e.group, a=e.name, step=None, show="model")
    open_box()
    asked = next((e for e in catalogue.entries if e.name == st.query_params.get("a")), None)
    if asked is not None:
        with st.container(horizontal=True, vertical_alignment="center", key="next"):
            without = "" if asked.steps else " has no weights here, but numbers"
            st.markdown(f"**{widgets.escaped(asked.name)}**{without}:", width="content")
            if asked.steps:
                widgets.page_link("start", "This model", ":material/radiology:", show="model")
            widgets.page_link("training", "Training", ":material/trending_down:", set=asked.group, find=asked.name)
            widgets.page_link("depth", "Measures", ":material/layers:")
            widgets.page_link("start", "Verdicts", ":material/gavel:", show="verdicts", alone="1")
            _tags_of(asked.name)
    tags = pins.run_tags(source.folder)
    with toolbar("options"):
        by = widgets.choose_many("Group by", "group", start_runs.GROUPABLE, (), placeholder="each run", width=320)
        wanted = set[str]()
        if tags:
            table["tags"] = table["run"].map(tags).fillna("")
            every = sorted({tag for words in tags.values() for tag in words.split()})
            wanted = set(st.pills("Tags", every, selection_mode="multi", key="w_tags") or ())
            table = table[[wanted <= {*words.split()} for words in table["tags"]]]
        st.session_state["runs_shown"] = list(table["run"])
        table = start_runs.grouped_runs(table, by) if by else table
        with st.popover("Files", icon=":material/download:"):
            table_buttons(table.drop(columns="group"), "runs")
    event: Any = st.dataframe(
        table.drop(columns="group"), hide_index=True, width="stretch", height=min(600, 40 + 35 * len(table)),
        key="grouped" if by else "runs",
        on_select="rerun" if by else take_run, selection_mode="multi-row",
        placeholder="", alt="Runs of the folder", column_config=number_columns(table),
        column_order=[str(c) for c in table if c not in ("experiment", "group")] + ["experiment"] if by else None,
    )  # fmt: skip
    rows = table.iloc[[i for i in event.selection.rows if i < len(table)]]
    if "model" in by and len(rows):
        group = rows["group"].iloc[0]
        labels = set(rows.loc[rows["group"] == group, "model"])
        series = dict.fromkeys(e.series for e in catalogue.groups[group] if architecture_label(e.series) in labels)
        st.page_link("screens/training.py", label="Selected models on Training", icon=":material/trending_down:",
                     query_params={"set": group, "models": ",".join(series)})  # fmt: skip
    elif not by and len(rows) == 2:
        a, b = rows["run"]
        compare, icon = {"a": a, "b": b, "compare": "1", "set": rows["group"].iloc[0]}, ":material/compare_arrows:"
        st.page_link("screens/depth.py", label=f"Compare {a} and {b} on Depth", icon=icon, query_params=compare)
    elif not by and len(rows) > 2:
        st.caption("Select two runs to compare them, or group by model to draw several models.")
    if catalogue.problems:
        st.warning(f"{len(catalogue.problems)} folders look like runs and cannot be read; see the foot of the page.")
    st.caption("Final loss: last validation loss (nats), the mean over domains. Measures: number of stored measures.")
    if by:
        st.caption(
            f"±: half of the {confidence()} interval over seeds. Runs of different experiments form different groups."
        )
        with_loss = table.loc[table["final loss"].notna(), "group"]
        if not wanted and len(with_loss):  # the view has the runs of all tags
            group = link.text("set") if link.text("set") in set(with_loss) else with_loss.iloc[0]
            show(start_runs.grouped, link.but(group=",".join(by), set=group))


def _tags_of(run: str) -> None:
    """The tags of a run, in a box that changes them."""

    key, hint = f"tags_{run}", "tags, such as baseline"

    def keep() -> None:
        try:
            pins.tag_run(cached_source().folder, run, st.session_state[key])
        except WorkbenchError as error:
            st.toast(widgets.escaped(error))

    st.session_state[key] = pins.run_tags(cached_source().folder).get(run, "")
    st.text_input("Tags", key=key, on_change=keep, placeholder=hint, label_visibility="collapsed", width=190)


def take_run() -> None:
    """Select the run of a single selected row; with two rows the page offers to compare them."""
    rows = st.session_state["runs"].selection.rows
    if len(rows) == 1:
        entry = cached_source().catalogue().entry(st.session_state["runs_shown"][rows[0]])
        widgets.update_url(set=entry.group, a=entry.name, step=None, models=None, show="here")


# ---- verdicts on claims ----------------------------------------------------------------------------------------------


def _judged(link: Link) -> tuple[start.Judgement, ...]:
    source = cached_source()

    def work(progress: background_tasks.Progress) -> tuple[start.Judgement, ...]:
        source.progress = progress
        return start.judgements(source, link)

    key = start.verdicts_key(source, link)
    judged: tuple[start.Judgement, ...] = background_tasks.run(key, "Judging claims", work, alike=False)
    return judged


def _verdicts(link: Link) -> None:
    source = cached_source()
    row = toolbar("options")
    with row:
        about = "Otherwise all runs of the folder, in every setting"
        alone = widgets.toggle("This experiment only", "alone", help=about)
        shipped = not alone and source.own() and widgets.toggle("Shipped studies", "shipped", help=OF_STUDIES)
    link = link.but(alone=1 if alone else None, shipped=1 if shipped else None)
    judged = _judged(link)
    clear_first = sorted(
        judged, key=lambda j: ("supported", "refuted", "unresolved").index(j.verdict.status) if j.decided else 9
    )
    decided = {j.claim.name: j for j in clear_first if j.verdict.status != "not_checkable"}

    def take(point: Point) -> None:
        words, name = point.at or ("", "")
        if name in decided:
            widgets.update_url(claim=name)
        else:
            st.toast(f"{words}: not decided; the table below gives the reason.")

    if decided:
        with row:
            claim = widgets.choose(
                "Claim", "claim", list(decided), width=600,
                show=lambda n: f"{n.replace('_', ' ')}: {STATUSES[decided[n].verdict.status]}",
            )  # fmt: skip
    with figures_side_by_side(OVERVIEW_PX) if decided else st.container():
        with st.container():
            show(start.verdicts, link, about=VERDICTS, take=take)
        if decided:
            _claim(link.but(claim=claim), decided[claim])
    rest = [j for j in judged if j.verdict.status == "not_checkable"]
    with st.expander(f"{len(rest)} claims without a verdict, and the reasons", key="rest"):
        for question, text in QUESTIONS.items():
            lines = []
            for j in (j for j in rest if j.claim.question == question):
                lacking = f" Not measured: {', '.join(map(widgets.spaced, j.missing))}." if j.missing else ""
                lines.append(f"- {widgets.typeset(j.claim.text)} *{widgets.typeset(j.verdict.details)}{lacking}*")
            if lines:
                st.markdown("\n".join([f"**{widgets.escaped(text)}**\n", *lines]))
    if any(j.missing for j in judged):
        with st.expander("Command that measures what is missing"):
            st.code(start.analyze_command(source, link), language=None, wrap_lines=True)


def _claim(link: Link, judged: start.Judgement) -> None:
    claim, verdict = judged.claim, judged.verdict
    with st.container(border=True):
        _verdict(judged)
        facts = {"Published": claim.published, "Supported if": claim.supports, "Refuted if": claim.refutes,
                 "Source": claim.source,
                 "Runs": f"{len(verdict.runs)}, with controls and models that are drawn and not judged"}  # fmt: skip
        if unmet := verdict.unmet_text():
            facts["Not met"] = unmet
        st.markdown("\n".join(f"- {name}: {widgets.typeset(fact)}" for name, fact in facts.items()))
        with st.container(horizontal=True, gap="xsmall", key="setting"):
            for part in filter(None, verdict.setting.split(", ")):
                st.badge(widgets.typeset(part), color="gray", help="Setting of the compared runs")
        show(start.verdict, link)
        runs, records = start.runs_behind(cached_source(), judged)
        st.session_state["drawn"].append(Drawn(link, records, {}))
        if len(runs):
            st.markdown("**Runs compared**; a link shows the run on Training.")
            config = number_columns(runs) | {"address": st.column_config.LinkColumn("Training", display_text="show")}
            order = sorted(map(str, runs), key=lambda column: column == "run")  # its long names last
            st.dataframe(
                runs, hide_index=True, width="stretch", column_config=config, key="behind", placeholder="",
                column_order=order, alt="Runs behind the verdict",
            )  # fmt: skip
        if len(by_seed := judged_by_seed(verdict)):
            st.markdown("**Differences by seed**")
            by_seed["comparison"] = by_seed["comparison"].map(with_signs)
            config, alt = number_columns(by_seed), "Differences by seed"
            st.dataframe(by_seed, hide_index=True, width="stretch", column_config=config, key="by_seed", alt=alt)
        elif len(runs):
            st.caption("No number was judged by seed; the sentence above gives the reason.")
        if judged.missing:
            st.caption(f"Not stored: {', '.join(judged.missing)}. Command that measures it:")
            command = start.analyze_command(cached_source(), link, claim.question)
            st.code(command, language=None, wrap_lines=True)


def _verdict(judged: start.Judgement, sentence: str = "", *, text: bool = True) -> None:
    if text:
        st.markdown(f"**{widgets.typeset(judged.claim.text)}**")
    box, words = {"supported": st.success, "refuted": st.error}, judged.verdict.words
    sentence = f"**{widgets.escaped(words[:1].upper() + words[1:])}.** {widgets.typeset(sentence)}".strip()
    box.get(judged.verdict.status, st.info)(sentence)


# ---- the demo --------------------------------------------------------------------------------------------------------


def _demo(link: Link) -> None:
    source = cached_source()
    status = start.demo_status(source.folder)
    live = bool(status and status.running)
    every = LIVE if live else None
    st.fragment(_progress, run_every=every)(live, _with_heads(source))
    if models := start.concentration_models(source):
        st.header("1. Concentration of attention", anchor=False)
        st.markdown(
            _shipped_note(models, "--all")
            + "**Importance entropy** (nats) is low where attention concentrates on few tokens. "
            "Does a value residual (ResFormer) change it?"
        )
        show(start.concentration_by_layer, link)
        _shipped_link(models, "importance_entropy")
    st.header("2. Attention sinks", anchor=False)
    st.fragment(_sinks, run_every=every)(link)
    st.fragment(_sink_heads)(link)
    st.header("3. Copying", anchor=False)
    st.fragment(_race, run_every=every)(link)
    st.fragment(_copying_heads)(link)
    st.header("4. Token information in deep values", anchor=False)
    st.fragment(_deep_values, run_every=every)(link)
    _glossary({e.architecture for e in (*start.demo_runs(source, *start.DEMO), *start.text_models(source))})
    if not live and start.demo_runs(source, *start.DEMO):
        st.header("5. Verdicts", anchor=False)
        judged = {j.claim.name: j for j in _judged(link.but(alone=None, shipped=None))}
        for name in start.DEMO_CLAIMS:
            own, shipped = judged[name], start.shipped_verdict(source, name)
            if own.decided and shipped and shipped.verdict.status != own.verdict.status:
                _verdict(own, _in_short(own, "runs here"))
                _verdict(shipped, _in_short(shipped, "shipped studies"), text=False)
            elif own.decided or shipped is None:
                _verdict(own, _in_short(own, "runs here"))
            else:
                _verdict(shipped, _in_short(shipped, "shipped studies"))
        widgets.page_link("start", "Verdicts on all claims", ":material/gavel:", show="verdicts")


def _in_short(judged: start.Judgement, where: str) -> str:
    details = judged.verdict.details
    brief = judged.decided and len(details) > LONG
    return f"In the {where}{f' {in_one_sentence(judged.verdict)}' if brief else f': {details}'}"


def _with_heads(source: Source) -> tuple[bool, bool]:
    """Which experiments have models with several checkpoints."""
    return bool(start.demo_models(source, "sinks")), bool(start.demo_models(source, "race"))


def _progress(was_live: bool, had: tuple[bool, bool]) -> None:
    """Progress of the demo; the page runs again at the first checkpoints and at the end."""
    source = cached_source()
    status = start.demo_status(source.folder)
    if was_live:
        st.session_state["drawn"] = []  # the live figures below draw anew
        if not (status and status.running) or _with_heads(source) != had:
            st.rerun()
    if status is None:
        return
    if not status.finished:
        left = f", about {status.left_s:.0f} s left" if status.left_s is not None and status.running else ""
        share = min(1.0, status.ready / max(status.planned, 1))
        st.progress(share, f"{status.ready} of {status.planned} models ready{left}")
        if not status.running:
            st.warning("The demo stopped early. `make demo` continues it.")
    for name, error in status.failed.items():
        st.warning(f"{widgets.escaped(name)} failed: {widgets.escaped(error)}")


def _sinks(link: Link) -> None:
    st.markdown(
        "Most symbols of this task need no copy, so a copying head is idle there and learns to attend to the *start token*. "
        "The curves show when this sink forms, and how shared values or a gate change it."
    )
    if show(start.forming, link) is not None:
        steps = sink_steps(start.sink_records(cached_source()))
        st.markdown(
            f"**Sink onset**: the step at which the start token's share of the strongest head's attention passes {SINK}. "
            f"On all pages a head is called a sink above {SINK_MASS}."
        )
        st.dataframe(plots.formation_table(steps), hide_index=True, key="sunk", alt="Sink step by model and seed")
        st.caption(
            "Each layer has one head and a small MLP. A model without a sink here may form one in longer training."
        )
        if runs := start.demo_runs(cached_source(), "sinks"):
            words, icon = "Training curves of this experiment", ":material/arrow_forward:"
            widgets.page_link("training", words, icon, set=runs[0].group, a=None, find=None, by=None)
        st.markdown("The shipped study has ten or more seeds, and ResFormer and NeuTRENO too:")
        entries = cached_source().shipped().entries
        study = next((e.group for e in entries if e.name.startswith("sinks-resformer")), None)
        shown = ("transformer", "resformer", "svformer", "neutreno")
        _shipped_link([e for e in entries if e.group == study and e.series in shown], "sink_mass")


def _race(link: Link) -> None:
    st.markdown(
        _shipped_note(start.race_models(cached_source()), "--full")
        + "A sequence of random symbols is repeated. The second half can be predicted by attending to what followed last time. "
        "All models of one seed have equal initial weights and equal batches."
    )
    drawing = show(start.race, link)
    _shipped_link(start.race_models(cached_source()))
    if drawing is not None:
        steps = formation_steps(drawing.table)
        st.markdown("Step at which the copy loss falls below half of its start:")
        st.dataframe(plots.formation_table(steps), hide_index=True, key="formed", alt="Copying step by model and seed")


def _deep_values(link: Link) -> None:
    st.markdown(
        _shipped_note(start.text_models(cached_source()), "--all")
        + "**Token identity share**: the share of a value's variance that the token explains. At 1 the value is a lookup of its "
        "token. First-layer values, and all of SVFormer's, are lookups by construction."
    )
    if show(start.identity_share, link) is not None:
        st.markdown("The values of later layers are replaced by their token's mean (full bar), or by zero (pale bar):")
        show(start.replaced_values, link)
        _shipped_link(start.text_models(cached_source()))


def _shipped_note(entries: Sequence[Entry], option: str) -> str:
    if not any(e.shipped for e in entries):
        return ""
    seeds = len({e.seed for e in entries})
    return f"Shipped study, {seeds} seeds; `workbench demo {option}` trains such models here. "


def _shipped_link(entries: Sequence[Entry], metric: str = "") -> None:
    """Links to a shipped study on Training and Depth; none where the folder has runs of the same experiment or name."""
    names = {e.name for e in entries if e.shipped}
    runs = [e for e in cached_source().catalogue().entries if e.shipped and e.name in names]
    if runs:
        models = ",".join(dict.fromkeys(e.series for e in runs))
        where: dict[str, Any] = {"set": runs[0].group, "models": models, **dict.fromkeys(("a", "step", "find", "by"))}
        widgets.page_link("training", "Training curves of this study", ":material/arrow_forward:", **where)
        if metric:
            widgets.page_link("depth", "By layer, with paired differences", ":material/layers:", metric=metric, **where)


def _sink_heads(link: Link) -> None:
    source = cached_source()
    if start.demo_models(source, "sinks"):
        _, common, step = start.sink_models(source, Link("start"))
        when = widgets.choose("Training step of the sink heads", "when", common, step, slider=True)
        show(start.resting_heads, link.but(when=when), long="Computing attention maps")


def _copying_heads(link: Link) -> None:
    source = cached_source()
    names = [e.name for e in start.demo_models(source, "race")]
    if not names:
        return
    models, _, _ = start.copying_models(source, Link("start"))
    left, right = st.columns(2)
    with left:
        link = link.but(left=widgets.choose("Left model", "left", names, models[0].name))
    with right:
        link = link.but(right=widgets.choose("Right model", "right", names, models[1].name))
    _, common, step = start.copying_models(source, link.but(at=None))
    link = link.but(at=widgets.choose("Training step", "at", common, step, slider=True))
    show(start.copying_heads, link, long="Computing attention maps")


if __name__ == "__main__":
    page("start", ABOUT, start_page, _select)
    coming = "The demo has begun; its first model appears here within a minute."
    wait_for_own_runs(LIVE, lambda: coming if (status := start.demo_status(root())) and status.running else "")
