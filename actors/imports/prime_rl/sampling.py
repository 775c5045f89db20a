"""Orchestrator of prime-rl: environments, batches, sampling, advantages, filters, evaluation."""

import re
from typing import Any

from actors.imports.job import Import
from actors.imports.prime_rl.training import ceiling, shared
from schemas.errors import ConfigError

ALL_EXAMPLES = 1_000_000
"""Prompts of an evaluation that takes all: an environment with fewer gives all of them."""
ANY_TURNS = 1000
"""Turns of a trajectory whose environment has its own limit."""
ANY_RESAMPLES = 1000
"""Groups dropped for one place; prime-rl has no limit."""
TRAIN, SAMPLING = "orchestrator.train", "orchestrator.train.sampling"


def sources_of(job: Import, split: str) -> list[str]:
    """Return the keys of the sources of `train` or `eval`: `orchestrator.train.source.0` and so on."""
    pattern = re.compile(rf"(orchestrator\.{split}\.source\.\d+)\..*")
    found = [match[1] for key in job.given if (match := pattern.fullmatch(key))]
    return sorted(set(found), key=lambda key: int(key.rpartition(".")[2]))


def effective(job: Import, sources: list[str], name: str, own: str, refusal: str) -> Any:
    """Return the value that sources take from their group. Own values that agree count; others are refused.

    Args:
        job: the import.
        sources: keys of the sources.
        name: key of the group.
        own: the same key below a source.
        refusal: reason, if the sources differ.
    """
    values = [job.given.get(f"{source}.{own}", job.value(name)) for source in sources]
    keys = [f"{source}.{own}" for source in sources if f"{source}.{own}" in job.given]
    if keys and len(set(map(str, values))) == 1:
        for key in keys:
            job.convert(key, {}, f"the same for all sources: {values[0]}")
        return values[0]
    for key in keys:
        if job.given[key] == job.value(name):
            job.settle(key, "the value of all sources")
        else:
            job.refuse(key, refusal, f"{job.value(name)} is used")
    return job.value(name)


def convert_batches(job: Import, sources: list[str]) -> int:
    """Write group size and groups per step, and return the group size."""
    size_key, batch_key = "orchestrator.group_size", "orchestrator.batch_size"
    size = effective(job, sources, size_key, "group_size", "all environments have one group size here")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{job.name(size_key)}: {size} is below 1")
    if size == job.value(size_key):
        job.rename(size_key, "rollout.group_size")
    else:
        job.run.set("rollout.group_size", size, "of each source")
        job.settle(size_key, "each source has its own")
    tokens = job.given.get("orchestrator.token_batch_size")
    if tokens is not None and job.given.get(batch_key) is not None:
        raise ConfigError(f"{job.name(batch_key)}: set either batch_size or token_batch_size, as {job.system} requires")
    if tokens is not None:
        job.refuse("orchestrator.token_batch_size", "a step has a number of groups here, not of tokens")
        job.settle(batch_key, "empty: token_batch_size counts")
        flying = "orchestrator.max_inflight_rollouts"
        if (limit := job.given.get(flying)) is not None:
            targets = {"rollout.max_concurrent_groups": ceiling(limit, size)}
            job.convert(flying, targets, f"⌈{limit} ÷ {size}⌉ groups, with one rollout actor")
        job.ask("packer.groups_per_step", f"groups per step; {job.system} fills a step with {tokens} tokens")
        return size
    job.settle("orchestrator.token_batch_size", "empty")
    batch = job.value(batch_key) or 128
    if batch % size:
        raise ConfigError(
            f"{job.name(batch_key)}: {batch} is not divisible by {job.name(size_key)} {size}, as {job.system} requires"
        )
    groups = batch // size
    job.convert(batch_key, {"packer.groups_per_step": groups}, f"{batch} completions ÷ {size} = {groups} groups")
    _convert_concurrency(job, batch, size)
    return size


