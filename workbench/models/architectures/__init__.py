"""One file per architecture: what it changes about the vanilla decoder. `ls` of this folder is the list."""
