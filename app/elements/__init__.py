"""Elements of the page that Streamlit has not: one Python file beside its script and style each; `common` is what they share."""
