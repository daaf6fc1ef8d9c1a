"""Depth: any measure over layers, for chosen models and steps, beside its value at random init and its baseline."""

from __future__ import annotations

from app import widgets
from app.cached_source import cached_source
from app.figures import show
from app.page_frame import page, toolbar
from app.selection import choose_models
from workbench import plots
from workbench.views import Link, depth

ABOUT = (
    "Any measure, layer by layer. Solid: the chosen step. Dashed: the same models at random init. Dotted grey: what the measure "
    "gives under its baseline, for instance attention spread evenly over all earlier tokens. Only what differs from both was learned."
)


def _body(link: Link) -> None:
    with toolbar("controls"):
        if not link.on("compare"):
            link = choose_models(link)
        link = _choices(link)
    show(depth.layers, link)


def _choices(link: Link) -> Link:
    """The link, completed by the select boxes; a choice that the link asks for in vain falls back with a word."""
    source = cached_source()
    bare = link.but(site=None, variant=None, view=None, seed=None, metric=None)
    measures = depth.options(source, bare).metrics
    bare = bare.but(metric=widgets.choose("Measure", "metric", measures, depth.METRIC, show=_words, width=200))
    found = depth.options(source, bare)
    if found.sites:
        site = widgets.choose("Where", "site", found.sites, found.site, show=plots.site, width=150)
        bare = bare.but(site=site)
        found = depth.options(source, bare)
    variant = widgets.choose(
        "Variant", "variant", found.variants, found.variant, show=_words, width=130, only_if_many=True
    )
    bare = bare.but(variant=variant)
    found = depth.options(source, bare)
    form = widgets.choose("View", "view", found.forms, found.form, show=depth.FORMS.__getitem__, width=150)
    if not link.on("compare"):
        bare = bare.but(seed=widgets.choose("Seed", "seed", found.seeds, "all", width=90))
    relative = widgets.toggle(
        "Relative depth", "depth", help="0 is the first layer, 1 the last: for models of different depths"
    )
    return bare.but(view=form, depth=1 if relative else None)


def _words(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    page("depth", ABOUT, _body)
