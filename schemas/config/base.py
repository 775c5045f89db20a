"""Base class of all configuration sections, and the type of a key that names a user's function."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every configuration section: immutable, and strict about keys and types.

    Unknown keys are errors, values are not converted (`"1"` is no integer), and defaults pass the same checks as given
    values. The docstring below a key is its documentation: in the JSON schema, in editors and in docs/. The annotation
    of a key marks what a change means for a resumed run: `Free[int]`, `Repack[int]` or `Identity[int]`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True
    )


def _names_a_function(path: str) -> str:
    place, _, function = path.rpartition(":")
    if not (place and function):
        raise ValueError("must be package.module:function or file.py:function")
    return path


FunctionPath = Annotated[str, AfterValidator(_names_a_function)]
"""Path to a user's function: `package.module:function` or `file.py:function`.

A relative file is looked up next to the configuration file first, then in the current directory.
"""
