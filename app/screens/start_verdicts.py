"""Verdicts on the Start page: what the stored records say of the field's claims."""

from __future__ import annotations

import streamlit as st

from workbench.views import Link, start

from .. import background, widgets
from ..cached_source import cached_source
from ..elements.figure import Point
from ..figures import show
from ..page_frame import figures_side_by_side, toolbar

ABOUT = (
    "What the field claims of such shortcuts, and what the runs here say of each claim; click one to read it. Only what is "
    "stored is judged, nothing is measured here. A verdict needs three seeds or more, and stands among all claims here: one by one "
    "some would look decided by chance."
)


OVERVIEW_PX = 640  # that its questions need


def verdicts(link: Link) -> None:
    """Every claim from what is stored: an overview, one claim in full, and what the others lack."""
    source = cached_source()
    controls = toolbar("controls")
    with controls:
        alone = widgets.toggle(
            "This experiment alone", "alone",
            help="Else each claim is put to all runs of the folder, in every setting that has what it asks for",
        )  # fmt: skip
    link = link.but(alone=1 if alone else None)

    def work(progress):  # type: ignore[no-untyped-def]
        source.progress = progress
        return start.verdicts.judgements(source, link)

    found = background.run(start.verdicts.key(source, link), "Judging what is stored", work)
    decided = [j for j in found if j.decided]
    names = {j.claim.name: j for j in decided}

    def take(point: Point) -> None:
        words, name = point.at or ("", "")
        if name in names:
            widgets.update_url(claim=name)
        else:
            st.toast(f"{words}: nothing is decided of it here; why is told below.")

    if decided:
        with controls:  # above the figure, where a click on a bar is seen to change it
            chosen = widgets.choose(
                "Claim",
                "claim",
                list(names),
                show=lambda n: f"{n.replace('_', ' ')}: {names[n].verdict.words}",
                width=600,
            )
    with figures_side_by_side(OVERVIEW_PX) if decided else st.container():
        with st.container():
            show(start.verdicts.verdicts, link, about=ABOUT, take=take)
        if decided:
            _claim(link.but(claim=chosen), names[chosen])
    rest = [j for j in found if not j.decided]
    panel = st.expander(f"{len(rest)} claims these runs do not decide, and why", key="rest", on_change="rerun")
    if panel.open:
        with panel:
            table = start.verdicts.table(rest)[["question", "claim", "verdict", "because", "not measured"]]
            st.dataframe(table, hide_index=True, width="stretch", alt="Claims that are not decided, and why")
    if any(j.missing for j in found):
        with st.expander("The command that measures what is missing, judges all claims and writes a page"):
            st.code(start.verdicts.command(source, link), language=None, wrap_lines=True)


def _claim(link: Link, found: start.verdicts.Judgement) -> None:
    claim, verdict = found.claim, found.verdict
    with st.container(border=True):
        st.markdown(f"**{widgets.escaped(claim.text)}**")
        box = {"supported": st.success, "refuted": st.error, "unresolved": st.warning}[verdict.status]
        box(f"**{widgets.escaped(verdict.words.capitalize())}.**")
        facts = {"Published": claim.published, "Supported by": claim.supports, "Refuted by": claim.refutes, "Source": claim.source,
                 "Runs compared": f"{len(verdict.runs)}: {verdict.setting}"}  # fmt: skip
        st.markdown("\n".join(f"- {name}: {widgets.escaped(fact)}" for name, fact in facts.items()))
        show(start.verdicts.verdict, link)
        if found.missing:
            st.caption(f"Not stored, so not part of this: {', '.join(found.missing)}. Measured by:")
            st.code(start.verdicts.command(cached_source(), link, claim.question), language=None, wrap_lines=True)
