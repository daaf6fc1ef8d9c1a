"""Later runs of a recognised decoder, with hooks on its own modules and calls: each fires one of our hook points."""
