"""Seconds of each part of a weight update by channel, compared with a bare broadcast and a plain copy.

    python -m benchmarks.weights [--json PATH]

*Parts.* `gather`: the trainer copies and publishes its weights, and training waits. `wire`: the engine's process
receives and checks a version (`unchecked`: without its codes). `load`: from the end of `wire` until the engine serves
the version. `pause`: the part of `load` in which an idle engine stands still. `interrupt` and `inflight`: the pause
with 16 running completions of about 24 tokens; `interrupt` computes their keys and values again, `inflight` keeps them.

*Channels.* `device, mapped`: the engine maps the trainer's block of memory. `device, sent`: the same memory, sent by
broadcast, which needs a second GPU where the model is on one.

*Limits.* `bare` is a `ProcessGroupGloo.broadcast` of the same bytes between the same two processes, in one tensor that
is reused; `buckets` is the same broadcast in buckets. `share` is bare / wire. For mapped memory `bare` is a copy within
the device. For files `share` is the time to write and read the bytes divided by the time to publish and receive them.
All take turns in each round; figures are medians over the rounds.

Models are random: the quickstart's model with its LoRA, and a model with 25 M parameters in float32. This process is
the trainer; another process has the embedded engine. Files are on disk and in memory (/dev/shm).
"""

import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import SampleRequest
from actors.learner import formats
from actors.models import loading
from benchmarks.machine import finish, scratch, table
from bus.run_folder import RunFolder
from bus.weights import WeightPublisher, WeightReceiver, Weights
from bus.weights.device_memory import DeviceMemory
from bus.weights.filesystem import FilesystemPublisher, FilesystemReceiver
from bus.weights.memory import HostMemory, Memory
from bus.weights.rendezvous import RendezvousPublisher, RendezvousReceiver
from examples.quickstart.model import EOS, make_model, make_tokenizer
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.services import UpdateMode, WeightsConfig
from schemas.messages import Manifest, PolicyVersion, WeightMember, WeightUpdate

HOST, BOOT_ID, TIMEOUT = "127.0.0.1", "engine", 60.0
ROUNDS, WARMUP = 11, 3
COMPLETIONS, PROMPT_TOKENS, MAX_TOKENS, WRITTEN = 16, 16, 40, 8
distributed: Any = torch.distributed
NO_EOS = {EOS: -100.0}
MODES: tuple[UpdateMode, ...] = ("interrupt", "inflight")


def build(folder: Path, content: str) -> ModelConfig:
    """Write a model directory: the quickstart's model with LoRA (0.6 MB), or a model with 100 MB of weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model() if content == "adapter" else Qwen3ForCausalLM(large(make_model().config))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    lora = LoraConfig() if content == "adapter" else None
    return ModelConfig(path=str(folder), dtype="float32", device="cpu", lora=lora)


def large(small: Qwen3Config) -> Qwen3Config:
    """Return the configuration with 25 M parameters."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 64, "layer_types": None}  # fmt: skip
    return Qwen3Config(**small.to_dict() | sizes)


def memory_of(channel: str, device: str) -> Memory:
    """Return the memory of a broadcast channel."""
    return DeviceMemory(lambda: torch.device(device)) if channel == "device" else HostMemory()


def update_of(policy: PolicyVersion, num_ranks: int) -> WeightUpdate:
    """Return an update whose only member is the engine, in a process group that stays; with 0 ranks it maps."""
    members = [WeightMember(boot_id=BOOT_ID, num_ranks=num_ranks)]
    return WeightUpdate(update=str(policy.version), process_group="1", policy=policy, members=members)


