"""The dashboard: `main.py` navigates, `state.py` holds the URL mirror and every call into the library, `views/` draws."""
