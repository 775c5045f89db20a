"""Configuration: what is wrong is said as `path.to.key: what is wrong, what is allowed`, all of it at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import RunConfig, check_tree, dump_config, load_config, warnings
from schemas.errors import ConfigError


def _tree(**changes: Any) -> dict[str, Any]:
    """The least that a run needs, changed at dotted paths (`a__b` is a.b)."""
    tree: dict[str, Any] = {
        "model": {"path": "tiny"},
        "environments": [{"type": "arithmetic"}],
        "reward": {"functions": [{"path": "exact_match"}]},
        "trainer": {"max_steps": 2},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _problems(tree: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_tree(tree)
    return caught.value.problems


def _file(folder: Path, text: str | dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text), encoding="utf-8")
    return path


def _load_problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return caught.value.problems


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trainer__learning_rat": 1}, "trainer.learning_rat: no such key, did you mean 'learning_rate'?"),
        ({"trianer": {}}, "trianer: no such key, did you mean 'trainer'?"),
        ({"model__lora": {"rnak": 4}}, "model.lora.rnak: no such key, did you mean 'rank'?"),
        ({"eval__zzz": 1}, ("eval.zzz: no such key, allowed are at_end, at_start, completions_per_prompt, every_steps, "
                           "exact_match, greater_is_better, max_tokens, metric_for_best_model, num_prompts, sources, "
                           "temperature, top_k, top_p")),
        ({"environments": [{"type": "arithmetic", "max_operant": 5}]},
         "environments.0.max_operant: no such key, did you mean 'max_operand'?"),
        ({"environments": [{"type": "arithmetics"}]},
         ("environments.0.type: 'arithmetics' is not one of 'reverse_text', 'arithmetic', 'jsonl', 'dataset', "
          "'python', 'agent', 'reasoning_gym', 'textarena', 'gymnasium', 'verifiers', 'verifiers_v1', 'openenv', "
          "'ors', did you mean 'arithmetic'?")),
        ({"environments": [{"name": "x"}]}, "environments.0.type: is required"),
        ({"inference__engine": {"type": "vlm"}},
         "inference.engine.type: 'vlm' is not one of 'embedded', 'vllm', 'sglang', 'fake', did you mean 'vllm'?"),
        ({"environments": [{"type": "jsonl", "path": "a", "min_letters": 3}]},
         "environments.0.min_letters: is a key of type reverse_text, not of jsonl"),
        ({"environments": [{"type": "jsonl", "path": "a", "operations": []}]},
         "environments.0.operations: is a key of type arithmetic, not of jsonl"),
        ({"reward__advantage": {"type": "mean", "discount": 1.0}},
         "reward.advantage.discount: is a key of type process or gae, not of mean"),
        ({"reward__advantage": {"type": "rlo"}},
         ("reward.advantage.type: 'rlo' is not one of 'mean', 'length_weighted_mean', 'zscore', 'batch_std', 'norm', "
          "'rloo', 'reinforce_pp', 'gdpo', 'max_rl', 'process', 'gae', 'custom', did you mean 'rloo'?")),
        ({"reward__advantage": {"type": "custom", "path": "mine"}},
         "reward.advantage.path: must be package.module:function or file.py:function, got 'mine'"),
        ({"reward__advantage": {"type": "process"}},
         "reward: advantage process needs steps: {path: file.py:function}"),
        ({"reward__steps": {"path": "mine:f"}}, "reward: steps are used by advantage process and gae, not by zscore"),
        ({"reward__on_timeout": "ignore"}, "reward.on_timeout: must be 'none', 'zero' or 'fail', got 'ignore'"),
        ({"reward__advantage": "zscore"}, "reward.advantage: must be a map of keys, write {type: zscore}"),
        ({"trainer__loss": "surrogate"}, "trainer.loss: must be a map of keys, write {type: surogate}"),
        ({"reward__advantage": 3}, "reward.advantage: must be a map of keys, got 3"),
        ({"trainer": None}, "trainer: is empty: remove it or give a value"),
        ({"seed": None}, "seed: is empty: remove it or give a value"),
        ({"reward__advantage": None}, "reward.advantage: is empty: remove it or give a value"),
        ({"seed": True}, "seed: must be a valid integer, got True"),
        ({"trainer__learning_rate": False}, "trainer.learning_rate: must be a valid number, got False"),
        ({"up__torch_threads": {"trainer": True}}, "up.torch_threads.trainer: must be a valid integer, got True"),
        ({"learning_rate": 1.0}, "learning_rate: no such key, did you mean 'trainer.learning_rate'?"),
        (
            {"temperature": 1.0},
            (
                "temperature: no such key, did you mean 'rollout.temperature' or 'eval.temperature' or "
                "'eval.sources[].temperature'?"
            ),
        ),
        ({"rollout__max_steps": 5}, "rollout.max_steps: no such key, did you mean 'trainer.max_steps'?"),
        ({"environments": []}, "environments: list should have at least 1 item after validation, not 0"),
        ({"environments": [{"type": "jsonl"}]}, "environments.0.path: is required"),
        ({"trainer": {}}, "trainer.max_steps: is required, or trainer.max_epochs in its place"),
        ({"trainer__max_epochs": 2.0},
         ("trainer.max_epochs: trainer.max_steps is set too; remove one of the two (as an override: "
         "trainer.max_epochs=null)")),
        ({"trainer__checkpoint": {"interval_epochs": 1.0}},
         "trainer.checkpoint.interval_epochs: needs trainer.max_epochs; set that in place of trainer.max_steps"),
        ({"trainer__checkpoint": {"interval_epochs": 1.0, "interval_share": 0.5}},
         "trainer.checkpoint: interval_share and interval_epochs are two intervals; remove one of the two"),
        ({"trainer__lr_scheduler": "warmup_stable_decay"},
         ("trainer: lr_scheduler warmup_stable_decay needs the length of its decay; set lr_schedule.decay_steps or "
          "lr_schedule.decay_ratio")),
        ({"trainer__lr_schedule": {"decay_ratio": 0.1, "decay_steps": 1}},
         "trainer.lr_schedule: decay_steps and decay_ratio are two lengths of one decay; remove one of the two"),
        ({"trainer__warmup_ratio": 0.1, "trainer__warmup_steps": 1},
         "trainer: warmup_steps and warmup_ratio are two lengths of one warm-up; remove one of the two"),
        ({"model__lora": {"init": "orthogonal", "rank": 3}},
         "model.lora: init: orthogonal needs an even rank, and rank is 3"),
        ({"model__lora": {"target_modules": "(q"}},
         ("model.lora.target_modules: is no regular expression: missing ), unterminated subpattern at position 0, "
          "got '(q'")),
        ({"model__lora": {"dora": True}, "model__quantization": {"type": "nf4"}},
         "model: quantization: not with lora.dora; remove one of the two"),
        ({"model__lora": {"dora": True}, "inference__engine": {"type": "vllm"}},
         ("model.lora.dora: engine vllm takes plain LoRA adapters only; remove model.lora.dora, or set "
          "inference.engine.type to embedded or fake")),
        ({"model__lora": {"modules_to_save": ["lm_head"]},
          "inference__engine": {"type": "sglang", "urls": ["http://a:1"]}},
         ("model.lora.modules_to_save: engine sglang takes plain LoRA adapters only; remove "
          "model.lora.modules_to_save, or set inference.engine.type to embedded or fake")),
        ({"model__lora": {"dora": True}, "trainer__sharding": "fsdp"},
         "model.lora.dora: not with trainer.sharding fsdp; remove one of the two"),
        ({"trainer__checkpoint": {"keep_last": 0}},
         "trainer.checkpoint.keep_last: must be greater than or equal to 1, got 0"),
        ({"trainer": 5}, "trainer: must be a map of keys, got 5"),
        ({"trainer__max_steps": 0}, "trainer.max_steps: must be greater than or equal to 1, got 0"),
        ({"trainer__max_steps": "many"},
         "trainer.max_steps: must be a valid integer, got 'many'"),
        ({"packer__order": "random"}, "packer.order: must be 'ordinal' or 'arrival', got 'random'"),
        ({"rollout__top_p": 1.5}, "rollout.top_p: must be less than or equal to 1, got 1.5"),
        ({"name": "a b"}, "name: string should match pattern '^[A-Za-z0-9_.-]+$', got 'a b'"),
        ({"environments": [{"type": "reverse_text", "min_letters": 9}]},
         "environments.0: min_letters 9 must not exceed max_letters 8"),
        ({"trainer__loss": {"type": "surogate", "token_mask_low": 9.0}},
         "trainer.loss: token_mask_low 9.0 must be below token_mask_high 8.0"),
        ({"up__torch_threads": {"trainer": 0}}, "up: torch_threads: at least 1 thread per process"),
        ({"bus__control": "udp://h:1"}, "bus.control: must be 'ipc' or 'tcp://host:port', got 'udp://h:1'"),
        ({"bus__control": "tcp://a..b:5555"},
         "bus.control: must have a host whose parts between dots have 1 to 63 characters, got 'tcp://a..b:5555'"),
        ({"bus__control": f"tcp://{'a' * 64}.b:5555"},
         ("bus.control: must have a host whose parts between dots have 1 to 63 characters, got "
         f"'tcp://{'a' * 64}.b:5555'")),
    ],
)  # fmt: skip
def test_problem_reads(changes: dict[str, Any], problem: str) -> None:
    """Each kind of mistake names the key as it is written in the file, what is wrong, and what is allowed."""
    assert _problems(_tree(**changes)) == [problem]


def test_both_members_of_a_plain_union_are_named_at_the_key() -> None:
    """A value that fits neither member is told both, at the key itself."""
    assert _problems(_tree(model__lora={"target_modules": 5})) == [
        "model.lora.target_modules: must be a valid string, got 5",
        "model.lora.target_modules: must be a valid list, got 5",
    ]


def test_all_problems_are_told_at_once() -> None:
    """One run of `actors check` shows every mistake of every section."""
    problems = _problems(_tree(trainer__max_steps=0, rollout__temprature=1, packer__order="x"))
    assert sorted(problem.partition(":")[0] for problem in problems) == [
        "packer.order",
        "rollout.temprature",
        "trainer.max_steps",
    ]


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"packer__max_async_level": 9}, ("packer.max_off_policy_steps", "packer.max_async_level")),
        ({"rollout__max_tokens": 64, "packer__sequence_len": 64}, ("rollout.max_tokens", "packer.sequence_len")),
        (
            {"rollout__max_tokens": 64, "inference__engine": {"type": "embedded", "max_sequence_len": 64}},
            ("rollout.max_tokens", "inference.engine.max_sequence_len"),
        ),
        (
            {"rollout__group_size": 8, "inference__engine": {"type": "embedded", "max_sequences": 7}},
            ("rollout.group_size", "inference.engine.max_sequences"),
        ),
        (
            {
                "environments": [{"type": "jsonl", "path": "a", "max_prompt_tokens": 60}],
                "packer__sequence_len": 64,
                "rollout__max_tokens": 8,
            },
            ("environments[].max_prompt_tokens", "packer.sequence_len 64"),
        ),
        ({"rollout__max_tokens": 8, "rollout__min_tokens": 9}, ("rollout.min_tokens", "rollout.max_tokens 8")),
        (
            {"rollout__ignore_eos": True, "reward__mask_truncated_completions": True},
            ("rollout.ignore_eos", "reward.mask_truncated_completions"),
        ),
        ({"environments": [{"type": "arithmetic"}] * 2}, ("environments", "environments[].name")),
        (
            {"environments": [{"type": "arithmetic", "weight": 1}, {"type": "reverse_text"}]},
            ("environments[].weight", "for none"),
        ),
        ({"bus__control": "tcp://10.0.0.5:5000"}, ("bus.control", "bus.allow_plaintext")),
        ({"bus__control": "tcp://127.0.0.1:1", "bus__host": "0.0.0.0"}, ("bus.host", "bus.allow_plaintext")),
    ],
)
def test_rule_that_spans_keys_names_both(changes: dict[str, Any], keys: tuple[str, str]) -> None:
    """The problem begins with the key to change and names the other one."""
    (problem,) = _problems(_tree(**changes))
    assert problem.startswith(f"{keys[0]}: ")
    assert keys[1] in problem


def test_rules_that_span_keys_are_problems_of_their_own() -> None:
    """Two broken rules are two lines, not one."""
    problems = _problems(_tree(packer__max_async_level=9, rollout__max_tokens=64, packer__sequence_len=64))
    assert [problem.partition(":")[0] for problem in problems] == ["packer.max_off_policy_steps", "rollout.max_tokens"]


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2", "line 2, column 2: while parsing a flow sequence of line 1, expected ',' or ']', but got ':'"),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: 1\nb:\n\tc: 2", "line 3: a tab; YAML indents with spaces"),
        ("seed: 1\nname: x\nseed: 2", "line 3, column 1: the key 'seed' stands in line 1 already"),
        ("model:\n  path: x\n  lora: {rank: 1, rank: 2}", "line 3, column 19: the key 'rank' stands in line 3 already"),
        ("a: \x07", "is not YAML: special characters are not allowed"),
    ],
)
def test_file_that_is_not_yaml(tmp_path: Path, text: str, words: str) -> None:
    """The problem names the file, the place in it and the cause, on one line; a key that stands twice is one."""
    path = _file(tmp_path, text)
    assert _load_problems(path) == [f"{path}: {words}"]


def test_a_merged_key_may_be_set_again(tmp_path: Path) -> None:
    """`<<` brings in defaults, which a key of the map itself overrides."""
    text = yaml.safe_dump(_tree()) + "eval: {<<: {num_prompts: 3, every_steps: 2}, num_prompts: 4}"
    config = load_config(_file(tmp_path, text))
    assert (config.eval.num_prompts, config.eval.every_steps) == (4, 2)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    """A wrong path is a problem in words, not a traceback."""
    assert _load_problems(tmp_path / "no.yaml") == [f"{tmp_path / 'no.yaml'}: can't be read: No such file or directory"]
    assert _load_problems(tmp_path) == [f"{tmp_path}: can't be read: Is a directory"]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert _load_problems(tmp_path / "binary") == [
        f"{tmp_path / 'binary'}: is not UTF-8 text; save it in that encoding"
    ]


@pytest.mark.parametrize("text", ["just words", "- a\n- b"])
def test_file_that_is_no_map(tmp_path: Path, text: str) -> None:
    """A file of something else says what a configuration is, with and without overrides."""
    path = _file(tmp_path, text)
    assert _load_problems(path)[0].startswith("run: must be a map of sections, got ")
    assert len(_load_problems(path, "seed=1")) == 1


def test_empty_file_lacks_what_is_required(tmp_path: Path) -> None:
    """Nothing configured is three required keys."""
    assert _load_problems(_file(tmp_path, "")) == [
        f"{section}: is required" for section in ("model", "environments", "trainer")
    ]


def test_overrides_reach_sections_lists_and_what_was_not_there(tmp_path: Path) -> None:
    """Values are YAML; list items are counted from 0; missing sections are made."""
    path = _file(tmp_path, _tree())
    overrides = [
        "trainer.learning_rate=1e-5",
        "environments.0.name=sums",
        "environments.0.operations=[+, '*']",
        "model.lora.rank=4",
        "reward.functions.0={path: exact_match, weight: 2}",
        "output_dir=a=b",
    ]
    config = load_config(path, overrides)
    assert config.trainer.learning_rate == 1e-5
    assert config.environments[0].label == "sums"
    assert config.model.lora is not None
    assert config.model.lora.rank == 4
    assert config.reward.functions[0].weight == 2.0
    assert config.output_dir.endswith("/a=b")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.max_steps", "trainer.max_steps: an override is written path.to.key=value"),
        (".=5", ".=5: an override is written path.to.key=value"),
        ("trainer..max_steps=5", "trainer..max_steps=5: an override is written path.to.key=value"),
        ("learning_rate=1e-5", "learning_rate: no such key, did you mean 'trainer.learning_rate'?"),
        ("seed={a: 1, a: 2}", "seed: '{a: 1, a: 2}' is not a YAML value"),
        ("=1", "=1: an override is written path.to.key=value"),
        ("environments.3.name=x", "environments.3.name: '3' is not an item of a list with 1 items, counted from 0"),
        ("environments.first=x", "environments.first: 'first' is not an item of a list with 1 items, counted from 0"),
        ("trainer.max_steps.deep=1", "trainer.max_steps.deep: 'deep' is inside a plain value"),
        ("trainer.max_steps.deep.er=1", "trainer.max_steps.deep.er: 'deep' is inside a plain value"),
        ("seed=[1", "seed: '[1' is not a YAML value"),
        ("trainer.max_step=3", "trainer.max_step: no such key, did you mean 'max_steps'?"),
    ],
)
def test_override_that_is_wrong(tmp_path: Path, override: str, problem: str) -> None:
    """A wrong override is told like a wrong key, by the name that was typed."""
    assert _load_problems(_file(tmp_path, _tree()), override) == [problem]


def test_paths_are_relative_to_the_file_and_the_output_to_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, reward files and a local model lie beside run.yaml; results go where the command is given."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    functions = [{"path": path} for path in ("mine.py:score", "pkg.module:score", "exact_match", "/abs/x.py:f")]
    tree = _tree(
        model__path="model",
        environments=[{"type": "jsonl", "path": "train.jsonl", "eval_path": "held/out.jsonl"}],
        reward__functions=functions,
        reward__steps={"path": "mine.py:steps"},
        reward__advantage={"type": "gae"},
        eval__exact_match="mine.py:match",
        output_dir="out",
    )
    config = load_config(_file(folder, tree))
    environment: Any = config.environments[0]
    assert config.model.path == str(folder / "model")
    assert environment.path == str(folder / "train.jsonl")
    assert environment.eval_path == str(folder / "held/out.jsonl")
    assert [function.path for function in config.reward.functions] == [
        f"{folder}/mine.py:score",
        "pkg.module:score",
        "exact_match",
        "/abs/x.py:f",
    ]
    assert config.reward.steps is not None
    assert config.reward.steps.path == f"{folder}/mine.py:steps"
    assert config.eval.exact_match == f"{folder}/mine.py:match"
    assert config.output == elsewhere / "out"
    assert config.ledger_path == elsewhere / "out" / "ledger.sqlite"


@pytest.mark.parametrize(
    ("path", "located"),
    [
        ("org/sums", "org/sums"),
        ("org/sums.v2", "org/sums.v2"),
        ("sums", "{folder}/sums"),
        ("rows.parquet", "{here}/rows.parquet"),
        ("org/rows.parquet", "{folder}/org/rows.parquet"),
        ("data/saved", "{folder}/data/saved"),
        ("data/*.jsonl", "{folder}/data/*.jsonl"),
        ("data/*/part-[0-9].csv.gz", "{folder}/data/*/part-[0-9].csv.gz"),
        ("*.arrow", "{folder}/*.arrow"),
        ("shards/*.arrow", "{here}/shards/*.arrow"),
        ("/abs/*.arrow", "/abs/*.arrow"),
        ("/abs/rows.json", "/abs/rows.json"),
    ],
)
def test_a_data_set_is_a_name_on_the_hub_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, located: str
) -> None:
    """OWNER/NAME is on the hub, unless there is such a folder or the name is that of a data file."""
    folder, here = tmp_path / "project", tmp_path / "here"
    for place in (folder / "data", here / "shards"):
        place.mkdir(parents=True)
    for place in (here / "rows.parquet", folder / "mine.py"):
        place.touch()
    monkeypatch.chdir(here)
    tree = _tree(environments=[{"type": "dataset", "path": path, "eval_path": path, "filter": "mine.py:f"}])
    config = load_config(_file(folder, tree))
    environment: Any = config.environments[0]
    assert environment.path == environment.eval_path == located.format(folder=folder, here=here)
    assert environment.filter == f"{folder}/mine.py:f"
    # the configuration that a run writes down means the same wherever it is read
    monkeypatch.chdir(tmp_path)
    assert load_config(_file(tmp_path, dump_config(config))).environments == config.environments


def test_what_a_data_set_can_not_be_is_refused() -> None:
    """By key, with the notation that is allowed."""
    keys = {"type": "dataset", "path": "org/sums", "split": "train[5]", "columns": {"prompt": None}, "limit": 0}
    assert _problems(_tree(environments=[keys])) == [
        (
            "environments.0.split: 'train[5]' is no split; write train, train[:1000], train[:90%] or train+validation, "
            "got 'train[5]'"
        ),
        "environments.0.limit: must be greater than or equal to 1, got 0",
    ]
    keys |= {"split": "train", "limit": 1}
    assert _problems(_tree(environments=[keys])) == [
        "environments.0: columns.prompt: must name a column, since every example has a prompt"
    ]


def test_the_file_of_a_custom_advantage_lies_beside_the_configuration(tmp_path: Path) -> None:
    """As reward files do."""
    config = load_config(_file(tmp_path, _tree(reward__advantage={"type": "custom", "path": "mine.py:f"})))
    advantage: Any = config.reward.advantage
    assert advantage.path == f"{tmp_path}/mine.py:f"


def test_what_is_not_beside_the_file_is_looked_for_where_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rule for model, data and reward files; `~` is the home."""
    folder, here = tmp_path / "project", tmp_path / "here"
    for place in (folder, here / "models" / "tiny"):
        place.mkdir(parents=True)
    for place in (folder / "both.jsonl", here / "both.jsonl", here / "mine.py", here / "home.jsonl"):
        place.touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    tree = _tree(
        model__path="models/tiny",
        environments=[{"type": "jsonl", "path": "both.jsonl", "eval_path": "~/home.jsonl"}],
        reward__functions=[{"path": "mine.py:score"}],
    )
    config = load_config(_file(folder, tree))
    environment: Any = config.environments[0]
    assert config.model.path == str(here / "models/tiny")
    assert (environment.path, environment.eval_path) == (str(folder / "both.jsonl"), str(here / "home.jsonl"))
    assert config.reward.functions[0].path == f"{here}/mine.py:score"


