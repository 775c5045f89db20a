"""The optimizer of the trainer."""

import torch
from torch import nn

from schemas.config.actors import AdamWConfig


def make_optimizer(model: nn.Module, config: AdamWConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay for matrices only."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
