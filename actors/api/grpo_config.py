"""`GRPOConfig` with TRL's names. Values are kept as given; the table of `actors import trl` translates them."""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any

from actors.imports import trl
from actors.imports.trl import versions

OUTPUT_DIR = "trainer_output"
"""Folder of a run without `output_dir`, as in transformers."""
_WHOLE = (
    *("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "gradient_checkpointing_kwargs", "do_eval"),
    *("eval_use_gather_object", "include_for_metrics", "dataloader_multiprocessing_context", "vllm_model_impl"),
    *("vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
    *("vllm_server_timeout", "vllm_group_port", "ref_model_mixup_alpha", "ref_model_sync_steps"),
)
"""Keywords of TRL that the importer knows without a default."""
KEYWORDS = frozenset(
    {
        *versions.GRPO_KEYS,
        *(key for keys in trl.IRRELEVANT.values() for key in keys),
        *trl.SWITCHES,
        *trl.FOLLOWERS,
        *_WHOLE,
    }
)
"""Keywords that TRL's GRPOConfig has, of TRL 1.16 and earlier."""


class GRPOConfig:
    """Arguments of a training, with the names of TRL's GRPOConfig.

    An attribute is the given value, or TRL's default.

    Args:
        output_dir: folder of the run.
        run_keys: keys of run.yaml by dotted name, such as `{"packer.max_async_level": 1}`. They win over what follows
            from TRL's names.
        given: keywords of TRL.

    Raises:
        TypeError: TRL has no such keyword; the text names the nearest one.
    """

    def __init__(
        self, output_dir: str | Path = OUTPUT_DIR, *, run_keys: Mapping[str, Any] | None = None, **given: Any
    ) -> None:
        for name in given:
            if name not in KEYWORDS:
                close = difflib.get_close_matches(name, sorted(KEYWORDS), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"GRPOConfig.__init__() got an unexpected keyword argument {name!r}{hint}")
        self.given: dict[str, Any] = {"output_dir": str(output_dir)} | given
        self.run_keys = dict(run_keys or {})

    @classmethod
    def of(cls, arguments: Any) -> "GRPOConfig":
        """Return the arguments of a trainer as this class: themselves, or TRL's own object with its other defaults.

        Raises:
            TypeError: the arguments are neither.
        """
        if arguments is None:
            return cls()
        if isinstance(arguments, cls):
            return arguments
        if not hasattr(arguments, "to_dict"):
            raise TypeError(f"args: must be a GRPOConfig, got {type(arguments).__name__}")
        # TRL's object has all defaults as values, and those that it has computed; given are the others
        fields = getattr(type(arguments), "__dataclass_fields__", {})
        given = {
            name: getattr(arguments, name)
            for name in KEYWORDS & fields.keys()
            if name not in _COMPUTED and getattr(arguments, name) not in _defaults(fields[name])
        }
        # None becomes a number, from which nothing tells a given one but its value; a given generation_batch_size too
        steps = getattr(arguments, "steps_per_generation", None)
        if steps not in (None, getattr(arguments, "gradient_accumulation_steps", None)):
            given["steps_per_generation"] = steps
        if (name := getattr(arguments, "run_name", None)) not in (None, getattr(arguments, "output_dir", None)):
            given["run_name"] = name
        return cls(given.pop("output_dir", None) or OUTPUT_DIR, **given)

    def __getattr__(self, name: str) -> Any:
        """Return a value as given, or TRL's default."""
        # copies and pickles ask for attributes before `given` is there
        given = self.__dict__.get("given", {})
        if name in given:
            return given[name]
        if name in KEYWORDS:
            return versions.GRPO_KEYS.get(name)
        raise AttributeError(f"GRPOConfig has no attribute {name!r}")

    def __repr__(self) -> str:
        """Return the call that makes an equal object."""
        run_keys = {"run_keys": self.run_keys} if self.run_keys else {}
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in (self.given | run_keys).items())})"

    def to_dict(self) -> dict[str, Any]:
        """Return the given values by name, as plain values."""
        return {name: plain(value) for name, value in self.given.items()}


def _defaults(field: Any) -> list[Any]:
    """Return the default of a dataclass's field in a list, or nothing where there is none."""
    return [field.default] if field.default_factory is MISSING else [field.default_factory()]


_COMPUTED = {
    *("generation_batch_size", "steps_per_generation", "deepspeed_plugin", "logging_dir", "run_name"),
    "accelerator_config",
}
"""Keywords that TRL's own object fills in from others."""


def plain(value: Any) -> Any:
    """Return a value as YAML has it: an enumeration's value, a type of torch by its name, sets as sorted lists."""
    match value:
        case Enum():
            return plain(value.value)
        case Mapping():
            return {str(name): plain(one) for name, one in value.items()}
        case set() | frozenset():
            return sorted(map(plain, value))
        case list() | tuple():
            return [plain(one) for one in value]
        case None | bool() | int() | float() | str():
            return value
    if type(value).__module__ == "torch" or isinstance(value, Path):
        return str(value)
    # numbers of NumPy
    return value.item() if hasattr(value, "item") else str(value)
