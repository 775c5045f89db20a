"""From a configuration to an actor with its collaborators: the one place that knows which implementation is used.

Imports are inside the functions, so that no actor loads what only another one needs (torch above all).
"""

import hashlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from actors.telemetry.metrics import Metrics
from bus.control import Lossy
from bus.counts import EdgeCounts
from schemas.config import RunConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from actors.algorithms.noise import NormNoise
    from actors.algorithms.pools import Keys, Pools
    from actors.environments import Environment
    from actors.inference import InferenceActor
    from actors.ledger import Store
    from actors.packer import PackerActor
    from actors.policy.learner import Learner
    from actors.reward import RewardActor
    from actors.rollout import RolloutActor
    from actors.trainer import TrainerActor
    from bus.weights import WeightPublisher, WeightReceiver


LEDGER_PATIENCE_SECONDS = 5.0
"""A packer that has just been killed may hold the ledger for some milliseconds more."""


class Actor(Protocol):
    """What the runtime drives."""

    def run(self, metrics_url: str = "") -> None:
        """Work until the end."""
        ...

    def drain(self) -> None:
        """Come to an end soon, losing nothing. From any thread."""
        ...

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of the actor's sockets."""
        ...


def make_rollout(config: RunConfig, name: str, metrics: Metrics, lose: Lossy | None = None, **_: Any) -> "RolloutActor":
    """The rollout actor with HTTP client, environments and tokenizer."""
    from actors.engines.access import api_key, client_tls
    from actors.engines.client import CompletionClient
    from actors.environments import make_environment
    from actors.environments.prompts import Tokenizer
    from actors.rollout import RolloutActor
    from schemas.config.actors import FakeEngineConfig
    from schemas.messages import Purpose

    purposes: tuple[Purpose, ...] = ("train", "eval")
    environments = {(p, e.label): make_environment(e, p, config.seed) for e in config.environments for p in purposes}
    if isinstance(config.inference.engine, FakeEngineConfig):
        from actors.engines.fake import FakeEngine

        encode: Any = FakeEngine(config.inference.engine).tokenize
    else:
        encode = Tokenizer(config.model).encode

    engine, key, tls = config.inference, api_key(config.inference), client_tls(config.inference)

    def client() -> CompletionClient:
        slots = config.rollout.max_concurrent_groups
        return CompletionClient(config.model.path, engine.request_timeout, slots, key, tls)

    return RolloutActor(config, name, metrics, environments, encode, client, lose)


def make_reward(config: RunConfig, name: str, metrics: Metrics, lose: Lossy | None = None, **_: Any) -> "RewardActor":
    """The reward actor with the user's functions, the only place where their import paths are resolved."""
    from actors.reward import RewardActor
    from actors.rewards.builtin import unmeasured
    from actors.rewards.load import load_function
    from actors.rewards.score import NamedReward, load_advantage, load_rewards, load_steps
    from schemas.config.advantages import CustomAdvantageConfig

    path, advantage = config.eval.exact_match, config.reward.advantage
    exact_match = NamedReward("exact_match", 0.0, {}, load_function(path, "eval.exact_match") if path else unmeasured)
    functions = load_rewards(config.reward.functions)
    steps = load_steps(config.reward.steps) if config.reward.steps else None
    custom = load_advantage(advantage) if isinstance(advantage, CustomAdvantageConfig) else None
    return RewardActor(config, name, metrics, functions, exact_match, lose, _vocab_size(config), steps, custom)


def _vocab_size(config: RunConfig) -> int:
    """Of the policy, where a filter asks for it: a tokenizer is read for it."""
    from actors.environments.prompts import vocabulary
    from schemas.config.actors import FakeEngineConfig

    if not any(one.type == "gibberish" for one in config.reward.filters):
        return 0
    engine = config.inference.engine
    return engine.vocab_size if isinstance(engine, FakeEngineConfig) else len(vocabulary(config.model))