def _convert_concurrency(job: Import, batch: int, size: int) -> None:
    """Write the number of groups in flight, of one rollout actor."""
    target = "rollout.max_concurrent_groups"
    limit_keys = ("orchestrator.max_inflight_rollouts", "orchestrator.max_concurrent")
    given = next((key for key in limit_keys if job.given.get(key) is not None), None)
    factor = job.value("orchestrator.oversampling_factor")
    newest = "orchestrator.concurrency.max_inflight"
    if given is not None or job.given.get(newest) is not None:
        key = given or newest
        limit = job.given[key]
        job.convert(key, {target: ceiling(limit, size)}, f"⌈{limit} ÷ {size}⌉ groups, with one rollout actor")
    elif job.has(newest):
        job.settle(newest, "without limit: packer.max_async_level bounds the work")
    elif factor is not None or job.defaults["orchestrator.concurrency.max_inflight"] is None:
        limit = int(batch * (factor or 1))
        job.run.set(
            target, ceiling(limit, size), f"⌈{batch} · {factor or 1:g} ÷ {size}⌉, {job.system}'s number in flight"
        )
    else:
        limit = job.defaults["orchestrator.concurrency.max_inflight"]
        job.run.set(target, ceiling(limit, size), f"⌈{limit} ÷ {size}⌉, {job.system}'s largest number in flight")
    if factor is None:
        job.settle("orchestrator.oversampling_factor", "empty")
    elif factor < 1:
        job.refuse(
            "orchestrator.oversampling_factor", "below 1 it limits the work in flight", f"{target} has the limit"
        )
    else:
        job.rename("orchestrator.oversampling_factor", "packer.oversampling_factor")
        job.run.set("packer.order", "arrival", "steps take the groups that have come, with oversampling")


def convert_lag(job: Import, has_level: bool) -> None:
    """Write the bounds of staleness.

    Args:
        job: the import.
        has_level: whether the time knows max_async_level; later versions are one step ahead.
    """
    keys = ("orchestrator.max_async_level", "trainer.max_async_level", "max_async_level")
    level = shared(job, *keys)
    given = [key for key in keys if job.has(key)]
    limit = job.value("orchestrator.max_off_policy_steps")
    if given:
        job.rename(given[0], "packer.max_async_level")
        for key in given[1:]:
            job.settle(key, "one key here, packer.max_async_level")
    else:
        text = f"default of {job.report.origin}" if has_level else f"{job.system} is one step ahead"
        job.run.set("packer.max_async_level", level, text)
    if limit < level:
        text = f"{limit} is below max_async_level; groups of that lag are trained in {job.system} too"
        job.convert("orchestrator.max_off_policy_steps", {"packer.max_off_policy_steps": level}, text)
    else:
        job.rename("orchestrator.max_off_policy_steps", "packer.max_off_policy_steps")
    _strictness(job, level)


def _strictness(job: Import, level: int) -> None:
    """Write whether each step is sampled by weights of exactly the level."""
    key = "orchestrator.strict_async_level"
    if not job.value(key):
        job.irrelevant(key, "switched off")
    elif (job.given.get("orchestrator.oversampling_factor") or 0) > 1:
        reason = "not with oversampling, whose surplus trains in later steps here"
        job.refuse(key, reason, "leave one of them out")
        if key not in job.given:
            job.note(f"{key} is true by default in that time: {reason}")
    else:
        job.rename(key, "packer.strict_async_level")
        # the version of the level must still be there while newer ones are trained
        job.run.set("weights.keep", max(3, level + 2), f"max_async_level {level} + 2, at least 3")


def convert_lengths(job: Import, sources: list[str], era: str) -> None:
    """Write the packing length, and a number of new tokens below it."""
    # the trainer packed in 2026-02; later the orchestrator does
    first, second = "orchestrator.seq_len", "trainer.model.seq_len"
    packs, bounds = (second, first) if era == "2026-02" else (first, second)
    key = packs if packs in job.given else "seq_len" if job.given.get("seq_len") is not None else packs
    length = job.value(key)
    if length < 2:
        raise ConfigError(f"{key}: {length} is below 2")
    job.rename(key, "packer.sequence_len")
    for other in ("seq_len", packs, bounds):
        if other != key:
            job.settle(other, f"{job.name(key)} {length} is the length that is packed")
    if job.given.get(bounds, length) != length:
        job.note(f"{job.name(bounds)} {job.given[bounds]} differs from {job.name(key)} {length}, which is packed")
    longest = min(length, job.given.get("inference.vllm.max_model_len") or length)
    name = f"{SAMPLING}.max_completion_tokens"
    refusal = "all environments have one limit here"
    own = "sampling.max_completion_tokens"
    tokens = effective(job, sources, name, own, refusal)
    if tokens is None:
        text = f"empty: up to the end of the context, {longest} − 1; the prompt takes its part"
        job.convert(name, {"rollout.max_tokens": longest - 1}, text)
    elif tokens >= longest:
        text = f"{tokens} leaves no room for a prompt in {longest} tokens: {longest} − 1"
        job.convert(name, {"rollout.max_tokens": longest - 1}, text)
    elif tokens < 1:
        raise ConfigError(f"{job.name(name)}: {tokens} is below 1")
    elif job.value(name) == tokens:
        job.rename(name, "rollout.max_tokens")
    else:
        job.run.set("rollout.max_tokens", tokens, "of each source")
    if not job.is_reported(name):
        job.settle(name, "each source has its own")