def bare_group(store: Any, rank: int) -> Any:
    """Return a gloo group of the two processes, made without code of this project."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=HOST)], timedelta(seconds=TIMEOUT)
    return gloo(store, rank, 2, options)


def broadcast(group: Any, flat: torch.Tensor, sizes: list[int]) -> None:
    """Broadcast all parts of a flat tensor in place."""
    for work in [group.broadcast(part, 0) for part in torch.split(flat, sizes)]:
        work.wait()


# --- the engine's process --------------------------------------------------------------------------------------------


class Receiving:
    """Engine's side: carries out requests of the trainer's process and returns the seconds."""

    def __init__(self, model: ModelConfig, port: int) -> None:
        engine = EmbeddedEngineConfig(max_sequence_len=64)
        self._engines = {mode: EmbeddedEngine(model, engine, mode) for mode in MODES}
        self._device = model.device
        self._receivers: dict[str, tuple[WeightReceiver, Memory]] = {}
        """Receiver and its memory by the name of a channel: each stays in its own process group."""
        store = distributed.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
        self._group = bare_group(store, 1)
        self._flat = torch.zeros(0, dtype=torch.uint8)

    def bare(self, sizes: list[int]) -> dict[str, float]:
        """Receive one broadcast per size."""
        if self._flat.numel() != sum(sizes):
            self._flat = torch.zeros(sum(sizes), dtype=torch.uint8)
        return {"seconds": timed(lambda: broadcast(self._group, self._flat, sizes))}

    def receive(self, name: str, manifest: Manifest, num_ranks: int, checked: bool) -> dict[str, float]:
        """Receive a version, then switch to it: with an idle engine, and with running completions."""
        update = update_of(manifest.policy, num_ranks)
        receiver, memory = self._receiver(name, manifest.channel)
        started = time.perf_counter()
        with contextlib.nullcontext() if checked else mock.patch.object(memory, "verify"):
            weights = receiver.receive(manifest, update, bool)
        received = time.perf_counter()
        pause = self._engines["interrupt"].load(manifest.policy, weights, TIMEOUT)
        loaded = time.perf_counter()
        if not checked:
            return {"unchecked": received - started}
        busy = {mode: self._busy(engine, manifest, weights) for mode, engine in self._engines.items()}
        return {"wire": received - started, "load": loaded - received, "pause": pause} | busy

    def read(self, path: Path) -> dict[str, float]:
        """Read a file."""
        return {"seconds": timed(path.read_bytes)}

    def _receiver(self, name: str, channel: str) -> tuple[WeightReceiver, Memory]:
        if name not in self._receivers:
            memory = memory_of(channel, self._device)
            files = channel == "filesystem"
            made = FilesystemReceiver(Path("/")) if files else RendezvousReceiver(BOOT_ID, HOST, TIMEOUT, memory)
            self._receivers[name] = made, memory
        return self._receivers[name]

    def _busy(self, engine: EmbeddedEngine, manifest: Manifest, weights: Weights) -> float:
        request = SampleRequest([3] * PROMPT_TOKENS, COMPLETIONS, MAX_TOKENS, 0, logit_bias=NO_EOS)
        before = engine.status().generated_tokens
        future = engine.submit(request)
        while engine.status().generated_tokens < before + COMPLETIONS * WRITTEN:
            time.sleep(0.001)
        pause = engine.load(manifest.policy, weights, TIMEOUT)
        future.cancel()
        while engine.status().num_running:
            time.sleep(0.001)
        return pause


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def serve(pipe: Connection, model: ModelConfig, port: int) -> None:
    """Serve requests. Runs in a child process."""
    receiving = Receiving(model, port)
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        name, *arguments = task
        pipe.send(getattr(receiving, name)(*arguments))


# --- the trainer's process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Channel:
    """Weight channel with its publisher and limit."""

    name: str
    publisher: WeightPublisher
    folder: Path | None = None
    num_ranks: int = 1
    """Ranks of the engine in the group of a broadcast; 0: it maps the trainer's memory."""


class Sending:
    """Trainer's side: the model, its channels, and the bare group."""

    def __init__(self, model: ModelConfig, pipe: Connection, store: Any) -> None:
        self._config, self._pipe = model, pipe
        learner = loading.load_model(model, loading.TORCH_DTYPES[model.dtype])
        self._model = loading.add_lora(learner, model) if model.lora else learner
        self._group = bare_group(store, 0)
        self._versions = count(1)
        self.num_bytes = sum(t.nbytes for t in formats.weights(self._model, model).tensors.values())
        self._flat = torch.arange(self.num_bytes).to(torch.uint8)

    def bare(self, sizes: list[int]) -> float:
        """Return the seconds of a broadcast, measured at its receiver."""
        self._pipe.send(("bare", sizes))
        broadcast(self._group, self._flat, sizes)
        return float(self._pipe.recv()["seconds"])

    def update(self, channel: Channel, checked: bool = True) -> dict[str, float]:
        """Return the seconds of the parts of one update."""
        policy = PolicyVersion(lineage=1, version=next(self._versions))
        start = time.perf_counter()
        weights = formats.weights(self._model, self._config)
        copied = time.perf_counter()
        channel.publisher.prune(policy.version)
        manifest = channel.publisher.publish(policy, weights)
        published = time.perf_counter()
        self._pipe.send(("receive", channel.name, manifest, channel.num_ranks, checked))
        if isinstance(channel.publisher, RendezvousPublisher):
            channel.publisher.send(update_of(policy, channel.num_ranks), bool)
        parts = dict(self._pipe.recv())
        return parts | {"gather": published - start, "publish": published - copied} if checked else parts

    def copy(self) -> float:
        """Return the seconds of a copy of the same bytes within the model's device."""
        source = self._flat.to(self._config.device)
        place = torch.empty_like(source)
        return timed(lambda: (place.copy_(source), place[-1].item()))

    def copy_files(self, folder: Path) -> float:
        """Return the seconds to write a file of the same bytes here and to read it in the other process."""
        path, data = folder / "plain", self._flat.numpy().tobytes()
        written = timed(lambda: path.write_bytes(data))
        self._pipe.send(("read", path))
        return written + float(self._pipe.recv()["seconds"])


