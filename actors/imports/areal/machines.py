"""Allocations of AReaL: engines, ranks, servers and the channel of the weights."""

import math
import re

from actors.imports.areal.tables import IRRELEVANT
from actors.imports.job import Import
from schemas.config.sglang_engine import SET_BY_US
from schemas.errors import ConfigError


def parse_allocation(text: str) -> dict[str, dict[str, int]]:
    """Return the sizes of each part of an allocation: `sglang:d4t2+fsdp:d4` gives {sglang: {d: 4, t: 2}, …}.

    Raises:
        ConfigError: the text is no allocation.
    """
    found = {}
    # ranks of attention and of experts are the same processes, sliced in another way
    plain = re.sub(r"\(\s*attn:(\w+)\s*\|\s*ffn:\w*?((?:e\d+)?)\s*\)", r"\1\2", text)
    for number, part in enumerate(re.split(r"[+|]", plain)):
        match = re.fullmatch(r"(?:(\w+)(?:\[\w+\])?[:.])?((?:[dptce]\d+)+)", part.strip())
        if match is None:
            raise ConfigError(f"allocation {text!r}: {part!r} is not of the form fsdp:d4 or vllm:d2t2")
        sizes = {letter: int(count) for letter, count in re.findall(r"([dptce])(\d+)", match[2])}
        if 0 in sizes.values():
            raise ConfigError(f"allocation {text!r}: a size is 0")
        found[match[1] or ("fsdp" if number else "sglang")] = sizes
    return found


def convert_machines(job: Import) -> None:
    """Write engines, ranks, servers and the channel of the weights."""
    parts = _parts(job, "allocation_mode", {})
    engine, actor = _parts(job, "rollout.backend", parts), _parts(job, "actor.backend", parts)
    served = next((name for name in engine if name in ("sglang", "vllm")), "")
    trained = next((name for name in actor if name not in ("sglang", "vllm")), "")
    texts = []
    if served:
        sizes = engine[served]
        job.run.set("up.inference", sizes.get("d", 1), f"{served}: d{sizes.get('d', 1)}")
        job.run.set("inference.engine.tensor_parallel_size", sizes.get("t", 1), f"{served}: t{sizes.get('t', 1)}")
        texts.append(f"{sizes.get('d', 1)} engines of {sizes.get('t', 1)} GPUs")
    else:
        job.ask("up.inference", "number of engines; rollout.backend")
    if trained:
        sizes = actor[trained]
        # experts are spread over ranks that are there already
        ranks = math.prod(count for letter, count in sizes.items() if letter != "e")
        job.run.set("trainer.num_ranks", ranks, f"{trained}: {sizes}")
        job.run.set("trainer.sharding", "fsdp" if ranks > 1 else "none", "as in AReaL")
        texts.append(f"{ranks} ranks")
        _divide(job, trained, sizes, ranks)
    else:
        job.ask("trainer.num_ranks", "trainer processes; actor.backend")
    job.convert(["rollout.backend", "actor.backend", "allocation_mode"], {}, ", ".join(texts) or "empty")
    _convert_colocation(job)
    if served == "sglang":
        _convert_sglang(job)
    else:
        _convert_vllm(job)
    _convert_channel(job, served)


def _divide(job: Import, trained: str, sizes: dict[str, int], ranks: int) -> None:
    """Write how ranks divide rows, weights and experts."""
    both = sizes.get("c", 1) > 1 and sizes.get("t", 1) > 1
    ways = {"c": "context_parallel", "t": "tensor_parallel", "e": "expert_parallel"}
    for letter, key in ways.items():
        size = sizes.get(letter, 1)
        if size > 1 and not (both and letter == "t") and ranks % size == 0:
            job.run.set(f"trainer.{key}", size, f"{trained}: {letter}{size}")
    if both or sizes.get("p", 1) > 1:
        job.note(
            f"{trained} {sizes}: layers are not divided into stages (p), and rows by tokens (c) or weights (t), not "
            "both; the ranks that are left over are data-parallel, with shared-out weights"
        )