def test_model_name_of_the_hub_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two words, of which the first is no folder's name, or else a path is meant, though nothing is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()

    def path(given: str) -> str:
        return load_config(_file(tmp_path, _tree(model__path=given))).model.path

    assert [path(name) for name in ("gpt2", "org/model-1.5B")] == ["gpt2", "org/model-1.5B"]
    for missing in ("models/tiny", "./tiny", "../tiny", "a/b/c", "/nowhere"):
        assert path(missing) == str(tmp_path / missing)


def test_the_file_of_a_custom_loss_lies_beside_the_configuration(tmp_path: Path) -> None:
    """Like those of rewards."""
    (tmp_path / "mine.py").touch()
    tree = _tree(trainer__loss={"type": "custom", "path": "mine.py:loss"})
    assert load_config(_file(tmp_path, tree)).trainer.loss.model_dump()["path"] == f"{tmp_path}/mine.py:loss"


def test_dumped_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    """config.resolved.yaml, read anywhere, is the run that wrote it."""
    tree = _tree(
        model__lora={"target_modules": ["q_proj"]},
        environments=[{"type": "jsonl", "path": "a.jsonl", "weight": 2}, {"type": "reverse_text", "weight": 1}],
        reward__functions=[{"path": "mine.py:score", "kwargs": {"a": [1, None]}}],
        inference__engine={"type": "fake"},
        up__torch_threads={"trainer": 2},
    )
    config = load_config(_file(tmp_path, tree))
    (tmp_path / "else").mkdir()
    assert load_config(_file(tmp_path / "else", dump_config(config))) == config