def make_packer(
    config: RunConfig,
    name: str,
    metrics: Metrics,
    started_at: float | None = None,
    lose: Lossy | None = None,
    fork: bool = False,
    **_: Any,
) -> "PackerActor":
    """The packer with its ledger, environments and curriculum."""
    from actors.algorithms.curriculum import Curriculum
    from actors.environments import make_environment
    from actors.ledger import Store
    from actors.packer import PackerActor
    from actors.telemetry.reporter import Reporter

    train = {e.label: make_environment(e, "train", config.seed) for e in config.environments}
    held_out = (
        {e.label: make_environment(e, "eval", config.seed) for e in config.environments}
        if config.eval.num_prompts
        else {}
    )
    weights = [e.weight for e in config.environments if e.weight is not None]
    store = Store(config.ledger_path, config.ledger.sync, LEDGER_PATIENCE_SECONDS, config.ledger.commit_timeout)
    try:
        sizes = [e.num_examples for e in train.values()]
        curriculum = Curriculum(sizes, weights or None, config.seed, make_pools(config, train, store))
        counts = store.value("curriculum") or []
        if len(counts) == len(train):  # a fork may have other environments
            curriculum.counts = counts
        return PackerActor(
            config,
            name,
            metrics,
            train,
            held_out,
            curriculum,
            store,
            Reporter(config.output),
            started_at,
            lose,
            fork,
        )
    except BaseException:
        store.close()
        raise


def make_pools(config: RunConfig, train: Mapping[str, "Environment"], store: "Store") -> "Pools | None":
    """The difficulty pools as the ledger has them. Every example is read for its key: seconds for 100 000.

    Raises:
        ConfigError: an example lacks a column of `packer.pools.hash_keys`.
    """
    if config.packer.pools is None:
        return None
    from actors.algorithms.pools import Pools

    keys = [pool_keys(label, environment, config.packer.pools.hash_keys) for label, environment in train.items()]
    return Pools(config.packer.pools, keys, store.pools())


def pool_keys(label: str, environment: "Environment", hash_keys: list[str]) -> "Keys | None":
    """By which the pools know the examples of an environment; None where it never ends.

    Raises:
        ConfigError: an example lacks a column.
    """
    import numpy as np

    from actors.algorithms.pools import pool_key

    if environment.num_examples is None:
        return None
    examples = (environment.example(index) for index in range(environment.num_examples))
    try:
        return np.array([pool_key(label, one.prompt, one.columns, hash_keys) for one in examples], np.uint64)
    except KeyError as error:
        raise ConfigError(f"packer.pools.hash_keys: not every example of {label} has a column {error}") from None


def make_learner(config: RunConfig, threads: int | None = None, rank: int | None = None) -> "Learner":
    """The learner of this configuration, with torch's threads as they come, or this many.

    Without a rank it has all weights, whatever a gang of the run would share out.
    """
    from schemas.config.actors import FakeEngineConfig

    if isinstance(config.inference.engine, FakeEngineConfig):
        from actors.policy.fake import FakeLearner

        return FakeLearner()
    import torch

    from actors.policy.learner import TorchLearner

    if threads is not None:
        torch.set_num_threads(threads)
    if rank is not None and config.trainer.sharding == "fsdp" and config.trainer.num_ranks > 1:
        from actors.policy.sharding import ShardedLearner

        return ShardedLearner(config, rank)
    return TorchLearner(config)


def make_trainer(
    config: RunConfig,
    name: str,
    metrics: Metrics,
    lose: Lossy | None = None,
    learner: "Callable[[], Learner] | None" = None,
    **_: Any,
) -> "TrainerActor":
    """One rank of the trainer with learner, weight channel and checkpoints; torch is imported after the first beat."""
    from actors.policy.checkpoints import CheckpointFolder
    from actors.trainer import TrainerActor

    rank, size = ordinal_of(name), config.trainer.num_ranks

    def meet(run: str, incarnation: int, check: Callable[[], object]) -> Any:
        from actors.policy.ranks import ALONE, GlooRanks

        if size == 1:
            return ALONE
        meeting_point = config.output / "ranks" / f"{run}.{incarnation}"
        return GlooRanks(rank, size, meeting_point, reachable_host(config), check, config.trainer.gang_timeout)

    return TrainerActor(
        config,
        name,
        metrics,
        learner or (lambda: make_learner(config, rank=rank)),
        meet,
        make_publisher(config) if rank == 0 else None,
        CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint, writes=rank == 0),
        rank,
        lose,
    )


