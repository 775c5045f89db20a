"""Pages on losses, advantages, rewards, sampling and other libraries: tables are the code's, Python is executed."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from actors.algorithms.losses import LOSSES
from actors.algorithms.losses.metrics import DENOMINATORS, NON_LINEAR
from actors.reward.builtin import BUILTIN
from benchmarks import cases
from schemas.config import RunConfig, load_config
from schemas.config.advantages import AdvantageConfig
from schemas.config.filters import CompletionFilterConfig
from schemas.config.losses import LossConfig, RefKlLossConfig
from schemas.config.objective import ObjectiveConfig
from schemas.config.tables import keys_table, with_tables

ROOT = Path(__file__).parent.parent
PAGES = {
    name: (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8")
    for name in ("losses", "advantages", "rewards", "sampling", "libraries")
}
TEXT = "\n".join(PAGES.values())
BASE: dict[str, Any] = {
    "model": {"path": "m"}, "environments": [{"type": "reverse_text"}],
    "reward": {"functions": [{"path": "exact_match"}]}, "trainer": {"max_steps": 10},
}  # fmt: skip


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def types(union: Any) -> list[str]:
    """The names of a union's members, in order."""
    return [member.model_fields["type"].default for member in get_args(get_args(union)[0])]


def loaded(folder: Path, overrides: list[str]) -> RunConfig:
    """A valid configuration with these overrides."""
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE))
    return load_config(folder / "run.yaml", overrides)


def overrides_of(tree: dict[str, Any]) -> list[str]:
    """Each key of each section, with its whole value; a section that is a list as it is."""
    whole = [f"{section}={json.dumps(keys)}" for section, keys in tree.items() if isinstance(keys, list)]
    sections = {section: keys for section, keys in tree.items() if isinstance(keys, dict)}
    return whole + [
        f"{name}.{key}={json.dumps(value)}" for name, keys in sections.items() for key, value in keys.items()
    ]


def first_table(page: str, heading: str) -> dict[str, list[str]]:
    """Behind a heading: by the name in backticks that a row begins with, its other cells."""
    rows = PAGES[page].split(f"\n## {heading}\n")[1].split("\n\n|")[1].split("\n\n")[0].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| `")]
    return {name.strip("`"): others for name, *others in cells}


def test_the_tables_of_keys_are_current() -> None:
    """`make docs` writes them."""
    assert TEXT.count("<!-- keys ") == TEXT.count("<!-- end -->") > 15
    assert with_tables(TEXT) == TEXT


def test_a_table_has_a_row_for_each_key_that_differs_by_type() -> None:
    """epsilon is 0.2 and 0.4; of the losses without it, custom is one."""
    rows = [row for row in keys_table("trainer.loss", ["epsilon"]).splitlines() if "`epsilon`" in row]
    assert [row.split(" | ")[1] for row in rows] == ["`0.2`", "`0.4`"]
    assert rows[1].split(" | ")[2] == "gmpo"
    assert "custom" not in rows[0]
    assert "| `level` | `token` (or `sequence`) |" in keys_table("trainer.correction")
    assert "| `mode` | required: `truncate`, `mask` |" in keys_table("trainer.correction")


@pytest.mark.parametrize(("path", "names"), [("trainer.lost", None), ("trainer.loss", ["epsilom"])])
def test_a_table_of_what_is_not_there_is_refused(path: str, names: list[str] | None) -> None:
    """A renamed key can't leave an empty table behind."""
    with pytest.raises(KeyError):
        keys_table(path, names)


@pytest.mark.parametrize(
    ("page", "heading", "union"),
    [("losses", "Policy losses", LossConfig), ("advantages", "Types", AdvantageConfig)],
    ids=["loss", "advantage"],
)
def test_each_type_has_a_row_with_its_formula(page: str, heading: str, union: Any) -> None:
    """None is missing, none is there that can't be configured."""
    assert sorted(first_table(page, heading)) == sorted(types(union))


def test_every_key_of_the_objective_and_every_name_is_on_the_page() -> None:
    """Keys of what is minimised, metrics of losses, filters, built-in reward functions."""
    names = [*ObjectiveConfig.model_fields, *DENOMINATORS, *NON_LINEAR, *types(CompletionFilterConfig)]
    assert [name for name in [*names, *BUILTIN] if f"`{name}`" not in TEXT] == []