def measure_model(
    content: str, model: ModelConfig, folder: Path, memory: Path, rounds: int = ROUNDS, warmup: int = WARMUP
) -> list[dict[str, Any]]:
    """Measure all channels and limits in turn.

    Args:
        content: name of the weights in the results.
        model: the model, on any device; its adapter is published if it has one.
        folder: folder on a disk.
        memory: folder in memory.
        rounds: rounds that count.
        warmup: rounds before.
    """
    store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, model, store.port), daemon=True)
    child.start()
    sending = Sending(model, pipe, store)
    pipe.recv()
    settings = WeightsConfig()
    # two ranks on one GPU can't be in a group of NCCL
    ways = {"rendezvous": 1, "device, mapped": 0} | ({"device, sent": 1} if model.device == "cpu" else {})
    broadcasts = [
        Channel(
            name,
            RendezvousPublisher(
                HOST,
                settings.bucket_bytes,
                settings.keep,
                TIMEOUT,
                memory=memory_of(name.partition(",")[0], model.device),
            ),
            num_ranks=num_ranks,
        )
        for name, num_ranks in ways.items()
    ]
    files = [
        Channel(
            f"files, {where}",
            FilesystemPublisher(RunFolder(place / "weights", "benchmark", place), settings.keep),
            place,
        )
        for where, place in (("disk", folder), ("memory", memory))
    ]
    found = [one_round(sending, broadcasts, files) for _ in range(warmup + rounds)][warmup:]
    pipe.send(None)
    child.join()
    for channel in (*broadcasts, *files):
        channel.publisher.close()
    return [
        {"content": content, "megabytes": sending.num_bytes / 1e6, "channel": name}
        | {part: statistics.median(one[name][part] for one in found) for part in found[0][name]}
        for name in found[0]
    ]


def one_round(sending: Sending, broadcasts: list[Channel], files: list[Channel]) -> dict[str, dict[str, float]]:
    """Return the seconds of each channel's parts and of its limit, with their ratio."""
    sizes = [bucket.numel() for bucket in sending._flat.split(WeightsConfig().bucket_bytes)]
    found: dict[str, dict[str, float]] = {}
    for channel in broadcasts:
        limits = {"bare": sending.bare([sending.num_bytes]), "buckets": sending.bare(sizes)}
        if not channel.num_ranks:
            limits = {"bare": sending.copy()}
        parts = sending.update(channel) | sending.update(channel, checked=False) | limits
        found[channel.name] = parts | {"share": parts["bare"] / parts["wire"]}
    for channel in files:
        assert channel.folder is not None
        copy = sending.copy_files(channel.folder)
        parts = sending.update(channel)
        found[channel.name] = parts | {"bare": copy, "share": copy / (parts["publish"] + parts["wire"])}
    return found


def measure() -> dict[str, Any]:
    """Measure the adapter and the full weights."""
    results = []
    for content in ("adapter", "full"):
        with scratch() as folder, tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as memory:
            model = build(folder.absolute() / "model", content)
            results += measure_model(content, model, folder.absolute(), Path(memory))
    return {"torch_threads": torch.get_num_threads(), "results": results}


def show(results: dict[str, Any]) -> str:
    """Return a table with a line per content and channel, in milliseconds."""
    parts = ["gather", "wire", "unchecked", "load", "pause", *MODES, "bare", "buckets"]
    rows = [
        [row["content"], row["megabytes"], row["channel"]]
        + [1e3 * row[part] if part in row else "" for part in parts]
        + [row["share"]]
        for row in results["results"]
    ]
    return table([["content", "MB", "channel", *(f"{part} ms" for part in parts), "share"], *rows])


if __name__ == "__main__":
    finish(__doc__, measure, show)
