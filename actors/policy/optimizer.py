"""The optimizer of the trainer: one of torch's or of bitsandbytes, or Muon and AdamW side by side.

Its state is told and taken by the names of parameters, so a checkpoint fits however the parameters are grouped.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from actors.policy.shards import placed
from schemas.config.actors import TrainerConfig
from schemas.config.optimizers import AdamKeys, AdamW8bitConfig, MuonConfig
from schemas.errors import ConfigError

Value = Tensor | int
"""One state of a parameter: moments, how they are quantised; a count of steps may be a number."""
Group = dict[str, Any]


class PolicyOptimizer:
    """Of the trainable parameters of a model.

    Args:
        model: their owner.
        parts: optimizers that share them out; a group's `rate_ratio` is its learning rate ÷ that of the step.
    """

    def __init__(self, model: nn.Module, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @property
    def param_groups(self) -> list[Group]:
        """Of all parts."""
        return [group for part in self._parts for group in part.param_groups]

    def set_rate(self, rate: float) -> None:
        """The learning rate of the updates to come."""
        for group in self.param_groups:
            group["lr"] = rate * group.get("rate_ratio", 1.0)

    def step(self) -> None:
        """Update the parameters from their gradients."""
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    def states(self) -> Iterator[tuple[str, str, Value]]:
        """(name of a parameter, name of a state, value as it is in memory), in the order of the model."""
        for name, parameter in self._parameters.items():
            for part in self._parts:
                if parameter in part.state:
                    yield from ((name, key, value) for key, value in part.state[parameter].items())

    def restore(self, values: Iterable[tuple[str, str, Value]]) -> None:
        """Take (name of a parameter, name of a state, value) one by one; what was there before is forgotten.

        Raises:
            ValueError: there is state of a parameter that is not trained here.
        """
        owners = {id(p): part for part in self._parts for group in part.param_groups for p in group["params"]}
        for part in self._parts:
            part.state.clear()
        for name, key, value in values:
            parameter = self._parameters.get(name)
            if parameter is None:
                raise ValueError(f"optimizer state of {name}, which is not among the trained parameters")
            owners[id(parameter)].state[parameter][key] = placed(value, parameter)


def make_optimizer(model: nn.Module, config: TrainerConfig) -> PolicyOptimizer:
    """The configured one, with a learning rate of 0; weight decay for matrices only.

    Raises:
        ConfigError: it needs bitsandbytes, which is not installed.
    """
    settings, trainable = config.optimizer, [p for p in model.parameters() if p.requires_grad]
    if not isinstance(settings, MuonConfig):
        return PolicyOptimizer(model, [_adamw(_groups(model, trainable, settings), settings)])
    outside = _outside_hidden_layers(model)
    matrices = [p for p in trainable if p.ndim == 2 and id(p) not in outside]
    ids = {id(p) for p in matrices}
    others = _groups(model, [p for p in trainable if id(p) not in ids], settings)
    ratio = (settings.adamw_learning_rate or config.learning_rate) / config.learning_rate
    parts = [_muon(matrices, settings)] if matrices else []
    if others:  # under LoRA there are none
        parts.append(_adamw([group | {"rate_ratio": ratio} for group in others], settings))
    return PolicyOptimizer(model, parts)


def _groups(model: nn.Module, parameters: list[nn.Parameter], config: AdamKeys) -> list[Group]:
    """What is decayed, what is not."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    spared = set() if config.decay_embeddings else embeddings
    decayed = [p.ndim >= 2 and id(p) not in spared for p in parameters]
    groups = [
        {"params": [p for p, yes in zip(parameters, decayed, strict=True) if yes], "weight_decay": config.weight_decay},
        {"params": [p for p, yes in zip(parameters, decayed, strict=True) if not yes], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _outside_hidden_layers(model: Any) -> set[int]:
    """Ids of the weights of embeddings and of the output layer."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    return found | ({id(head.weight)} if head is not None else set())


def _adamw(groups: list[Group], config: AdamKeys) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    if not isinstance(config, AdamW8bitConfig):
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)
    try:
        import bitsandbytes
    except ImportError:
        raise ConfigError("trainer.optimizer.type: adamw_8bit needs bitsandbytes; install grpo-actors[bnb]") from None
    library: Any = bitsandbytes.optim
    optimizer: torch.optim.Optimizer = library.AdamW8bit(groups, lr=0.0, betas=betas, eps=config.eps)
    return optimizer


def _muon(matrices: list[nn.Parameter], config: MuonConfig) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        matrices,
        lr=0.0,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.adjust_lr_fn,
    )