def convert_sampling(job: Import, sources: list[str]) -> None:
    """Write temperature and truncation, and refuse parameters that requests here do not have."""
    name, schedule = f"{SAMPLING}.temperature", f"{SAMPLING}.temp_scheduler"
    own = effective(job, sources, name, "sampling.temperature", "all environments have one temperature here")
    if job.has(schedule):
        if job.given.get(name) is not None:
            raise ConfigError(f"{name}: set either temperature or temp_scheduler, as {job.system} requires")
        _convert_schedule(job, schedule)
        job.settle(name, "empty")
    else:
        value = 1.0 if own is None else own
        if value <= 0:
            raise ConfigError(f"{job.name(name)}: {value:g}: training needs a temperature above 0, here as there")
        job.rename(name, "rollout.temperature", value) if value != job.given.get(name) else job.rename(
            name, "rollout.temperature"
        )
    for key, target in (("top_p", "rollout.top_p"), ("top_k", "rollout.top_k")):
        if job.has(f"{SAMPLING}.{key}"):
            value = job.given[f"{SAMPLING}.{key}"]
            job.rename(f"{SAMPLING}.{key}", target, value) if value else job.settle(f"{SAMPLING}.{key}", "all tokens")
    _convert_extra_body(job)
    for key in ("repetition_penalty", "min_tokens"):
        if job.given.get(f"{SAMPLING}.{key}") is not None:
            job.rename(f"{SAMPLING}.{key}", f"rollout.{key}")
        job.settle(f"{SAMPLING}.{key}", "empty")
    job.refuse_unless(f"{SAMPLING}.seed", (None,), "each completion has a seed of its own here", "seed is the run's")


def _convert_schedule(job: Import, schedule: str) -> None:
    start, end = (job.given.get(f"{schedule}.{name}_temperature") for name in ("start", "end"))
    for name, value in (("start", start), ("end", end)):
        if value is None or value <= 0:
            raise ConfigError(f"{schedule}.{name}_temperature: must be a number above 0")
    job.rename(f"{schedule}.start_temperature", "rollout.temperature")
    job.rename(f"{schedule}.type", "rollout.temperature_schedule.type")
    job.rename(f"{schedule}.end_temperature", "rollout.temperature_schedule.end")
    if job.given.get(f"{schedule}.total_steps") is None:
        job.settle(f"{schedule}.total_steps", "empty: up to max_steps, as here")
    else:
        job.rename(f"{schedule}.total_steps", "rollout.temperature_schedule.steps")


_NUMBERS = (
    "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens",
)  # fmt: skip
"""Numbers of requests to vLLM that are keys of `rollout`."""


def _convert_extra_body(job: Import) -> None:
    body = f"{SAMPLING}.extra_body"
    taken: dict[str, Any] = {}
    lost = []
    for name, value in job.given.get(body, {}).items():
        if name in _NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
            # vLLM's word for all tokens
            taken[f"rollout.{name}"] = 0 if name == "top_k" and value == -1 else value
        elif name == "ignore_eos" and isinstance(value, bool):
            taken[f"rollout.{name}"] = value
        elif name == "stop" and isinstance(value, str | list):
            taken["rollout.stop"] = [value] if isinstance(value, str) else value
        elif name == "chat_template_kwargs" and isinstance(value, dict):
            numbers = [number for number in range(64) if job.run.get(f"environments.{number}.type") is not None]
            taken |= {f"environments.{number}.chat_template_kwargs": value for number in numbers}
        elif name not in ("return_token_ids", "skip_special_tokens", "logprobs", "include_stop_str_in_output"):
            lost.append(name)
    if lost:
        job.refuse(body, f"requests have no {', '.join(lost)} here", "leave them out")
        for target, value in taken.items():
            job.run.set(target, value, "extra_body")
    elif taken:
        job.convert(body, taken, "these are keys of their own here")
    else:
        job.settle(body, "nothing that changes the sampling")


