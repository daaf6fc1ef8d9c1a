"""One file per page; a page draws what `app.state` hands it and computes nothing."""
