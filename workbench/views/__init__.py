"""Views: every figure of the dashboard as a link, a figure and a table. `workbench view LINK` draws the same.

`VIEWS[page][name](source, link)` returns a `Drawing`. A `Source` gives the numbers, a `Link` the options.
"""

from workbench.views.page_links import PAGES, Link
from workbench.views.registered_views import VIEWS, Drawing, drawings, view
from workbench.views.source import RunAtStep, Source, source_of

__all__ = ["PAGES", "VIEWS", "Drawing", "Link", "RunAtStep", "Source", "drawings", "source_of", "view"]