def test_the_averages_are_those_of_the_code() -> None:
    """What the table says of the losses that are one function with different averages."""
    rows = first_table("losses", "Policy losses")
    said = {name: rows[name][1] for name in ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "gspo_token", "luspo")}
    words = {
        "completion_means": "completion means",
        "micro_batch_tokens": "micro-batch tokens",
        "max_length": "completions × `rollout.max_tokens`",
        "step_tokens": "step tokens",
        "completion_sums": "completions",
    }
    functions = {config.model_fields["type"].default: function for config, function in LOSSES.items()}
    found = {name: functions[name].__closure__[0].cell_contents for name in said}  # type: ignore[index]
    assert said == {name: words[average] for name, average in found.items()}


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: " ".join(block.split())[:40])
def test_every_yaml_block_is_a_valid_configuration(tmp_path: Path, block: str) -> None:
    """Over a base that has only what is required."""
    tree = yaml.safe_load(block)
    config = loaded(tmp_path, overrides_of(tree))
    for section, keys in tree.items():
        found = getattr(config, section)
        for one, given in zip(found, keys, strict=True) if isinstance(keys, list) else [(found, keys)]:
            assert one.model_fields_set >= set(given)


def test_python_blocks_print_what_they_say() -> None:
    """All in one namespace, in order; a comment behind a print is its output, and so is the block that follows one."""
    following = re.findall(r"^```python\n(.*?)^```\n\n(?:```text\n(.*?)^```$)?", TEXT, re.DOTALL | re.MULTILINE)
    assert len(following) == len(blocks("python")) > 3
    namespace: dict[str, Any] = {}
    for code, output in following:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "docs/reference", "exec"), namespace)
        expected = output.splitlines() or re.findall(r"^\s*print\(.*\)  # (.*)$", code, re.MULTILINE)
        assert expected
        assert printed.getvalue().splitlines() == expected


def test_a_benchmark_case_exists_for_each_loss_and_advantage() -> None:
    """Nothing can be registered without being tried."""
    assert sorted(cases.LOSSES) == sorted(types(LossConfig))
    assert sorted(cases.ADVANTAGES) == sorted(types(AdvantageConfig))


def test_the_defaults_are_those_of_trls_async_trainer(tmp_path: Path) -> None:
    """min(ρA, clip(ρ, 0.8, 1.2)·A) to the engine's logprobs over all tokens; (r − mean) / (population std + 1e-8).

    As `AsyncGRPOTrainer.compute_loss` and `AsyncRolloutWorker._score_group` have it; the benchmark's case is the same.
    """
    config = loaded(tmp_path, [])
    loss, advantage = config.trainer.loss, config.reward.advantage
    assert loss.model_dump() == {
        "type": "dapo", "old_logprobs": "inference", "importance_sampling_level": "token",
        "epsilon": 0.2, "epsilon_high": None, "delta": None, "dual_clip": None, "compat": {
            "loss_normalizer": "minibatch", "entropy_average": "step_tokens", "off_policy_tokens": "count",
            "advantage_level": "token",
        },
    }  # fmt: skip
    assert advantage.model_dump() == {"type": "zscore", "std": "population", "eps": 1e-8}
    assert (config.trainer.reference, config.trainer.correction) == (None, None)
    tried = load_config(ROOT / "examples/quickstart/run.yaml", [*cases.DEFAULTS["default"]])
    assert (tried.trainer.loss, tried.reward.advantage) == (loss, advantage)


ALL_CASES = {
    f"{kind}-{name}": (name, case)
    for kind, found in (
        ("default", cases.DEFAULTS),
        ("loss", cases.LOSSES),
        ("advantage", cases.ADVANTAGES),
        ("switch", cases.MODIFIERS),
    )
    for name, case in found.items()
}


@pytest.mark.parametrize("label", ALL_CASES)
def test_benchmark_cases_are_overrides_of_the_quickstart(label: str) -> None:
    """They load, and set the type that they are named after."""
    name, case = ALL_CASES[label]
    filled = [re.sub(r"{\w+}", "place", override) for override in case]
    config = load_config(ROOT / "examples/quickstart/run.yaml", filled)
    if label.startswith("loss-"):
        assert config.trainer.loss.type == name
        assert isinstance(config.trainer.loss, RefKlLossConfig) == (config.trainer.teacher is not None)
    if label.startswith("advantage-"):
        assert config.reward.advantage.type == name
