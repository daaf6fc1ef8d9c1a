"""Run folders: what is in one, the index of many, and the records kept with them."""