def convert_environments(job: Import, sources: list[str], era: str) -> None:
    """Write the training environments, or the data and the reward that the command line names."""
    options = job.options
    if options.data is not None:
        job.run.set("environments.0.type", "jsonl", "--data")
        job.run.set("environments.0.path", str(options.data), "--data")
        if options.reward is None:
            job.ask("reward.functions.0.path", "reward function; --reward FILE.py:F")
        for source in sources:
            job.sweep({}, {f"{source}.**": "the rows of --data take the place of the environment"})
    elif not sources and era < "2026-05":
        job.run.set("environments.0.type", "verifiers", f"{job.system}'s default environment")
        job.run.set("environments.0.options", {"id": "reverse-text"}, f"{job.system}'s default environment")
        job.run.set("environments.0.max_turns", ANY_TURNS, "the environment has its own limit")
    elif not sources:
        job.ask("environments", "the environments; no file has [[orchestrator.train.source]]")
    if options.reward is not None:
        job.run.set("reward.functions.0.path", options.reward, "--reward")
    if options.data is not None:
        return
    names = [_name(job, source) for source in sources]
    if len(set(names)) < len(names):
        raise ConfigError(f"orchestrator.train: two environments are called {max(names, key=names.count)!r}; set name")
    for number, source in enumerate(sources):
        _convert_environment(job, source, f"environments.{number}", len(sources) > 1, era)
    _convert_ratios(job, sources)


def label_of(name: str) -> str:
    """Return a name with the characters that names have here."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _name(job: Import, source: str) -> str:
    section = job.section(source)
    taskset = section.get("env", {}).get("taskset", {}) if isinstance(section.get("env"), dict) else {}
    own = taskset.get("id") if isinstance(taskset, dict) else None
    return str(section.get("name") or own or section.get("id") or "reverse-text")


def _convert_environment(job: Import, source: str, target: str, is_one_of_many: bool, era: str) -> None:
    section = job.section(source)
    env = section.get("env") if isinstance(section.get("env"), dict) else {}
    taskset = dict(env.get("taskset") or {}) if isinstance(env.get("taskset"), dict) else {}
    label = label_of(_name(job, source))
    if "id" in taskset:
        job.run.set(f"{target}.type", "verifiers_v1", "a taskset")
        job.run.set(f"{target}.name", label, _name(job, source))
        task_id = taskset.pop("id")
        options: dict[str, Any] = {"id": task_id} | ({"taskset": taskset} if taskset else {})
        rest = _environment_without_loop({key: value for key, value in env.items() if key != "taskset"})
        options |= {"environment": rest} if rest else {}
        job.convert(f"{source}.env.taskset.id", {f"{target}.options": options}, "a taskset of verifiers 0.4")
        for key in job.keys_below(f"{source}.env"):
            if key != f"{source}.env.taskset.id":
                _report_part(job, key, rest, f"{target}.options", options)
        job.settle(f"{source}.id", "the taskset counts")
        turns = env.get("agent", {}).get("max_turns") if isinstance(env.get("agent"), dict) else None
    else:
        given = section.get("id", "reverse-text")
        plain = str(given).partition("@")[0]
        job.run.set(f"{target}.type", "verifiers", "an environment with load_environment")
        job.run.set(f"{target}.name", label, _name(job, source))
        options = {"id": plain} | ({"args": section["args"]} if section.get("args") else {})
        text = "the installed version counts here" if plain != given else "verifiers.load_environment"
        job.convert(f"{source}.id", {f"{target}.options": options}, text)
        if job.has(f"{source}.args"):
            job.convert(f"{source}.args", {f"{target}.options": options}, "arguments of load_environment")
        turns = None
    job.run.set(
        f"{target}.max_turns", turns if isinstance(turns, int) and turns > 0 else ANY_TURNS,
        "env.agent.max_turns" if turns else "the environment has its own limit",
    )  # fmt: skip
    job.convert(f"{source}.name", {}, f"{target}.name = {label}") if label != section.get("name") else job.rename(
        f"{source}.name", f"{target}.name"
    )
    if job.given.get(f"{source}.ratio") is not None:
        job.rename(f"{source}.ratio", f"{target}.weight")
    elif is_one_of_many and era >= "2026-08":
        job.run.set(f"{target}.weight", 1.0, f"{job.system} draws from each environment equally often")
    job.settle(f"{source}.ratio", "empty")
    _convert_curriculum(job, source)


def _environment_without_loop(env: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an environment without the harness `null`, whose loop is the adapter's own."""
    agent = env.get("agent")
    if not isinstance(agent, dict):
        return env
    harness = agent.get("harness")
    is_plain = isinstance(harness, dict) and harness.get("id") == "null" and set(harness) == {"id"}
    runtime = agent.get("runtime")
    is_here = isinstance(runtime, dict) and runtime == {"type": "subprocess"}
    kept = {
        name: value
        for name, value in agent.items()
        if not ((name == "harness" and is_plain) or (name == "runtime" and is_here and (is_plain or harness is None)))
    }
    rest = {name: value for name, value in env.items() if name != "agent"}
    return rest | ({"agent": kept} if kept else {})