# --- warnings and schema ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"packer__order": "arrival", "packer__max_off_policy_steps": 4}, ("packer.max_off_policy_steps", "arrival")),
        ({"rollout__group_size": 1}, ("rollout.group_size", "reward.advantage zscore")),
        (
            {"rollout__group_size": 1, "reward__advantage": {"type": "gae", "reward_norm": "mean"}},
            ("rollout.group_size", "reward.advantage gae"),
        ),
        ({"rollout__top_p": 0.9}, ("rollout.top_p", "trainer.loss")),
        (
            {"trainer__loss": {"type": "gmpo"}, "trainer__correction": {"mode": "mask"}},
            ("trainer.correction", "does nothing with trainer.loss gmpo"),
        ),
        ({"rollout__top_k": 50}, ("rollout.top_k", "trainer.loss")),
        ({"rollout__min_p": 0.05}, ("rollout.min_p", "trainer.loss")),
        ({"rollout__presence_penalty": -0.5}, ("rollout.presence_penalty", "0.0 does not")),
        ({"rollout__frequency_penalty": 0.5}, ("rollout.frequency_penalty", "0.0 does not")),
        ({"rollout__repetition_penalty": 1.1}, ("rollout.repetition_penalty", "1.0 does not")),
        ({"rollout__min_tokens": 4}, ("rollout.min_tokens", "0 does not")),
        ({"packer__pools": {"easy_threshold": 1.0}}, ("packer.pools", "never end")),
        (
            {"packer__groups_per_step": 512, "rollout__group_size": 64, "packer__sequence_len": 33_000},
            ("packer.groups_per_step", "ends the run after it has been sampled"),
        ),
        (
            {
                "rollout__group_size": 64,
                "rollout__max_tokens": 300_000,
                "packer__sequence_len": 300_100,
                "packer__groups_per_step": 8,
                "inference__engine": {"type": "fake"},
                "trainer__num_ranks": 16,
            },
            ("rollout.group_size", "fails as too_large"),
        ),
        ({"model__lora": {"dropout": 0.1}}, ("model.lora.dropout", "engine")),
        ({"model__dropout": True}, ("model.dropout", "engine")),
        ({"trainer__warmup_steps": 10}, ("trainer.warmup_steps", "never reaches")),
        (
            {"reward__functions": [{"path": "exact_match", "weight": 0.0}]},
            ("reward.functions[].weight", "nothing is learned"),
        ),
        (
            {
                "environments": [{"type": "python", "path": "game.py:Game", "max_turns": 3, "rewards": {"turns": 0.0}}],
                "reward__functions": [],
            },
            ("reward.functions[].weight, environments[].rewards", "nothing is learned"),
        ),
        ({"inference__host": "0.0.0.0"}, ("inference.host", "set inference.api_key_env")),
        ({"environments": [{"type": "jsonl", "path": "a"}]}, ("environments[].eval_path", "jsonl")),
        (
            {"bus": {"control": "tcp://10.0.0.5:5000", "host": "10.0.0.5", "allow_plaintext": True}},
            ("inference.host", "tcp://10.0.0.5:5000"),
        ),
    ],
)
def test_allowed_but_doubtful_settings_are_warned_of(changes: dict[str, Any], keys: tuple[str, str]) -> None:
    """The warning begins with the key and says why."""
    (warning,) = warnings(check_tree(_tree(**changes)))
    assert warning.startswith(f"{keys[0]}: ")
    assert keys[1] in warning


