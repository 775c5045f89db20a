"""RULER of Surogate: a model that compares the completions of a group, as the function `relative_judge`."""

from typing import Any

from actors.imports.job import Import

SECTION = "orchestrator.ruler"


def convert_judge(job: Import, number: int) -> None:
    """Write the judge as a reward function, with the weight that its mode gives it.

    Args:
        job: the import.
        number: environments of the run.
    """
    if not job.value(f"{SECTION}.enabled"):
        for key in job.keys_below(SECTION):
            job.settle(key, "switched off")
        return
    target = f"reward.functions.{0 if job.run.get('reward.functions.0.path') is None else 1}"
    mode, weight = job.value(f"{SECTION}.mode"), float(job.value(f"{SECTION}.weight"))
    urls, model = job.value(f"{SECTION}.judge.base_url"), job.value(f"{SECTION}.judge_model")
    url = (urls[0] if urls else None) if isinstance(urls, list) else urls
    if not url or not model:
        job.ask(f"{target}.kwargs", "address and name of the judge: ruler.judge.base_url, ruler.judge_model")
        return
    settings: dict[str, Any] = {key.rpartition(".")[2]: job.given[key] for key in job.keys_below(f"{SECTION}.sampling")}
    settings |= job.given.get(f"{SECTION}.extra_body") or {}
    arguments = {"url": str(url).rstrip("/").removesuffix("/v1"), "model": model} | {
        name: job.given[key]
        for name, key in (
            ("api_key_env", f"{SECTION}.judge.api_key_var"),
            ("timeout", f"{SECTION}.judge.timeout"),
            ("max_concurrent", f"{SECTION}.max_concurrent_judges"),
            ("rubric", f"{SECTION}.rubric"),
        )
        if job.given.get(key) is not None
    }
    arguments |= {"settings": settings} if settings else {}
    job.run.set(f"{target}.path", "relative_judge", "ruler")
    job.run.set(f"{target}.weight", 0.0 if mode == "metric" else weight, f"mode {mode}")
    job.run.set(f"{target}.kwargs", arguments, "ruler; the prompt is another one")
    if mode == "replace":
        for one in range(number):
            options = job.run.get(f"environments.{one}.options")
            name = options.get("id") if isinstance(options, dict) else None
            if name is not None:
                job.run.set(f"environments.{one}.rewards", {str(name): 0.0}, "mode replace: the judge alone counts")
    keys = [f"{SECTION}.{name}" for name in ("enabled", "mode", "weight", "judge_model", "max_concurrent_judges")]
    keys += [f"{SECTION}.extra_body", f"{SECTION}.rubric", *job.keys_below(f"{SECTION}.sampling")]
    keys += [f"{SECTION}.judge.{name}" for name in ("base_url", "api_key_var", "timeout")]
    job.convert(keys, {}, f"the function relative_judge, mode {mode}")
    if isinstance(urls, list) and len(urls) > 1:
        job.note(f"ruler has {len(urls)} judges; {url} is used, put a proxy in front of several")
    for name in ("swallow_exceptions", "debug", "cost.**", "judge.**"):
        job.sweep({f"{SECTION}.{name}": "a judge that fails scores nobody, and is counted"}, {})
