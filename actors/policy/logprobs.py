"""Logprobs of chosen tokens under a tempered distribution, and its entropy; in float32.

Temperature 0 stands for greedy sampling, whose logprobs are those of the untempered distribution.
"""

import torch
from torch import Tensor


def chosen_logprobs(logits_TV: Tensor, token_ids_T: Tensor, temperatures_T: Tensor) -> Tensor:
    """Logprobs of the chosen tokens, with gradient."""
    logits_TV = _tempered(logits_TV, temperatures_T)
    return _chosen(logits_TV, token_ids_T) - logits_TV.logsumexp(-1)


def logprobs_and_entropy(
    logits_TV: Tensor, token_ids_T: Tensor, temperatures_T: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs of the chosen tokens, with gradient, and entropy of the distributions, with it where it is asked for."""
    logits_TV = _tempered(logits_TV, temperatures_T)
    normaliser_T = logits_TV.logsumexp(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities_TV = (logits_TV - normaliser_T[:, None]).exp_()
        entropy_T = normaliser_T - torch.linalg.vecdot(probabilities_TV, logits_TV)
    return _chosen(logits_TV, token_ids_T) - normaliser_T, entropy_T


def _tempered(logits_TV: Tensor, temperatures_T: Tensor) -> Tensor:
    logits_TV = logits_TV.float()
    if bool((temperatures_T == 1).all()):
        return logits_TV
    divisor_T = torch.where(temperatures_T > 0, temperatures_T, torch.ones_like(temperatures_T))
    return logits_TV / divisor_T[:, None]


def _chosen(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
    return logits_TV.gather(1, token_ids_T[:, None])[:, 0]
