"""Folders of runs for tests that have no configuration."""

from pathlib import Path

from bus.run_folder import RunFolder, Scratch


def folder_at(path: Path) -> RunFolder:
    """The folder of a run at this very path."""
    return RunFolder(path, "test", path.parent / "out")


def scratch_at(path: Path) -> Scratch:
    """A scratch folder at this very path; the folder above is the run's."""
    return Scratch(folder_at(path.parent), path.name)
