"""Views of the Start page: one model at a glance, the folder, verdicts on claims, and the demo's story."""

from workbench.views.start import demo, folder, parts, verdicts, xray

__all__ = ["demo", "folder", "parts", "verdicts", "xray"]
