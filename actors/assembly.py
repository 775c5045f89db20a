"""Assembly: makes each actor with its collaborators from a configuration. Only here implementations are chosen.

Imports are inside the functions, so that no actor loads modules that only another actor needs (above all torch).
"""

import re
import socket
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from actors.engines import embedded, fake, sglang, vllm
from actors.process.actor import Actor
from actors.process.devices import shares_gpu
from actors.process.output_dir import take
from actors.process.tasks import task
from actors.telemetry.metrics import Metrics
from bus.run_folder import weights_directory, weights_folder
from schemas.config import RunConfig
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.services import is_wildcard
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from actors.algorithms.difficulty_pools import DifficultyPools, Keys
    from actors.algorithms.losses import CustomLoss
    from actors.callbacks.loop import CallbacksActor
    from actors.datasets import Dataset
    from actors.datasets.prompts import Encode, Expand, Prompts
    from actors.engines.protocol import Engine
    from actors.inference.loop import InferenceActor
    from actors.learner.protocol import Learner
    from actors.ledger import Store
    from actors.packer.loop import PackerActor
    from actors.reward.loop import RewardActor
    from actors.rollout.loop import RolloutActor
    from actors.trackers.loop import TrackerActor
    from actors.trainer.loop import TrainerActor
    from actors.trajectories.chat import Chat
    from actors.uploader.loop import UploaderActor
    from bus.weights import WeightPublisher, WeightReceiver
    from bus.weights.memory import Memory
    from schemas.config.data import Split
    from schemas.config.environments import EnvironmentConfig
    from schemas.messages import Purpose


LEDGER_PATIENCE_SECONDS = 5.0
"""Time to wait for the ledger's lock: a just killed packer may hold the lock for some milliseconds."""


# all makers take **_, since the runtime passes the same arguments to each


def make_rollout(config: RunConfig, name: str, metrics: Metrics, **_: Any) -> "RolloutActor":
    """Make the rollout actor, with HTTP client, data sets and tokenizer."""
    from actors.engines.http.access import api_key, client_tls
    from actors.engines.http.client import CompletionClient
    from actors.rollout.engine_choice import EngineChoice
    from actors.rollout.environments import EnvironmentPlayer
    from actors.rollout.group import GroupSampler, longest_sample
    from actors.rollout.loop import RolloutActor
    from schemas.config.environments import EnvironmentBase

    datasets = make_rollout_datasets(config)
    encode = make_encode(config, name)
    for label in config.environments_by_label:
        # a series that appears later would look like a jump to Prometheus
        metrics.count("grpo_rollout_cut_prompts_total", 0.0, environment=label)

    def note_cut(label: str) -> None:
        metrics.count("grpo_rollout_cut_prompts_total", environment=label)

    engine, key, tls = config.inference, api_key(config.inference), client_tls(config.inference)

    def client() -> CompletionClient:
        slots = config.rollout.max_concurrent_groups
        if any(isinstance(one, EnvironmentBase) for one in config.environments):
            # each trajectory asks by itself
            evaluated = (one.keys.completions_per_prompt for one in config.evaluations.values())
            slots *= max([config.rollout.group_size, *evaluated])
        return CompletionClient(config.model.path, engine.request_timeout, slots, key, tls)

    engines, expand, player = EngineChoice(config, metrics, client), make_expand(config), None
    if chats := make_chats(config):
        player = EnvironmentPlayer(config, name, chats, engines, metrics, longest_sample(config)[1], expand)
    sampler = GroupSampler(config, name, datasets, encode, engines, player, note_cut, expand)
    return RolloutActor(config, name, metrics, sampler)


def make_rollout_datasets(config: RunConfig) -> "dict[tuple[Purpose, str], Dataset]":
    """Make the data sets of a rollout actor, by purpose and label."""
    from actors.datasets import make_dataset, prepared_folder

    # the packer checks every row; a bad row would fail only its own attempt here
    prepared = prepared_folder(config)
    datasets: dict[tuple[Purpose, str], Dataset] = {
        ("train", e.label): make_dataset(e, "train", config.seed, check=False, prepared=prepared)
        for e in config.trained
    }
    for label, one in config.evaluations.items():
        split = one.environment.evaluated_split
        datasets["eval", label] = make_dataset(one.environment, split, config.seed, check=False, prepared=prepared)
    return datasets


