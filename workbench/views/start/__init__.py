"""Views of the Start page: what was found, one model at a glance, the folder, verdicts on claims, and the demo's story."""

from workbench.views.start import demo, finding, folder, parts, verdicts, xray

__all__ = ["demo", "finding", "folder", "parts", "verdicts", "xray"]
