"""Studies: models x settings x seeds of one file, trained, measured and compared over seeds."""
