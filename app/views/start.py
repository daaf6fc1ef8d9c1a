"""Start: one model at a glance, what is in the folder, what its runs decide, and the demo's story; then what to click next."""

from __future__ import annotations

import streamlit as st

from app import jobs, url
from app.demo import story
from app.shell import page, show
from app.source import root, source
from workbench.errors import WorkbenchError
from workbench.views import Link, Subject, start
from workbench.xrays import QUESTIONS

ABOUT = (
    "How transformers use **values** (what attention carries from word to word) and what a shortcut for them changes. Choose a model "
    "on the left; every page shows that one, or two side by side."
)
NEXT = {
    "training": ("Training", ":material/trending_down:", "Which model predicts better, and from when on?"),
    "depth": ("Depth", ":material/layers:", "Any measure layer by layer, before and after training"),
    "attention": ("Attention", ":material/grid_on:", "Where does every head look?"),
    "prompt": ("Prompt", ":material/chat:", "Type a text: what is read, kept and predicted?"),
    "intervene": ("Intervene", ":material/build:", "Change something inside and see what follows"),
}
LIVE = 2  # seconds between looks at a demo that runs


def draw() -> None:
    page("start", "Start", ABOUT, _body)
    if not source().catalogue().entries:
        st.fragment(_first_run, run_every=LIVE)()


def _first_run() -> None:
    """Look again until there is a run, where a demo is on its way."""
    found = start.demo(root())
    if source().catalogue().entries:
        st.rerun()
    if found and found.running:
        st.caption("The demo has begun; its first model appears here within a minute.")


def _body(link: Link) -> None:
    ask = source()
    found = start.demo(ask.folder)
    first = "demo" if (found and found.running) or start.only_demo(ask) else "model"
    parts = [p for p in start.SHOWN if p != "demo" or found or start.racers(ask)]
    shown = url.segments("Part", "show", parts, first, show=start.SHOWN.__getitem__)
    {"model": _model, "here": _here, "verdicts": _verdicts, "demo": story}[shown](link.but(show=shown))
    st.subheader("Where to go next")
    for column, (name, (title, icon, about)) in zip(st.columns(len(NEXT)), NEXT.items(), strict=True):
        with column:
            url.link(name, title, icon)
            st.caption(about)


# ---- this model ------------------------------------------------------------------------------------------------------


def _model(link: Link) -> None:
    ask = source()
    subjects = ask.subjects(link)
    titles = " and ".join(f"**{url.plain(s.title)}**" for s in subjects)
    st.markdown(
        f"An X-ray of {titles}: four questions. Each answer has its number, what the number would be without learning or "
        "structure, and its standard error over documents (±)."
    )
    ready = [_ready(subject) for subject in subjects]
    if not all(ready):
        return
    if len(subjects) > 1:
        for name, question in QUESTIONS.items():
            with st.container(border=True):
                st.subheader(question)
                show(start.XRAY[name], link)
    else:
        names = list(QUESTIONS)
        for row in (names[:2], names[2:]):
            for column, name in zip(st.columns(2, border=True), row, strict=True):
                with column:
                    st.subheader(QUESTIONS[name])
                    show(start.XRAY[name], link)


def _ready(subject: Subject) -> bool:
    """Whether everything an X-ray needs is stored; else a button that measures it, and the command."""
    absent = start.missing(source(), subject)
    if not absent:
        return True
    entry, place = subject.entry, (subject.entry.path, subject.step)
    told = ", ".join(name.replace("_", " ") for name in absent)
    st.info(f"{url.plain(subject.name)} is not measured yet: {told}.", icon=":material/radiology:")
    asked = st.session_state.setdefault("measuring", {})
    if st.button("Measure it here", key=f"measure_{subject.tag}", icon=":material/play_arrow:", type="primary"):
        asked[place] = entry.stamp
    st.caption("Or from a terminal; either way the numbers are stored beside the run and not measured again.")
    st.code(start.command(entry, subject.step), language="bash", wrap_lines=True)
    if place not in asked:
        return False
    try:  # people who asked before anything changed wait for one job
        job = ("xray", *place, asked[place])
        jobs.run(job, f"Measuring {entry.name}", lambda progress: start.measure(entry, subject.step, progress))
    except jobs.Running:
        return False
    except WorkbenchError as error:
        st.warning(url.plain(error))
        del asked[place]
        return False
    del asked[place]
    st.rerun()
    return True