def _report_part(job: Import, key: str, rest: dict[str, Any], target: str, options: dict[str, Any]) -> None:
    """Report a key of an environment: a part of the options, or of the loop that the adapter has by itself."""
    parts = key.split(".env.", 1)[1].split(".")
    node: Any = rest
    for name in parts:
        node = node.get(name) if isinstance(node, dict) else None
    if parts[0] == "taskset":
        job.convert(key, {target: options}, "options.taskset")
    elif node is not None or not isinstance(rest, dict):
        job.convert(key, {target: options}, "options.environment")
    else:
        job.settle(key, "the adapter's own loop, in its worker process")


def _convert_ratios(job: Import, sources: list[str]) -> None:
    key = "orchestrator.buffer.env_ratios"
    ratios = job.given.get(key)
    if ratios is None:
        job.settle(key, "empty: in proportion to the examples, as here")
        return
    if len(ratios) != len(sources) or not all(isinstance(ratio, int | float) and ratio > 0 for ratio in ratios):
        raise ConfigError(f"{key}: {ratios} must be a number above 0 for each of the {len(sources)} environments")
    job.convert(key, {f"environments.{number}.weight": ratio for number, ratio in enumerate(ratios)}, f"{ratios}")


def _convert_curriculum(job: Import, source: str) -> None:
    curriculum = job.section(f"{source}.curriculum")
    gates = curriculum.get("gates", {}) if isinstance(curriculum, dict) else {}
    bounds = [
        (gate.get("reject_min", 0), gate.get("reject_max", 0)) if isinstance(gate, dict) else None
        for gate in (gates.values() if isinstance(gates, dict) else [None])
    ]
    is_plain = bool(bounds) and set(bounds) == {(0, 0)}
    keys = [key for key in job.keys_below(f"{source}.curriculum") if ".gates." in key]
    if is_plain:
        targets = {"packer.dynamic_sampling": True, "packer.max_resample_times": ANY_RESAMPLES}
        job.convert(keys, targets, "groups with advantage 0 are dropped and replaced, in all environments")
    job.sweep({f"{source}.curriculum.sampler.type": "examples in their order"} if (
        curriculum.get("sampler", {}).get("type") == "standard") else {},
        {f"{source}.curriculum.**": "no such curriculum here"})  # fmt: skip


def convert_pools(job: Import) -> None:
    """Write difficulty pools and the filter of groups that are too easy or too hard."""
    buffer = "orchestrator.buffer"
    limits = [job.given.get(f"{buffer}.{side}_threshold") for side in ("easy", "hard")]
    names = ("easy_threshold", "hard_threshold", "easy_fraction", "hard_fraction", "hash_keys")
    for name in names:
        key = f"{buffer}.{name}"
        if limits == [None, None]:
            job.settle(key, "no threshold, so no pools")
        elif job.has(key):
            job.rename(key, f"packer.pools.{name}")
    if None not in limits and limits[0] <= limits[1]:  # type: ignore[operator]  # both are numbers
        raise ConfigError(f"{buffer}.easy_threshold: {limits[0]} must be above hard_threshold {limits[1]}")
    key = f"{buffer}.online_difficulty_filtering"
    if job.given.get(key):
        targets = {"packer.online_difficulty_filtering": True, "packer.max_resample_times": ANY_RESAMPLES}
        job.convert(key, targets, f"groups of mean reward 0 or 1 are dropped; {job.system} has no limit of repetitions")
    job.settle(key, "off")
    job.settle(f"{buffer}.seed", "the run has one seed here")


