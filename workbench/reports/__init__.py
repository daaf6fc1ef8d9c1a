"""Pages on measured records: the X-ray of one model, and the report of a folder of runs."""
