"""Optimizer of the trainer: AdamW from torch or bitsandbytes, or Muon together with AdamW.

State is saved and restored by the names of parameters, so a checkpoint fits any grouping of parameters.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from actors.learner.optimizer_states import PLAIN, SPREAD_BLOCKS, WHOLE_BLOCKS, State, StateFormat, Value
from actors.learner.shards import by_mesh
from schemas.config.optimizers import AdamKeys, AdamW8bitConfig, MuonConfig
from schemas.config.trainer import TrainerConfig
from schemas.errors import ConfigError

ParamGroup = dict[str, Any]


class PolicyOptimizer:
    """Optimizer of a model's trainable parameters, made of several torch optimizers, or a single one.

    Args:
        model: model with the parameters.
        parts: optimizers for disjoint sets of parameters. `rate_ratio` of a group is its learning rate ÷ that of the
            step.
        state_format: format of the state of all parts.
    """

    def __init__(self, model: nn.Module, parts: list[torch.optim.Optimizer], state_format: StateFormat = PLAIN) -> None:
        self._parts, self._format = parts, state_format
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Parameter groups of all parts."""
        return [group for part in self._parts for group in part.param_groups]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next updates."""
        for group in self.param_groups:
            group["lr"] = rate * group.get("rate_ratio", 1.0)

    def step(self) -> None:
        """Update the parameters from the gradients."""
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    def states(self) -> Iterator[tuple[str, str, Value]]:
        """Yield (name of a parameter, name of a state, value as a checkpoint has it), in the order of the model."""
        for name, parameter in self._parameters.items():
            for part in self._parts:
                if parameter in part.state:
                    saved = self._format.saved(parameter, part.state[parameter])
                    yield from ((name, key, value) for key, value in saved.items())

    def restore(self, states: Iterable[tuple[str, State]]) -> None:
        """Replace all state, given as (name of a parameter, its state as a checkpoint has it).

        Raises:
            ValueError: state of a parameter not trained here.
        """
        # by id: a tensor's == compares values
        owners = {id(p): part for part in self._parts for group in part.param_groups for p in group["params"]}
        for part in self._parts:
            part.state.clear()  # also the counts of steps, on which Adam's bias correction depends
        for name, state in states:
            parameter = self._parameters.get(name)
            if parameter is None:
                raise ValueError(f"optimizer state of {name}, which is not among the trained parameters")
            owners[id(parameter)].state[parameter] = self._format.loaded(parameter, state)


def make_optimizer(model: nn.Module, config: TrainerConfig) -> PolicyOptimizer:
    """Return the configured optimizer with a learning rate of 0. Weight decay applies to matrices only.

    Raises:
        ConfigError: bitsandbytes is needed and not installed.
    """
    settings, trainable = config.optimizer, [p for p in model.parameters() if p.requires_grad]
    if isinstance(settings, AdamW8bitConfig):
        spread = config.sharding != "none"
        part = _adamw_8bit(_groups(model, trainable, settings), settings, spread)
        return PolicyOptimizer(model, [part], SPREAD_BLOCKS if spread else WHOLE_BLOCKS)
    if not isinstance(settings, MuonConfig):
        return PolicyOptimizer(model, [_adamw(_groups(model, trainable, settings), settings)])
    # Muon is made for matrices of hidden layers: embeddings and the output layer stay with AdamW
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None:
        outside.add(id(head.weight))
    matrices = [p for p in trainable if p.ndim == 2 and id(p) not in outside]
    ids = {id(p) for p in matrices}
    others = _groups(model, [p for p in trainable if id(p) not in ids], settings)
    # a fixed ratio, so that both rates follow the same schedule
    ratio = (settings.adamw_learning_rate or config.learning_rate) / config.learning_rate
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(
                matrices,
                lr=0.0,
                weight_decay=settings.weight_decay,
                momentum=settings.momentum,
                nesterov=settings.nesterov,
                ns_steps=settings.ns_steps,
                adjust_lr_fn=settings.adjust_lr_fn,
            )
        )
    if others:  # none under LoRA
        parts.append(_adamw([group | {"rate_ratio": ratio} for group in others], settings))
    return PolicyOptimizer(model, parts)


def _groups(model: nn.Module, parameters: list[nn.Parameter], config: AdamKeys) -> list[ParamGroup]:
    """Return parameter groups with and without weight decay; empty groups are left out."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    spared = set() if config.decay_embeddings else embeddings  # weights never decayed
    # norms and biases are spared: decay would only pull their scales and shifts to 0
    decayed = [p.ndim >= 2 and id(p) not in spared for p in parameters]
    # one kernel for all parameters of a group, which takes a single mesh of ranks
    return [
        {"params": group, "weight_decay": config.weight_decay if is_decayed else 0.0}
        for is_decayed in (True, False)
        for group in by_mesh(p for p, yes in zip(parameters, decayed, strict=True) if yes == is_decayed)
    ]


def _adamw(groups: list[ParamGroup], config: AdamKeys) -> torch.optim.Optimizer:
    # lr 0 until `set_rate`; fused: a single kernel per group
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _adamw_8bit(groups: list[ParamGroup], config: AdamKeys, spread: bool) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except ImportError:
        raise ConfigError("trainer.optimizer.type: adamw_8bit needs bitsandbytes; install grpo-actors[bnb]") from None
    betas = (config.beta1, config.beta2)
    if spread:
        from actors.learner.spread_adamw_8bit import SpreadAdamW8bit

        return SpreadAdamW8bit(groups, betas, config.eps)
    library: Any = bitsandbytes.optim
    optimizer: torch.optim.Optimizer = library.AdamW8bit(groups, lr=0.0, betas=betas, eps=config.eps)
    return optimizer