def convert_advantages(job: Import, sources: list[str]) -> None:
    """Write the advantage of `algo` or `advantage`, with the loss and the teacher of distillation."""
    algo, old = "orchestrator.algo", "orchestrator.advantage"
    kind = effective(job, sources, f"{algo}.type", "algo.type", "all environments have one algorithm here")
    is_weighted = job.given.get(f"{old}.length_weighted_mean") or job.given.get(f"{algo}.length_weighted_baseline")
    if old in job.given and job.given[old] is None:
        job.convert(old, {"reward.advantage.type": "norm", "reward.advantage.mean_level": "none",
                    "reward.advantage.std_level": "none"}, "rewards are advantages")  # fmt: skip
    elif job.value(f"{old}.type") == "custom":
        job.refuse(
            f"{old}.type", "a custom advantage has another signature here", "rewrite it: {type: custom, path: …}"
        )
        job.ask("reward.advantage", "the custom advantage, rewritten: {type: custom, path: file.py:function}")
        job.sweep({}, {f"{old}.**": "part of the custom advantage"})
    elif kind in ("grpo", "max_rl", "opd"):
        name = "length_weighted_mean" if is_weighted else "max_rl" if kind == "max_rl" else "mean"
        keys = [f"{algo}.type", f"{old}.type", f"{old}.length_weighted_mean", f"{algo}.length_weighted_baseline", old]
        job.convert(keys, {"reward.advantage.type": name}, f"reward minus its baseline: {name}")
    elif kind in ("sft", "opsd", "echo", "rae", "hierarchical_grpo"):
        job.refuse(f"{algo}.type", "not built here", "advantage mean is used")
        job.run.set("reward.advantage.type", "mean", f"in the place of {kind}")
    else:
        raise ConfigError(
            f"{algo}.type: {kind!r} is none of grpo, max_rl, opd, sft, opsd, echo, rae, hierarchical_grpo"
        )
    if kind == "opd":
        _convert_distillation(job)
    elif job.run.get("trainer.teacher.path"):
        convert_teacher_server(job, "orchestrator.teacher_model.client.base_url")
    job.refuse_unless(f"{algo}.length_penalty", (None,), "no such penalty here", "see the function length_penalty")
    job.refuse_unless(f"{algo}.loss_aggregation", "token", "the loss is averaged over tokens here")


def _convert_distillation(job: Import) -> None:
    """Write the loss towards a teacher; the keys of the policy loss have no effect then."""
    teacher = job.section("orchestrator.algo.teacher")
    job.run.remove("trainer.loss")
    job.run.set("trainer.loss.type", "ref_kl", "algo opd")
    job.defaults["orchestrator.train.filter_zero_advantages"] = False
    if isinstance(teacher, dict) and isinstance(teacher.get("name"), str):
        job.rename("orchestrator.algo.teacher.name", "trainer.teacher.path")
    else:
        job.ask("trainer.teacher.path", "the teacher's model")
    convert_teacher_server(job, "orchestrator.algo.teacher.base_url")
    job.sweep({}, {"orchestrator.algo.teacher.**": "not built here"})


def convert_teacher_server(job: Import, key: str) -> None:
    """Write the address of a teacher that is served, from a URL or a list of one."""
    given = job.given.get(key)
    urls = given if isinstance(given, list) else [given] if given else []
    if not urls:
        job.settle(key, "empty: the trainer loads the teacher here")
        return
    url = str(urls[0]).rstrip("/").removesuffix("/v1")
    reason = ""
    if len(urls) > 1:
        reason = "one server of a teacher here; put a router in front of them"
    elif not re.fullmatch(r"https?://[^/\s]+", url):
        reason = "a URL with a path; the server's is http://host:port"
    elif (
        job.run.get("rollout.temperature") not in (None, 1.0)
        or job.run.get("rollout.temperature_schedule.end") is not None
    ):
        reason = "a served teacher needs temperature 1 here; the trainer loads the teacher"
    if reason:
        job.refuse(key, reason)
    else:
        job.convert(key, {"trainer.teacher_server.url": url}, "the teacher is served, without /v1 here")


