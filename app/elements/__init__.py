"""Page elements beyond Streamlit's, each a Python file with a script and a style; `common` has the shared parts."""
