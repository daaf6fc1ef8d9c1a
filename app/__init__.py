"""The dashboard: `server.py` serves, `main.py` navigates, `page_layout.py` and `model_selection.py` are on each page of `screens/`."""