def convert_filters(job: Import, era: str) -> None:
    """Write filters of completions, and the treatment of advantages of 0."""
    keys = ("orchestrator.filters", "orchestrator.pre_batch_filters", "orchestrator.post_batch_filters")
    default = [{"type": "gibberish"}, {"type": "repetition"}] if era < "2026-08" else []
    found: dict[str, dict[str, Any]] = {one["type"]: one for one in default}
    has_zero = job.value("orchestrator.train.filter_zero_advantages")
    if job.has("orchestrator.filters"):
        found = {}
    for key in keys:
        items = job.section(key)
        items = items if isinstance(items, list) else []
        for one in items:
            kind, action = one.get("type"), one.get("action")
            # `enforce` until spring 2026, then the word for it
            enforce = one.get("enforce", kind == "zero_advantage") if action is None else action == "drop"
            if kind == "zero_advantage" and key == "orchestrator.pre_batch_filters" and enforce:
                job.run.set("packer.dynamic_sampling", True, "zero_advantage before the batch: replaced")
                job.run.set("packer.max_resample_times", ANY_RESAMPLES, f"{job.system} has no limit of repetitions")
            elif kind == "zero_advantage":
                has_zero = enforce if key != "orchestrator.pre_batch_filters" else has_zero
            elif kind in ("gibberish", "repetition"):
                plain = {name: value for name, value in one.items() if name != "action"} | {"enforce": enforce}
                found[kind] = plain if not found.get(kind, {}).get("enforce") else found[kind]
            else:
                raise ConfigError(f"{key}: {kind!r} is none of gibberish, repetition, zero_advantage")
        _report_filters(job, key, items, list(found.values()), has_zero)
    if not job.run.get("reward.filters"):
        job.run.set("reward.filters", list(found.values()), f"default of {job.report.origin}")
    zero = "orchestrator.train.filter_zero_advantages"
    if job.run.get("trainer.loss.type") == "ref_kl" or job.run.get("trainer.loss.teacher_tau"):
        has_zero = False
        job.settle(zero, "the loss reads a teacher, not advantages alone")
    if job.given.get(zero) == has_zero and not job.is_reported(zero):
        job.rename(zero, "packer.filter_zero_advantages")
    else:
        job.run.set("packer.filter_zero_advantages", has_zero, f"default of {job.report.origin}")


def _report_filters(
    job: Import, key: str, items: list[dict[str, Any]], found: list[dict[str, Any]], has_zero: bool
) -> None:
    """Report the keys of a list of filters, each with what its filter decides here."""
    if not job.has(key):
        return
    is_early = key == "orchestrator.pre_batch_filters"
    target = "packer.dynamic_sampling" if is_early else "packer.filter_zero_advantages"
    on = bool(job.run.get(target)) if is_early else has_zero
    for place, one in enumerate(items):
        if one.get("type") == "zero_advantage":
            text = "other groups take their place" if is_early else "they leave the step"
            job.convert(job.keys_below(f"{key}.{place}"), {target: on}, text if on else "counted alone")
    text = f"masked here where enforced; {job.system} leaves such completions out"
    job.convert([key, *job.keys_below(key)], {"reward.filters": found}, text)


