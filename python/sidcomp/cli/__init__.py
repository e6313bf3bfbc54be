"""The command `sidcomp`."""
