"""The dashboard: `server.py` serves, `main.py` navigates, `page_frame.py` and `selection.py` are on every page, `screens/` are the pages."""