def make_encode(config: RunConfig, name: str) -> "Encode":
    """Make the function from prompts to token ids.

    An engine without a model has token ids of its own; the fake engine counts one token per character.
    """
    from actors.models.tokenizer import Tokenizer

    loads_model = config.inference.engine.loads_model
    return Tokenizer(config.model).encode if loads_model else make_engine(config, name).tokenize


def make_expand(config: RunConfig) -> "Expand | None":
    """Make the function that gives images of prompts their tokens; None if the run takes no images.

    The model's files are read with the first image, so a run on text needs no image processor.
    """
    from actors.datasets.images import why_not_taken
    from actors.models.image_tokens import ImageTokens

    if why_not_taken(config):
        return None
    rule = cache(partial(ImageTokens.of_model, config.model))
    return lambda token_ids, sizes: rule().expand(token_ids, sizes)


def make_chats(config: RunConfig) -> "dict[str, Chat]":
    """Make the language of each environment, by label."""
    from schemas.config.environments import EnvironmentBase

    labels = {one.label: one for one in config.environments if isinstance(one, EnvironmentBase)}
    return {label: make_chat(config, one.chat_template_kwargs) for label, one in labels.items()}


def make_chat(config: RunConfig, template_kwargs: dict[str, Any]) -> "Chat":
    """Make the language in which environments talk with the model."""
    if isinstance(config.inference.engine, FakeEngineConfig):
        return fake.chat(config.inference.engine.vocab_size)
    from actors.rollout.model_chat import chat_of

    return chat_of(config.model, template_kwargs)


def make_reward(config: RunConfig, name: str, metrics: Metrics, **_: Any) -> "RewardActor":
    """Make the reward actor, with the user's functions."""
    from actors.reward.making import make_reward_actor

    return make_reward_actor(config, name, metrics)


def make_measured_prompts(config: RunConfig, name: str) -> "Prompts | None":
    """Make the encoder of prompts by which the packer leaves long ones out; None if no environment wants that."""
    from actors.datasets.images import why_not_taken
    from actors.datasets.prompts import Prompts

    # the tokenizer is loaded only where prompts must be measured
    if not any(e.max_prompt_tokens is not None and e.long_prompts == "drop" for e in config.environments):
        return None
    encode, expand = make_encode(config, name), make_expand(config)
    return Prompts(config.environments_by_label, encode, expand=expand, why_not=why_not_taken(config))


def make_packer(
    config: RunConfig,
    name: str,
    metrics: Metrics,
    started_at: float | None = None,
    fork: bool = False,
    **_: Any,
) -> "PackerActor":
    """Make the packer, with ledger, data sets and curriculum."""
    from actors.algorithms.curriculum import Curriculum
    from actors.algorithms.moving_levels import MovingLevel
    from actors.datasets import make_dataset, prepared_folder
    from actors.datasets.identity import pinned_commits
    from actors.environments.own_examples import own_examples
    from actors.ledger import Store
    from actors.ops.previous_run import check_ledger_is_own, check_ledger_is_there, lacks_checkpoint
    from actors.ops.run_length import with_run_length
    from actors.packer.loop import PackerActor
    from actors.telemetry.reporter import Reporter

    # before anything is written: if the ledger's disk is not mounted, nothing may look like a new run
    check_ledger_is_there(config)
    check_ledger_is_own(config)
    take(config)
    prepared = prepared_folder(config)
    own = {e.label: own_examples(e, config.bus, name) for e in config.environments}

    def dataset(e: "EnvironmentConfig", split: "Split") -> "Dataset":
        return make_dataset(e, split, config.seed, num_examples=own[e.label][split], prepared=prepared)

    prompts = make_measured_prompts(config, name)
    weights = [e.weight for e in config.trained if e.weight is not None]
    ledger = config.ledger
    store = Store(config.ledger_path, ledger.sync, LEDGER_PATIENCE_SECONDS, ledger.commit_timeout, config.output)
    try:
        # the ledger decides which commits of the hub the run has, also if somebody has removed the folder
        prepared.note("commits.json", pinned_commits(store.value("data") or {}))
        train = {e.label: dataset(e, "train") for e in config.trained}
        config = with_run_length(config, train)
        # without evaluations no file of an eval split is read
        held_out = {
            label: dataset(one.environment, one.environment.evaluated_split)
            for label, one in config.evaluations.items()
        }
        sizes = [e.num_examples for e in train.values()]
        shuffled = [getattr(e, "shuffle", True) for e in config.trained]
        pools = make_difficulty_pools(config, train, store)
        stored = store.value("levels") or {}
        levels = [
            MovingLevel(moving, stored.get(e.label)) if (moving := getattr(e, "curriculum", None)) else None
            for e in config.trained
        ]
        curriculum = Curriculum(sizes, weights or None, config.seed, pools, shuffled, levels)
        counts = store.value("curriculum") or []
        # a fork may have other environments, whose epochs begin anew
        if len(counts) == len(train):
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
            lambda step: lacks_checkpoint(config, store, step),
            started_at,
            fork,
            prompts,
        )
    except BaseException:
        # frees the ledger's lock at once, for the next packer
        store.close()
        raise


