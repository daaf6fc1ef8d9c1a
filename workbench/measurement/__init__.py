"""Models and runs measured: records, one tidy row per number, each with its error bar."""