# ---- what is here ----------------------------------------------------------------------------------------------------


def _here(link: Link) -> None:
    ask = source()
    found = ask.catalogue()
    table = start.table(ask)
    writing = int((table["state"] == "being written now").sum())
    st.markdown(
        f"**{len(table)} runs** in `{root()}`{f', {writing} being written now' if writing else ''}. Click a row to look at that model."
    )
    st.dataframe(
        table, hide_index=True, width="stretch", height=min(600, 40 + 35 * len(table)), key="runs", on_select=_choose,
        selection_mode="single-row", alt="The runs of the folder",
    )  # fmt: skip
    if found.problems:
        st.warning(
            f"{len(found.problems)} folders look like runs and cannot be read; they are named at the foot of the page."
        )
    st.caption(
        "`measures`: how many measures are stored; more: `workbench measure RUN -m NAME`. Runs of one experiment may be compared."
    )


def _choose() -> None:
    """The clicked run becomes model A."""
    rows = st.session_state["runs"].selection.rows
    if rows:
        entries = source().catalogue().entries
        entry = entries[rows[0]]
        url.change(set=entry.group, a=entry.name, step=None, models=None, show="model" if entry.steps else "here")


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _verdicts(link: Link) -> None:
    ask = source()
    st.markdown(
        "What the field claims of such shortcuts, and what the runs of this experiment say of each claim. Only what is stored is "
        "judged, nothing is measured here. A difference counts where its 95 % interval leaves out zero, over three seeds or more."
    )

    def work(progress):  # type: ignore[no-untyped-def]
        ask.progress = progress
        return start.judgements(ask, link)

    found = jobs.run(start.key(ask, link), "Judging what is stored", work)
    show(start.verdicts, link)
    decided = [j for j in found if j.decided]
    names = {j.judged.claim.name: j for j in decided}
    if decided:
        chosen = url.choose(
            "Claim", "claim", list(names), show=lambda n: f"{n.replace('_', ' ')}: {names[n].judged.verdict.said}"
        )
        _claim(link.but(claim=chosen), names[chosen])
    rest = [j for j in found if not j.decided]
    panel = st.expander(f"{len(rest)} claims these runs do not decide, and why", key="rest", on_change="rerun")
    if panel.open:
        with panel:
            table = start.verdict_table(rest)[["question", "claim", "verdict", "because", "not measured"]]
            st.dataframe(table, hide_index=True, width="stretch", alt="Claims that are not decided, and why")
    if any(j.missing for j in found):
        st.caption(
            "Measures what claims need and is not stored yet, judges them all, and writes tables, figures and a page:"
        )
        st.code(start.analysis(ask, link), language="bash", wrap_lines=True)


def _claim(link: Link, found: start.Judgement) -> None:
    claim, verdict = found.judged.claim, found.judged.verdict
    with st.container(border=True):
        st.markdown(f"**{url.plain(claim.text)}**")
        told = {"supported": st.success, "refuted": st.error, "unresolved": st.warning}[verdict.status]
        told(f"**{url.plain(verdict.said.capitalize())}.**")
        facts = {"Published": claim.published, "Supported by": claim.supports, "Refuted by": claim.refutes, "Source": claim.source,
                 "Runs compared": f"{len(verdict.runs)}: {verdict.setting}"}  # fmt: skip
        st.markdown("\n".join(f"- {name}: {url.plain(fact)}" for name, fact in facts.items()))
        show(start.verdict, link)
        if found.missing:
            st.caption(f"Not stored, so not part of this: {', '.join(found.missing)}. Measured by:")
            st.code(start.analysis(source(), link, claim.question), language="bash", wrap_lines=True)


if __name__ == "__main__":
    draw()
