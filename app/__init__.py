"""The dashboard: `server.py` serves, `main.py` navigates, `shell.py` and `selection.py` are on every page, `views/` are the pages."""
