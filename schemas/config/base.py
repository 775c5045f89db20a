"""What every section of a run's configuration is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section; unknown keys are errors, defaults are checked like given values."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)
