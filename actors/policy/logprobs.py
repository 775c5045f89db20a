"""Logprobs of chosen tokens under a tempered distribution."""

import torch
from torch import Tensor


def chosen_logprobs(logits_TV: Tensor, token_ids_T: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs of the chosen tokens, with gradient, and entropy of the distributions, without; in float32.

    Temperature 0 stands for greedy sampling, whose logprobs are those of the untempered distribution.
    """
    logits_TV = logits_TV.float()
    if not bool((temperatures_T == 1).all()):
        divisor_T = torch.where(temperatures_T > 0, temperatures_T, torch.ones_like(temperatures_T))
        logits_TV = logits_TV / divisor_T[:, None]
    normaliser_T = logits_TV.logsumexp(-1)
    logprobs_T = logits_TV.gather(1, token_ids_T[:, None])[:, 0] - normaliser_T
    with torch.no_grad():
        probabilities_TV = (logits_TV - normaliser_T[:, None]).exp_()
        entropy_T = normaliser_T - torch.linalg.vecdot(probabilities_TV, logits_TV)
    return logprobs_T, entropy_T
