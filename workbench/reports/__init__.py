"""Pages that say in sentences what records show: the X-ray of one model, the report of a folder of runs."""
