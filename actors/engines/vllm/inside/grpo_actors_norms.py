"""Extension of vLLM's worker: overwrites norms of the model on behalf of the owning actor.

`/collective_rpc`, which takes the owner's key, calls the method in each worker between two steps of the model. The
norms are overwritten in place, in the memory read by compiled graphs. Imports nothing of ours, as the code runs in
vLLM's environment.
"""

from typing import Any

EXTENSION = "grpo_actors_norms.Norms"
"""Value for `vllm serve --worker-extension-cls`."""


class Norms:
    """Mixin for vLLM's worker class."""

    def set_norms(self: Any, path: str) -> None:
        """Overwrite weights by name from a safetensors file: all or, if a tensor does not fit, none.

        Raises:
            ValueError: the model has no weight of this name and shape.
        """
        import torch  # imported here: the actor reads EXTENSION and need not wait for torch
        from safetensors.torch import load_file

        norms, weights = load_file(path), dict(self.get_model().named_parameters())
        strange = [name for name, norm in norms.items() if name not in weights or weights[name].shape != norm.shape]
        if strange:
            raise ValueError(f"inference.noise: vLLM's model has no weights {strange[:3]}, or of other shapes")
        # the model's weights may have been created in this mode, and can then be changed in it alone
        with torch.inference_mode():
            for name, norm in norms.items():
                weights[name].copy_(norm)