def convert_evaluation(job: Import, train: list[str], era: str) -> None:
    """Write the evaluation of environments that are trained too; others have no counterpart."""
    section = "orchestrator.eval"
    if not job.has(section):
        job.run.set("eval.num_prompts", 0, "no [orchestrator.eval]: no evaluation")
        return
    sources = sources_of(job, "eval")
    trained = {_name_of_environment(job, source) for source in train}
    here = [source for source in sources if _name_of_environment(job, source) in trained]
    for source in sources:
        if source not in here:
            job.sweep({}, {f"{source}.**": "only environments that are trained are evaluated here; "
                           "evaluate the checkpoints elsewhere"})  # fmt: skip
    if not here:
        job.run.set("eval.num_prompts", 0, "none of the environments for evaluation is trained")
        job.sweep({}, {f"{section}.**": "no environment is left to evaluate here"})
        return
    values = {
        name: [job.given.get(f"{source}.{name}") or job.value(f"{section}.{name}") for source in here]
        for name in ("interval", "num_examples", "group_size")
    }
    if len(set(values["interval"])) > 1:
        job.note(f"evaluations every {values['interval']} steps; the smallest interval counts here")
    counts = [ALL_EXAMPLES if count < 0 else count for count in values["num_examples"]]
    targets = {
        "interval": ("eval.every_steps", min(values["interval"])),
        "num_examples": ("eval.num_prompts", max(counts)),
        "group_size": ("eval.completions_per_prompt", max(values["group_size"])),
    }
    for name, (target, value) in targets.items():
        text = "−1: all; fewer give all" if value == ALL_EXAMPLES else f"{value} for all environments"
        if len(sources) == 1 and job.given.get(f"{section}.{name}") == value:
            job.rename(f"{section}.{name}", target)
        else:
            job.convert([f"{section}.{name}", *(f"{source}.{name}" for source in here)], {target: value}, text)
    _convert_moments(job, section, era)
    temperature = f"{section}.sampling.temperature"
    own = [job.given.get(f"{source}.sampling.temperature", job.given.get(temperature)) for source in here]
    if own[0] is None or len(set(own)) > 1:
        job.ask(
            "eval.temperature",
            f"sampling temperature of evaluations; without one {job.system}'s server takes the model's",
        )
        job.settle(temperature, "empty: that of the model's generation_config.json")
    else:
        job.convert([temperature, *(f"{source}.sampling.temperature" for source in here)],
                    {"eval.temperature": own[0]}, f"{own[0]:g}")  # fmt: skip
    _convert_evaluated(job, section, here)
    job.run.set("eval.exact_match", None, f"{job.system} measures rewards alone")
    # the environments of training stand for those of evaluation
    for source in here:
        job.sweep(
            {
                f"{source}.{part}": "the environment's own rows for evaluation"
                for part in ("id", "name", "args", "env.**")
            },
            {f"{source}.**": _OWN_SAMPLING},
        )
    job.sweep({}, {f"{section}.sampling.**": _OWN_SAMPLING})


_OWN_SAMPLING = "evaluations have temperature, top_p, top_k and a length of their own here, for all sources"
_EVALUATED = (
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("max_completion_tokens", "max_tokens"),
    ("max_tokens", "max_tokens"),
)
"""Keys of evaluations apart from temperature: prime-rl's names and ours."""


def _convert_evaluated(job: Import, section: str, sources: list[str]) -> None:
    """Write truncation and length of evaluations, where all sources agree."""
    for name, ours in _EVALUATED:
        common = f"{section}.sampling.{name}"
        values = [job.given.get(f"{source}.sampling.{name}", job.given.get(common)) for source in sources]
        if values[0] is None or len(set(values)) > 1:
            job.settle(common, "empty: the server's") if job.given.get(common) is None else None
            continue
        value = values[0]
        row = job.run.get("packer.sequence_len")
        if name == "top_k":
            value = max(value, 0)
        elif ours == "max_tokens" and isinstance(row, int):
            value = min(value, row - 1)
        keys = [common, *(f"{source}.sampling.{name}" for source in sources)]
        job.convert(keys, {f"eval.{ours}": value}, f"{value:g}")


def _convert_moments(job: Import, section: str, era: str) -> None:
    first, base = f"{section}.skip_first_step", f"{section}.eval_base_model"
    key = base if job.has(base) else first
    starts = bool(job.given.get(base, True)) and not job.given.get(first, False)
    job.convert(key, {"eval.at_start": starts}, f"the base model is evaluated: {starts}".lower())
    job.settle(first, "eval_base_model counts")
    job.run.set("eval.at_end", era <= "2026-03", f"as in {job.system}: " + ("at the end too" if era <= "2026-03" else
                "at multiples of the interval only"))  # fmt: skip


def _name_of_environment(job: Import, source: str) -> str:
    """Return the id of an environment, whatever name the user gave it."""
    section = job.section(source)
    env = section.get("env")
    taskset = env.get("taskset") if isinstance(env, dict) else None
    own = taskset.get("id") if isinstance(taskset, dict) else None
    return str(own or section.get("id") or "reverse-text")
