"""One file per page: widgets, and what `workbench.views` draws; a page computes nothing."""