def test_usual_settings_are_not_warned_of() -> None:
    """Nor are held-out rows as an environment of their own, and rewards of an environment alone."""
    assert warnings(check_tree(_tree())) == []
    no_eval = _tree(environments=[{"type": "jsonl", "path": "a"}], eval__num_prompts=0, model__lora={})
    assert warnings(check_tree(no_eval)) == []
    held_out = {"type": "jsonl", "name": "eval", "path": "b", "train": False}
    assert warnings(check_tree(_tree(environments=[{"type": "jsonl", "path": "a"}, held_out]))) == []
    for rewards in ({}, {"turns": 1.0, "guesses": 0.0}):
        game = {"type": "python", "path": "game.py:Game", "max_turns": 3, "rewards": rewards}
        assert warnings(check_tree(_tree(environments=[game], reward__functions=[]))) == []
    assert warnings(check_tree(_tree(bus__control="tcp://127.0.0.1:5000"))) == []


@pytest.mark.parametrize("reward", [{"type": "gae"}, {"type": "process"}], ids=lambda advantage: advantage["type"])
def test_groups_of_one_are_not_warned_of_where_completions_are_not_compared(reward: dict[str, Any]) -> None:
    """The discounted reward is what it is, and steps are compared with each other."""
    config = check_tree(_tree(rollout__group_size=1, reward__advantage=reward, reward__steps={"path": "mine:f"}))
    assert warnings(config) == []


