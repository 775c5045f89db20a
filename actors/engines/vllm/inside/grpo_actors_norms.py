"""An extension of vLLM's worker: norms of the model, overwritten by the actor that owns the server.

`/collective_rpc`, which is behind the door, calls it in each worker between two steps of the model. What it overwrites
is the same memory that compiled graphs read. Imports nothing of ours, for it runs in whatever environment vLLM has.
"""

from typing import Any

EXTENSION = "grpo_actors_norms.Norms"
"""As `vllm serve --worker-extension-cls` takes it."""


class Norms:
    """Becomes a base class of the worker."""

    def set_norms(self: Any, path: str) -> None:
        """Overwrite weights with those of a safetensors file, by name; all of them or, where one does not fit, none.

        Raises:
            ValueError: the model has no weight of that name and shape.
        """
        import torch  # here: the actor reads this module's names, and it should not wait for torch
        from safetensors.torch import load_file

        norms, weights = load_file(path), dict(self.get_model().named_parameters())
        strange = [name for name, norm in norms.items() if name not in weights or weights[name].shape != norm.shape]
        if strange:
            raise ValueError(f"inference.noise: vLLM's model has no weights {strange[:3]}, or of other shapes")
        with torch.inference_mode():  # the model's weights may have been made in it
            for name, norm in norms.items():
                weights[name].copy_(norm)
