"""The reward actor with the functions of its configuration, for a process of its own or a thread of a program."""

from actors.models.tokenizer import vocabulary
from actors.reward.builtin import unmeasured
from actors.reward.functions import NamedReward, load_advantage, load_rewards, load_steps
from actors.reward.lookup import load_function
from actors.reward.loop import RewardActor
from actors.reward.workers import WorkerHost
from actors.telemetry.metrics import Metrics
from schemas.config import RunConfig
from schemas.config.advantages import CustomAdvantageConfig


def make_reward_actor(config: RunConfig, name: str, metrics: Metrics) -> RewardActor:
    """Make the reward actor, with the user's functions. No other process imports reward functions."""
    path, advantage = config.eval.exact_match, config.reward.advantage
    exact_match = NamedReward("exact_match", 0.0, {}, load_function(path, "eval.exact_match") if path else unmeasured)
    custom = load_advantage(advantage) if isinstance(advantage, CustomAdvantageConfig) else None
    vocab_size = 0
    # only the gibberish filter compares with the vocabulary, and reading the vocabulary loads a tokenizer
    if any(one.type == "gibberish" for one in config.reward.filters):
        vocab_size = config.inference.engine.own_vocab_size or len(vocabulary(config.model))
    host = WorkerHost(config.reward.timeout)
    try:
        functions = load_rewards(config.reward.functions, host)
        steps = load_steps(config.reward.steps, host) if config.reward.steps and config.reward.steps.path else None
        host.wait_until_loaded()
        return RewardActor(config, name, metrics, functions, exact_match, vocab_size, steps, custom, host)
    except BaseException:
        # no worker may outlive an actor that can't start
        host.close()
        raise
