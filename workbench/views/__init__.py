"""Every view of the dashboard as a link, a figure and a table; the page and `workbench view LINK` draw the same.

`VIEWS[page][name](source, link)` gives a `Drawing`: `source` is a `Source` (where numbers come from), `link` a `Link` (what was chosen).
"""

from workbench.views.base import VIEWS, Drawing, drawings, view
from workbench.views.link import PAGES, Link
from workbench.views.source import Source, Subject, source_of

__all__ = ["PAGES", "VIEWS", "Drawing", "Link", "Source", "Subject", "drawings", "source_of", "view"]