def make_publisher(config: RunConfig) -> "WeightPublisher":
    """The trainer's end of the configured weight channel."""
    if config.weights.channel == "rendezvous":
        from bus.weights.rendezvous import RendezvousPublisher

        settings = config.weights
        return RendezvousPublisher(reachable_host(config), settings.bucket_bytes, settings.keep, settings.timeout)
    from bus.weights.filesystem import FilesystemPublisher

    return FilesystemPublisher(weights_directory(config), config.weights.keep)


def make_receiver(config: RunConfig, boot_id: str) -> "WeightReceiver":
    """An inference actor's end of it."""
    if config.weights.channel == "rendezvous":
        from bus.weights.rendezvous import RendezvousReceiver

        return RendezvousReceiver(boot_id, reachable_host(config), config.weights.timeout)
    from bus.weights.filesystem import FilesystemReceiver

    return FilesystemReceiver()


def reachable_host(config: RunConfig) -> str:
    """An address of this machine that the other ranks reach: loopback where the bus stays on this host."""
    bus = config.bus
    if not bus.control.startswith("tcp"):
        return "127.0.0.1"
    return bus.advertise_host or (socket.gethostname() if bus.host in ("", "0.0.0.0", "::") else bus.host)  # noqa: S104


def make_inference(
    config: RunConfig, name: str, metrics: Metrics, lose: Lossy | None = None, **_: Any
) -> "InferenceActor":
    """The inference actor with its engine; torch is imported after the first beat."""
    from actors.inference import InferenceActor
    from schemas.config.actors import FakeEngineConfig
    from schemas.config.engines import VllmEngineConfig
    from schemas.config.sglang import SglangEngineConfig

    def engine() -> Any:
        settings = config.inference.engine
        if isinstance(settings, FakeEngineConfig):
            from actors.engines.fake import FakeEngine

            return FakeEngine(settings)
        if isinstance(settings, VllmEngineConfig):
            from actors.engines.vllm.engine import VllmEngine

            paths = config.output / "logs" / f"{name}.vllm.log", weights_scratch(config, name, own=not settings.urls)
            mode, noise = config.weights.update_mode, norm_noise(config)
            return VllmEngine(config.model, settings, mode, *paths, ordinal_of(name), noise)
        if isinstance(settings, SglangEngineConfig):
            from actors.engines.sglang.engine import SglangEngine

            scratch = weights_scratch(config, name, own=False)
            return SglangEngine(config.model, settings, config.weights.update_mode, scratch, ordinal_of(name))
        from actors.engines.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(config.model, settings, config.weights.update_mode, norm_noise(config))

    port = config.inference.port and config.inference.port + ordinal_of(name)
    return InferenceActor(config, name, metrics, engine, partial(make_receiver, config), port, lose)


def norm_noise(config: RunConfig) -> "NormNoise | None":
    """What engines put on the norms, if anything."""
    if config.inference.noise is None:
        return None
    from actors.algorithms.noise import NormNoise

    return NormNoise(config.inference.noise, config.trainer.max_steps, config.seed)


MAKERS: dict[str, Callable[..., Actor]] = {
    "rollout": make_rollout,
    "reward": make_reward,
    "packer": make_packer,
    "trainer": make_trainer,
    "inference": make_inference,
}


def ordinal_of(name: str) -> int:
    """The number at the end of an actor's name (inference-3: 3); 0 where there is none."""
    found = re.search(r"\d+$", name)
    return int(found.group()) if found else 0


def weights_directory(config: RunConfig) -> Path:
    """Where published versions lie: as configured, else shared memory when the bus stays on this host."""
    if config.weights.directory:
        return Path(config.weights.directory).absolute()
    return config.output / "weights" if config.bus.control.startswith("tcp") else _shared_memory(config)


def weights_scratch(config: RunConfig, name: str, own: bool) -> Path:
    """Where an actor lays out a version for a server that reads files: shared memory where both are on one host."""
    base = weights_directory(config)
    if own and not config.weights.directory:
        base = _shared_memory(config)
    return base.with_name(f"{base.name}.{name}")


def _shared_memory(config: RunConfig) -> Path:
    """A folder of this run's there, or on disk where there is none."""
    shared_memory = Path("/dev/shm")  # noqa: S108 - a folder of ours inside it
    if not shared_memory.is_dir():
        return config.output / "weights"
    tag = hashlib.sha256(str(config.output).encode()).hexdigest()[:10]
    return shared_memory / f"grpo-actors-{os.getuid()}-{tag}"
