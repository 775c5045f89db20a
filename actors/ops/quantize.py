"""`actors quantize`: writes a model with weights of 8 or 4 bits, a base for adapters in trainer and engines."""

from pathlib import Path

from schemas.errors import ConfigError


def quantize(model: Path, name: str, output: Path) -> str:
    """Write the folder, and return words about it.

    Args:
        model: folder of a model in 16 or 32 bits.
        name: format of the weights, as in `--type`.
        output: folder to write.

    Raises:
        ConfigError: the model can't be read or quantised, or the folder can't be written.
    """
    # imported here, since they load torch
    from actors.models.quantized.codes import FORMATS
    from actors.models.quantized.writing import write_quantized

    if not model.is_dir():
        raise ConfigError(f"MODEL: there is no folder {model}; a model of the hub is downloaded first (hf download)")
    codes = FORMATS[name]
    layers, num_bytes = write_quantized(model, codes, output)
    return (
        f"wrote {output}: {layers} linear layers with {codes.bits:g} bits a weight, {num_bytes / 2**20:,.1f} MiB\n"
        f"next: model.path: {output} in run.yaml, with model.lora; vLLM and SGLang read the folder as it is"
    )