def make_difficulty_pools(
    config: RunConfig, train: Mapping[str, "Dataset"], store: "Store"
) -> "DifficultyPools | None":
    """Make the difficulty pools from the ledger; None if not configured.

    Every example is read for its key, which takes seconds for 100 000 examples.

    Raises:
        ConfigError: an example lacks a column of `packer.pools.hash_keys`.
    """
    if config.packer.pools is None:
        return None
    from actors.algorithms.difficulty_pools import DifficultyPools

    keys = [difficulty_pool_keys(label, dataset, config.packer.pools.hash_keys) for label, dataset in train.items()]
    return DifficultyPools(config.packer.pools, keys, store.pools())


def difficulty_pool_keys(label: str, dataset: "Dataset", hash_keys: list[str]) -> "Keys | None":
    """Return the keys by which pools know the examples of a data set; None for a generated one without end.

    Raises:
        ConfigError: an example lacks a column of `packer.pools.hash_keys`.
    """
    import numpy as np

    from actors.algorithms.difficulty_pools import difficulty_pool_key

    if dataset.num_examples is None:
        return None
    keys = np.zeros(dataset.num_examples, np.uint64)
    try:
        with task(f"read examples of {label}", dataset.num_examples, "examples") as reading:
            for index in range(dataset.num_examples):
                one = dataset.example(index)
                keys[index] = difficulty_pool_key(label, one.prompt, one.columns, hash_keys)
                reading.advance()
        return keys
    except KeyError as error:
        raise ConfigError(f"packer.pools.hash_keys: not every example of {label} has a column {error}") from None


def make_learner(config: RunConfig, threads: int | None = None, rank: int | None = None) -> "Learner":
    """Make the learner of this configuration.

    Args:
        config: configuration of the run.
        threads: number of torch's threads; None: unchanged.
        rank: rank in the gang; None: the learner has all weights, even if the run's gang shards them.
    """
    # an engine without a model goes with a learner without one, which needs no torch
    if not config.inference.engine.loads_model:
        from actors.learner.fake import FakeLearner

        return FakeLearner(ranks_per_row=1 if rank is None else config.trainer.ranks_per_row)
    import torch

    from actors.learner.learner import TorchLearner

    if threads is not None:
        torch.set_num_threads(threads)
    trainer = config.trainer
    if rank is not None and trainer.sharding == "fsdp" and trainer.num_ranks > 1:
        from actors.learner.fsdp import FullySharded

        learner = TorchLearner(config, load_loss(config), FullySharded(rank, trainer))
    else:
        from actors.learner.parallelism import DataParallel

        # a replay has no rank, and no engine
        shares_base = config.up.share_base and rank == 0
        parallelism = DataParallel(trainer.context_parallel)
        learner = TorchLearner(config, load_loss(config), parallelism, shares_base=shares_base)
    # a replay, which has no rank, writes nothing; ranks with the same rows have the same values
    writes = rank is not None and rank % trainer.ranks_per_row == 0
    if writes and config.telemetry.token_details:
        from actors.learner.token_details import TokenDetailsWriter

        learner.details = TokenDetailsWriter(config.output, config.telemetry.token_details, config.trainer.loss.type)
    return learner


