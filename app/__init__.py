"""The dashboard: `server.py` serves, `main.py` navigates, `page_frame.py` and `selection.py` are on each page, `screens/` are the pages."""
