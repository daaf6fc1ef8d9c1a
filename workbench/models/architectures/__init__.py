"""The architectures, one file each: a shortcut that changes the vanilla decoder."""
