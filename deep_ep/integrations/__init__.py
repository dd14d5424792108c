"""For programs that are not ours: files that they load."""