def load_loss(config: RunConfig) -> "CustomLoss | None":
    """Load the user's loss function; None if not configured.

    Raises:
        ConfigError: the function can't be found, or can't be called.
    """
    from actors.process.user_code import load_function
    from schemas.config.losses import CustomLossConfig

    loss = config.trainer.loss
    return load_function(loss.path, "trainer.loss.path") if isinstance(loss, CustomLossConfig) else None


def make_trainer(
    config: RunConfig,
    name: str,
    metrics: Metrics,
    learner: "Callable[[], Learner] | None" = None,
    **_: Any,
) -> "TrainerActor":
    """Make a trainer rank, its learner, weight channel and checkpoints. Torch is imported after the first heartbeat."""
    from actors.learner.checkpoints import CheckpointFolder
    from actors.trainer.loop import TrainerActor

    take(config)
    rank, size = replica_index(name), config.trainer.num_ranks

    def meet(run: str, incarnation: int, check: Callable[[], object]) -> Any:
        from actors.learner.ranks import SINGLE_RANK, GlooRanks

        if size == 1:
            return SINGLE_RANK
        # a folder for each incarnation: files of ranks that are gone would confuse the new ones
        meeting_point = config.output / "ranks" / f"{run}.{incarnation}"
        return GlooRanks(rank, size, meeting_point, reachable_host(config), check, config.trainer.gang_timeout)

    return TrainerActor(
        config,
        name,
        metrics,
        (lambda _: learner()) if learner else partial(make_learner, rank=rank),
        meet,
        make_publisher(config) if rank == 0 else None,
        # ranks share the folder: all read their checkpoint there, and one writes
        CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint, writes=rank == 0),
        rank,
        shares_gpu(),
    )


def make_publisher(config: RunConfig) -> "WeightPublisher":
    """Make the trainer's end of the configured weight channel."""
    if config.weights.channel == "filesystem":
        from bus.weights.filesystem import FilesystemPublisher

        return FilesystemPublisher(weights_folder(config), config.weights.keep)
    from bus.weights.rendezvous import RendezvousPublisher

    settings = config.weights
    listen = config.bus.host if config.bus.control.startswith("tcp") else ""
    memory = weight_memory(config, "trainer")
    return RendezvousPublisher(
        reachable_host(config), settings.bucket_bytes, settings.keep, settings.timeout, listen, memory
    )


def make_receiver(config: RunConfig, boot_id: str) -> "WeightReceiver":
    """Make an inference actor's end of the configured weight channel."""
    if config.weights.channel == "filesystem":
        from bus.weights.filesystem import FilesystemReceiver

        return FilesystemReceiver(weights_directory(config))
    from bus.weights.rendezvous import RendezvousReceiver

    return RendezvousReceiver(boot_id, reachable_host(config), config.weights.timeout, weight_memory(config, "engine"))


def weight_memory(config: RunConfig, end: Literal["trainer", "engine"]) -> "Memory":
    """Make the memory in which one end of a broadcast has its copies of the weights."""
    from bus.weights.device_memory import DeviceMemory
    from bus.weights.memory import HostMemory

    if config.weights.channel == "rendezvous":
        return HostMemory()
    computes_here = end == "trainer" or config.inference.engine.loads_model

    def device() -> "torch.device":
        from actors.models.loading import device_of  # imports torch

        return device_of(config.model if computes_here else config.model.model_copy(update={"device": "cpu"}))

    return DeviceMemory(device)


