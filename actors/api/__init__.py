"""Python interface: a trainer with TRL's names, and the files of a run as tables."""
