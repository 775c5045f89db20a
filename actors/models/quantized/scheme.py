"""Description of a model's codes in config.json (`quantization_config` of compressed-tensors)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.models.quantized.codes import FP4_GROUP, Codes, Fp8Codes, Nvfp4Codes
from schemas.errors import ConfigError

METHOD = "compressed-tensors"
"""Name of the files' format in config.json."""
_FILE_FORMATS = {"fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}


@dataclass(frozen=True)
class Scheme:
    """Formats of a model's linear layers."""

    groups: tuple[tuple[tuple[str, ...], Codes], ...]
    """Targets of each group with its format. A target is a layer's name, `re:` and an expression, or `Linear`."""
    ignored: tuple[str, ...]
    """Layers that stay as they are, as targets."""
    rounds_activations: bool
    """True if an engine also rounds the inputs of the layers, which this package does not."""

    def codes_of(self, name: str) -> Codes | None:
        """Return the format of a linear layer, by its name in the model; None if its weight is no code."""
        if any(_matches(target, name) for target in self.ignored):
            return None
        return next(
            (codes for targets, codes in self.groups if any(t == "Linear" or _matches(t, name) for t in targets)), None
        )


def _matches(target: str, name: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


def read_scheme(described: Mapping[str, Any] | None, key: str) -> Scheme | None:
    """Return the scheme of a model; None if the model has no codes, or codes of another package.

    Args:
        described: `quantization_config` of config.json.
        key: configuration key of the model, for errors.

    Raises:
        ConfigError: codes of compressed-tensors that this package can't decode.
    """
    if described is None or described.get("quant_method") != METHOD:
        return None
    groups = []
    for name, group in (described.get("config_groups") or {}).items():
        codes = _codes(group.get("weights") or {}, group.get("format") or described.get("format"))
        if isinstance(codes, str):
            raise ConfigError(
                f"{key}: group {name} of the model's quantization_config has {codes}; known are FP8 weights (tensor, "
                f"channel or block) and NVFP4; `actors quantize` makes both from the model in 16 bits"
            )
        groups.append((tuple(group.get("targets") or ()), codes))
    if not groups:
        raise ConfigError(f"{key}: quantization_config of the model's config.json has no config_groups")
    rounds = any(group.get("input_activations") for group in described["config_groups"].values())
    return Scheme(tuple(groups), tuple(described.get("ignore") or ()), rounds)


def _codes(weights: Mapping[str, Any], file_format: Any) -> Codes | str:
    """Return the format of a group; a text if it is unknown."""
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if weights.get("symmetric", True) and kind == "float" and bits == 8 and file_format == _FILE_FORMATS["fp8"]:
        if strategy == "block" and weights.get("block_structure"):
            rows, columns = weights["block_structure"]
            return Fp8Codes((int(rows), int(columns)))
        if strategy in ("channel", "tensor"):
            return Fp8Codes(per_row=strategy == "channel")
    if (kind, bits, file_format) == ("float", 4, _FILE_FORMATS["nvfp4"]) and weights.get("group_size") == FP4_GROUP:
        return Nvfp4Codes()
    return f"format {file_format} with {bits} bits of type {kind}, strategy {strategy}"


def described(codes: Codes, ignored: list[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json for a model with one format.

    Args:
        codes: FP8 with a scale per row, or NVFP4.
        ignored: names of the linear layers that stay as they are.
    """
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    if isinstance(codes, Nvfp4Codes):
        weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": FP4_GROUP}
    file_format = _FILE_FORMATS[codes.name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": file_format}},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
