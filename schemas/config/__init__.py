"""The configuration of a run: one YAML file, checked without torch."""

from schemas.config.advice import warnings
from schemas.config.load import check_tree, load_config
from schemas.config.resolved import dump_config
from schemas.config.run import RunConfig

__all__ = ["RunConfig", "check_tree", "dump_config", "load_config", "warnings"]
