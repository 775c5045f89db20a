"""Python interface: the files of a run as tables."""