def _parts(job: Import, key: str, others: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the sizes that a key gives, or the sizes of another key: older files name an engine without sizes."""
    text = job.given.get(key)
    return others if not text or re.fullmatch(r"[A-Za-z_]+", text) else parse_allocation(text)


def _convert_colocation(job: Import) -> None:
    """Write whether engines and ranks have the same GPUs: `|` in an allocation."""
    text = re.sub(r"\(.*?\)", "", job.given.get("allocation_mode") or "")
    if job.value("actor.colocated") or "|" in text:
        job.convert("actor.colocated", {"up.colocate": True}, "true: the same GPUs, without moving weights out")
        job.run.set("up.colocate", True, "the same GPUs, without moving weights out")
    job.settle("actor.colocated", "false: GPUs of their own")


def _convert_sglang(job: Import) -> None:
    """Write the keys of servers of SGLang."""
    job.run.set("inference.engine.type", "sglang", "as in AReaL")
    job.run.set("inference.engine.deterministic", False, "AReaL's servers sample without seeds")
    if job.value("sglang.context_length") is not None:
        job.rename("sglang.context_length", "inference.engine.max_model_len")
    if job.value("sglang.mem_fraction_static") is not None:
        job.rename("sglang.mem_fraction_static", "inference.engine.mem_fraction_static")
    for key in ("sglang.context_length", "sglang.mem_fraction_static"):
        job.settle(key, "empty: SGLang's choice")
    words: list[str] = []
    for key in job.keys_below("sglang"):
        name, value = key.partition(".")[2], job.given[key]
        if job.is_reported(key) or key in IRRELEVANT:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False or value == [] or value == "":
            job.settle(key, "switched off")
        elif flag in SET_BY_US or "." in name:
            job.settle(key, "set by the engine here")
        else:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [flag, *map(str, values)]
            job.convert(key, {"inference.engine.extra_args": list(words)}, "an argument of the server")
    if words:
        job.run.set("inference.engine.extra_args", words, "sglang")


def _convert_vllm(job: Import) -> None:
    """Write the keys of servers of vLLM."""
    job.run.set("inference.engine.type", "vllm", "the engine that is started here")
    if job.value("vllm.max_model_len") is not None:
        job.rename("vllm.max_model_len", "inference.engine.max_model_len")
    job.rename("vllm.gpu_memory_utilization", "inference.engine.gpu_memory_utilization")
    job.rename("vllm.enforce_eager", "inference.engine.enforce_eager")
    if "vllm.enable_prefix_caching" in job.given:
        job.rename("vllm.enable_prefix_caching", "inference.engine.enable_prefix_caching")
        job.settle("vllm.no_enable_prefix_caching", "vllm.enable_prefix_caching says it")
    else:
        cached = not job.value("vllm.no_enable_prefix_caching")
        targets = {"inference.engine.enable_prefix_caching": cached}
        job.convert("vllm.no_enable_prefix_caching", targets, f"not {not cached}")
    if job.has("vllm.max_num_seqs"):
        words = ["--max-num-seqs", str(job.given["vllm.max_num_seqs"])]
        job.convert("vllm.max_num_seqs", {"inference.engine.extra_args": words}, " ".join(words))
    job.settle("vllm.max_lora_rank", "the engine takes the rank of model.lora")
    job.settle("vllm.max_loras", "the engine holds the old and the new version")


def _convert_channel(job: Import, served: str) -> None:
    """Write the channel of the weights."""
    mode = job.value("actor.weight_update_mode")
    if mode not in ("xccl", "nccl", "disk"):
        job.refuse("actor.weight_update_mode", f"{mode} is not built", "filesystem is used")
        job.run.set("weights.channel", "filesystem", f"in the place of {mode}")
    else:
        channel = "filesystem" if mode == "disk" or served == "sglang" else "rendezvous"
        text = f"{mode}: {channel}" + (", the channel of SGLang's servers here" if served == "sglang" else "")
        job.convert("actor.weight_update_mode", {"weights.channel": channel}, text)
