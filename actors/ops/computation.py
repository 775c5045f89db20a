"""Ways of computing that a run takes on this machine, each with the reason, without torch."""

from importlib.metadata import PackageNotFoundError, version

from actors.models.choices import Choice, choices
from actors.process.devices import has_gpu
from actors.process.packages import c_compiler
from schemas.config import RunConfig
from schemas.config.model import ModelConfig

VARLEN_SINCE = (2, 11)
"""Version of torch from which it has `varlen`."""


def computation(config: RunConfig, num_gpus: int | None = None) -> list[Choice]:
    """Return the choices for the policy, as the trainer makes them; none if no model is loaded.

    Args:
        config: configuration of the run.
        num_gpus: number of GPUs of the machine; None: this machine.
    """
    model = config.model
    if not config.inference.engine.loads_model:
        return []
    on_gpu = model.device == "cuda" or (model.device == "auto" and (has_gpu() if num_gpus is None else num_gpus > 0))
    found = [attention(model, on_gpu), *choices(model, config.packer.sequence_len, on_gpu)]
    if on_gpu and config.packer.count_prompts == "auto":
        found.append(_count_prompts(model))
    if on_gpu and config.inference.engine.type == "embedded":
        why = "made for CPUs and tests: on a GPU type vllm decodes about three times as fast, by estimate"
        found.append(Choice("inference.engine.type", "embedded", why))
    return found


def attention(model: ModelConfig, on_gpu: bool) -> Choice:
    """Return the attention of packed rows, as `actors.models.attention.implementation` chooses with torch at hand."""
    key = "model.attention"
    if model.attention != "auto":
        return Choice(key, model.attention, "as configured")
    if not on_gpu:
        return Choice(key, "padded", "on a CPU")
    if model.dtype == "bfloat16" and _torch() >= VARLEN_SINCE:
        return Choice(key, "varlen", "shared prompts once, by the kernel in torch")
    why = "the kernel in torch has no float32" if model.dtype == "float32" else "torch is older than 2.11"
    if c_compiler() is None:
        return Choice(key, "padded", f"{why}, and flex needs a C compiler (CC)")
    return Choice(key, "flex", why)


def _count_prompts(model: ModelConfig) -> Choice:
    """Return how rows count a group's prompt, as `actors.algorithms.batches.prompts_count_once` decides."""
    key = "packer.count_prompts"
    if model.device == "cuda":
        return Choice(key, "once", "model.device is cuda")
    why = "model.device is auto, and the packer knows no device; set cuda if the trainer has GPUs, for fewer rows"
    return Choice(key, "per_completion", why)


def _torch() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
    except (PackageNotFoundError, ValueError):  # a version of one's own building
        return VARLEN_SINCE
