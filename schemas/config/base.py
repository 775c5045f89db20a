"""What every section of a run's configuration is."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section; unknown keys are errors, nothing is converted, defaults are checked like given values."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True
    )


def _names_a_function(path: str) -> str:
    place, _, function = path.rpartition(":")
    if not (place and function):
        raise ValueError("must be package.module:function or file.py:function")
    return path


FunctionPath = Annotated[str, AfterValidator(_names_a_function)]
"""Where a user's function is; the file is looked for beside the configuration file, else where the command is given."""
