"""Way of a folder with codes into a model of transformers: its linear layers are replaced before the files are read.

transformers (5.17) loads such folders only with the package compressed-tensors, and then decodes them or trains
nothing. Here it gets a quantiser of this package, so its reader of files and names stays in use.
"""

from typing import Any

from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from actors.models.quantized.layer import QuantizedLinear
from actors.models.quantized.scheme import Scheme
from schemas.errors import ConfigError

_METHOD = "grpo-actors-codes"


@register_quantization_config(_METHOD)
class _CodesConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Scheme of a model, in the shape in which transformers hands it to the quantiser."""

    def __init__(self, scheme: Scheme, **_: Any) -> None:
        self.quant_method, self.scheme = _METHOD, scheme

    def to_dict(self) -> dict[str, Any]:
        """Return what a copy is made from."""
        return {"quant_method": _METHOD, "scheme": self.scheme}


@register_quantizer(_METHOD)
class _CodesQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces the layers of a model before its files are read, and hides the precision of the codes afterwards."""

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        replace_layers(model, self.quantization_config.scheme)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        hold_bytes(model)

    def is_serializable(self) -> bool:
        """Return False: a frozen base is not saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Return True: gradients pass through the layers to adapters."""
        return True


def with_codes(config: Any, scheme: Scheme) -> Any:
    """Make transformers load a model's codes by this package: change its configuration, and return it."""
    config.quantization_config = {"quant_method": _METHOD, "scheme": scheme}
    return config


def replace_layers(model: nn.Module, scheme: Scheme) -> None:
    """Replace the linear layers that have codes by empty layers for them, on the device of the model.

    Raises:
        ConfigError: a layer that can't have the scheme's format, or no layer has codes.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = 0
    for name, module in layers:
        codes = scheme.codes_of(name)
        if codes is None:
            continue
        if problem := codes.problem(module.in_features):
            raise ConfigError(f"model.path: layer {name} can't have {codes.name} weights: {problem}")
        with module.weight.device:
            bias = None if module.bias is None else module.bias.dtype
            made = QuantizedLinear(module.in_features, module.out_features, codes, bias)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
        found += 1
    if not found:
        raise ConfigError("model.path: quantization_config of the model's config.json fits none of its linear layers")


def hold_bytes(model: nn.Module) -> None:
    """Give the codes of all layers their place once they are loaded."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.hold_bytes()
