"""Verdicts on the Start page: what the stored records of an experiment say of the field's claims."""

from __future__ import annotations

import streamlit as st

from app import jobs, url
from app.shell import show
from app.source import source
from workbench.views import Link, start


def verdicts(link: Link) -> None:
    """Every claim from what is stored: an overview, one claim in full, and what the others lack."""
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
        st.code(start.analysis(ask, link), language=None, wrap_lines=True)


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
            st.code(start.analysis(source(), link, claim.question), language=None, wrap_lines=True)