def reachable_host(config: RunConfig) -> str:
    """Return an address under which other processes reach this machine; loopback if the bus stays on this machine."""
    bus = config.bus
    if not bus.control.startswith("tcp"):
        return "127.0.0.1"
    return bus.advertise_host or (socket.gethostname() if is_wildcard(bus.host) else bus.host)


def make_inference(config: RunConfig, name: str, metrics: Metrics, **_: Any) -> "InferenceActor":
    """Make the inference actor, with its engine. Torch is imported after the first heartbeat."""
    from actors.inference.loop import InferenceActor

    # actors on one machine can't share the configured port: each adds its ordinal
    port = config.inference.port and config.inference.port + replica_index(name)
    # called after the first heartbeat: loading takes minutes, and heartbeats tell of an engine that starts
    engine = partial(make_engine, config, name)
    return InferenceActor(config, name, metrics, engine, partial(make_receiver, config), port, shares_gpu())


def make_callbacks(config: RunConfig, name: str, metrics: Metrics, **_: Any) -> "CallbacksActor":
    """Make the actor that tells events to the user's callbacks. Their code is loaded when it runs.

    Raises:
        ConfigError: `callbacks` is empty.
    """
    from actors.callbacks.loop import CallbacksActor
    from actors.datasets import make_dataset
    from schemas.config.environments import EnvironmentBase

    if not config.callbacks:
        raise ConfigError("callbacks: is empty, so there is nobody to tell events")
    take(config)
    # epochs are known where files of rows are; other sources would have to be opened, or asked
    files = [e for e in config.trained if "train" in e.files and not isinstance(e, EnvironmentBase)]
    num_rows = None
    if len(files) == len(config.trained) and config.trainer.max_epochs is None:
        sizes = [make_dataset(e, "train", config.seed, check=False).num_examples for e in files]
        num_rows = sum(size or 0 for size in sizes)
    return CallbacksActor(config, name, metrics, num_rows)


def make_uploader(config: RunConfig, name: str, metrics: Metrics, **_: Any) -> "UploaderActor":
    """Make the actor that pushes checkpoints to the hub.

    Raises:
        ConfigError: `push_to_hub` is not set.
    """
    from actors.uploader.loop import UploaderActor

    if config.push_to_hub is None:
        raise ConfigError("push_to_hub: is not set, so there is nothing to upload")
    take(config)
    return UploaderActor(config, config.push_to_hub, name, metrics)


def make_tracker(config: RunConfig, name: str, metrics: Metrics, **_: Any) -> "TrackerActor":
    """Make the actor that sends steps to a tracker: tracker-1 has the second one of `telemetry.trackers`.

    Raises:
        ConfigError: there is no such tracker.
    """
    from actors.trackers.loop import TrackerActor

    index = replica_index(name)
    if index >= len(config.telemetry.trackers):
        raise ConfigError(f"telemetry.trackers: has {len(config.telemetry.trackers)} entries, so {name} has none")
    take(config)
    return TrackerActor(config, index, name, metrics)


def make_engine(config: RunConfig, name: str) -> "Engine":
    """Make the configured engine, for the actor of this name."""
    engine = config.inference.engine
    return ENGINES[engine.type](config, engine, name, replica_index(name))


ENGINES: dict[str, "Callable[[RunConfig, Any, str, int], Engine]"] = {
    "embedded": embedded.make,
    "vllm": vllm.make,
    "sglang": sglang.make,
    "fake": fake.make,
}
"""Makers of engines, by `inference.engine.type`.

Arguments: the run's configuration, the configuration of the engine, the name of the inference actor, and its number,
the index of its server. A maker imports torch inside, if at all.
"""


MAKERS: dict[str, Callable[..., Actor]] = {
    "rollout": make_rollout,
    "reward": make_reward,
    "packer": make_packer,
    "trainer": make_trainer,
    "inference": make_inference,
    "callbacks": make_callbacks,
    "uploader": make_uploader,
    "tracker": make_tracker,
}


def replica_index(name: str) -> int:
    """Return the number at the end of an actor's name (3 for inference-3); 0 if there is none."""
    found = re.search(r"\d+$", name)
    return int(found.group()) if found else 0
