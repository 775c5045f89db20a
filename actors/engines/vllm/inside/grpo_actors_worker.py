"""Extension of vLLM's worker: takes weights from memory, and overwrites norms, on behalf of the owning actor.

`/collective_rpc`, which takes the owner's key, calls the methods in each worker between two steps of the model. Imports
nothing of ours but modules of such folders, as the code runs in vLLM's environment.
"""

import os
from importlib import import_module
from typing import Any

EXTENSION = "grpo_actors_worker.Extension"
"""Value for `vllm serve --worker-extension-cls`."""
SHARES_BASE = "GRPO_ACTORS_SHARES_BASE"
"""Environment variable of servers whose base is the trainer's."""

if os.environ.get(SHARES_BASE) and __name__ == "grpo_actors_worker":
    # a worker imports its extension before it loads the model: time to make the loader known
    import_module("grpo_actors_base")


class Extension:
    """Mixin for vLLM's worker class."""

    def take_weights(self: Any, handle: dict[str, Any], tensors: list[Any]) -> None:
        """Overwrite all weights from a block of the actor's memory; a failure may leave pieces of two versions.

        Args:
            handle: handle of the block (`grpo_actors_handles`).
            tensors: place of each tensor in the block.

        Raises:
            OSError, ValueError: the block can't be mapped.
        """
        # beside this file on the server's path, and elsewhere in the actor's
        blocks = import_module("grpo_actors_handles")
        block = blocks.opened(handle)
        self.reload_weights(weights_iterator=iter(blocks.tensors_in(block, tensors).items()))
        self.pack_experts()
        if block.is_cuda:
            import torch

            # before the actor hears that the block was read, and receives the next version into it
            torch.cuda.synchronize()

    def mapped_bytes(self: Any) -> int:
        """Return the bytes of weights that are the trainer's memory."""
        return int(getattr(self.get_model(), "grpo_actors_mapped", 0))

    def pack_experts(self: Any) -> None:
        """Lay weights of experts out as their kernel for CPUs reads them; call once behind each reload.

        vLLM 0.32 does so for the weights with which the server starts alone. Other kernels need nothing.
        """
        for module in self.get_model().modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            experts = getattr(kernel, "fused_experts", None)
            if experts is not None and type(experts).__module__.endswith(".cpu_moe"):
                experts.process_weights_after_loading(module)

    def set_norms(self: Any, path: str) -> None:
        """Overwrite norms by name from a safetensors file: all or, if a tensor does not fit, none.

        They are overwritten in place, in the memory read by compiled graphs.

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