def test_configuration_is_frozen_and_its_defaults_are_checked() -> None:
    """No actor can change what another one reads."""
    config = check_tree(_tree())
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.max_steps = 3
    assert config.packer.order == "ordinal"


def test_json_schema_resolves_and_describes_every_key() -> None:
    """Editors get a schema without loose ends: each reference resolves, maps are closed, each key says what it is."""
    schema = json.loads(json.dumps(RunConfig.model_json_schema()))
    references, undescribed = set[str](), []

    def walk(node: Any, path: str) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item, path)
        if not isinstance(node, dict):
            return
        if isinstance(node.get("$ref"), str):
            references.add(node["$ref"].removeprefix("#/$defs/"))
        for key, value in node.get("properties", {}).items():
            described = "description" in value or "const" in value
            undescribed.extend([] if described else [f"{path}.{key}"])
        for value in node.values():
            walk(value, path)

    walk({key: value for key, value in schema.items() if key != "$defs"}, "RunConfig")
    for name, definition in schema["$defs"].items():
        assert definition["additionalProperties"] is False, name
        walk(definition, name)
    assert references <= set(schema["$defs"])
    assert undescribed == []
    assert schema["required"] == ["model", "environments", "trainer"]


def test_a_file_that_a_run_has_written_has_the_steps_of_its_epochs(tmp_path: Path) -> None:
    """Both keys load; an override of the epochs has the steps counted again."""
    config = check_tree(_tree(trainer={"max_epochs": 2.0})).with_steps(40)
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path).trainer.max_steps == 40
    trainer = load_config(path, ["trainer.max_epochs=3.0"]).trainer
    assert (trainer.max_epochs, trainer.max_steps) == (3.0, 0)
    # written out before the epochs were counted
    assert check_tree(config.with_steps(0).model_dump()).trainer.max_steps == 0


