"""What every section of a run's configuration is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section; unknown keys are errors, nothing is converted, defaults are checked like given values."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True
    )