def test_a_text_may_stand_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the configuration first; the loaded configuration has the text, so that each actor has the same one."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "system.txt").write_text("Be brief.\nAlways.\n")
    (elsewhere / "chat.jinja").write_text("{{ messages }}")
    tree = _tree(model__chat_template={"file": "chat.jinja"})
    tree["environments"] = [{"type": "jsonl", "path": "a.jsonl", "system_prompt": {"file": "system.txt"}}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "run.yaml")
    assert config.environments[0].system_prompt == "Be brief.\nAlways."  # type: ignore[union-attr]
    assert config.model.chat_template == "{{ messages }}"
    again = check_tree(config.model_dump())
    assert again.environments[0].system_prompt == "Be brief.\nAlways."  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"file": "missing.txt"}, "missing.txt can't be read as text: No such file"),
        ({"path": "a.txt"}, "must be a text, or {file: PATH}"),
        (7, "must be a valid string"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(given: Any, words: str) -> None:
    """With the key, and what is wrong."""
    [problem] = _problems(_tree(model__chat_template=given))
    assert problem.startswith("model.chat_template: ")
    assert words in problem


def test_plain_tasks_have_no_chat_template_and_environments_no_prompts_to_measure() -> None:
    """Keys that would do nothing are refused."""
    given = [{"type": "arithmetic", "chat_template_kwargs": {"enable_thinking": False}}]
    [problem] = _problems(_tree(environments=given))
    assert "chat_template_kwargs: the prompts of this environment are plain text" in problem
    [problem] = _problems(_tree(environments=[{"type": "python", "path": "a.py:A", "max_prompt_tokens": 5}]))
    assert "max_prompt_tokens: an environment makes its prompts itself" in problem
