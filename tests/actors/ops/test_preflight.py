"""What a run relies on outside its configuration is looked at before anything starts, without running any of it."""

import gzip
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.engines.external.staging import model_shapes
from actors.ops import device_plan
from actors.ops.preflight import preflight
from actors.ops.requirements import not_installed
from actors.ops.up.supervisor import supervise
from actors.process.devices import Gpu
from bus.run_folder import weights_folder
from schemas.config import check_tree
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

MINE = """
import nowhere_to_be_found
from other import borrowed
raise RuntimeError("this file is not to be run")
class Judge: ...
if True:
    async def short(prompts, completions): ...
weigh = Judge()
def outer():
    def inner(): ...
"""


def _problems(folder: Path, **sections: Any) -> list[str]:
    """Those of a run that is good but for these sections."""
    config = check_tree(ring_config(folder).model_dump() | sections)
    try:
        preflight(config)
    except ConfigError as error:
        return error.problems
    return []


def _rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _rewarded(path: str, **kwargs: Any) -> dict[str, Any]:
    return {"functions": [{"path": path, "kwargs": kwargs}]}


def test_the_trainers_own_files_are_looked_at(tmp_path: Path) -> None:
    """A teacher's folder without a model, and a row without a completion, each by its key; a good row passes."""
    model = {"path": "some/model"}
    trainer: dict[str, Any] = {"max_steps": 1, "loss": {"type": "ref_kl"}, "teacher": {"path": str(tmp_path)}}
    engine = {"engine": {"type": "embedded"}}
    assert _problems(tmp_path, model=model, trainer=trainer, inference=engine) == [
        f"trainer.teacher.path: {tmp_path} has no {name}" for name in ("config.json", "tokenizer.json")
    ]
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}]
    sft = {"batch_size": 1, "mu_peak": 1, "mu_valley": 1, "mu_warmup_steps": 0, "mu_decay_steps": 0}
    for count, problems in ((1, []), (2, ["a row must be an object with `prompt` and `completion`"])):
        path = _rows(tmp_path / "sft.jsonl", *rows[:count])
        found = _problems(tmp_path, trainer={"max_steps": 1, "sft": sft | {"path": path}})
        assert found == [f"trainer.sft.path: {path}, line 2: {problem}" for problem in problems]
    config = check_tree(
        ring_config(tmp_path).model_dump() | {"trainer": {"max_steps": 1, "sft": sft | {"path": "/no"}}}
    )
    assert preflight(config, starts=False) == ["trainer.sft.path: /no is not here; `actors up` needs it"]


def test_packages_that_are_not_installed_are_named_with_what_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a start they are problems; a check, which may run on another machine, tells of them."""
    monkeypatch.setattr("actors.ops.requirements.is_installed", lambda name: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    sections = {
        "model": {
            "path": "some/model",
            "lora": {"rank": 4},
            "quantization": {"type": "nf4"},
            "attention": "flash",
            "compile": True,
        },
        "trainer": {"max_steps": 1, "optimizer": {"type": "adamw_8bit"}},
        "inference": {"engine": {"type": "embedded"}},
    }
    expected = [
        ("model.lora", "peft", "grpo-actors[lora]"),
        ("model.quantization", "accelerate", "grpo-actors[bnb]"),
        ("model.quantization", "bitsandbytes", "grpo-actors[bnb]"),
        ("trainer.optimizer.type", "bitsandbytes", "grpo-actors[bnb]"),
        ("model.attention", "flash_attn", "flash-attn, or take auto"),
        ("model.compile", "no-such-compiler", "no-such-compiler"),
    ]
    assert _problems(tmp_path, **sections) == [
        f"{key}: needs {name}, which is not installed; install {extra}" for key, name, extra in expected
    ]
    told = preflight(check_tree(ring_config(tmp_path).model_dump() | sections), starts=False)
    assert told == [
        f"{key}: {name} is not installed here; a run needs it, install {extra}" for key, name, extra in expected
    ]
    assert not _problems(tmp_path), "a fake engine has a fake trainer, which needs none"


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"attention": "flex"}, "model.attention"),
        ({"dtype": "float32"}, "model.attention"),
        ({"compile": True}, "model.compile"),
        ({}, ""),
        ({"attention": "padded"}, ""),
    ],
)
def test_kernels_that_are_compiled_on_a_gpu_need_a_c_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], key: str
) -> None:
    """Triton builds them at run time; a slim image has none."""
    monkeypatch.setattr("actors.ops.requirements.visible_gpus", lambda: [Gpu("0"), Gpu("1")])
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CXX", "true")
    sections = {"model": {"path": "some/model", **model}, "inference": {"engine": {"type": "embedded"}}}
    expected = [f"{key}: needs no-such-compiler, which is not installed; install gcc and libc6-dev"] if key else []
    assert _problems(tmp_path, **sections) == expected
    monkeypatch.setattr("actors.ops.requirements.visible_gpus", list)
    assert _problems(tmp_path, **sections) == [], "nothing is compiled for a CPU but by C++"


@pytest.mark.parametrize(
    ("model", "needs"),
    [
        ({"attn_logit_softcapping": 50.0}, True),
        ({"text_config": {"attn_logit_softcapping": 50.0}}, True),
        ({"attn_logit_softcapping": None}, False),
        ({}, False),
    ],
)
def test_a_model_with_capped_scores_needs_a_c_compiler_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], needs: bool
) -> None:
    """Torch's own kernel has no soft cap, so the layers are FlexAttention's, which Triton compiles."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    monkeypatch.setattr("actors.ops.requirements.visible_gpus", lambda: [Gpu("0"), Gpu("1")])
    monkeypatch.setenv("CC", "no-such-compiler")
    config = ring_config(tmp_path).model_dump() | {
        "model": {"path": str(tmp_path / "model")},
        "inference": {"engine": {"type": "embedded"}},
    }
    assert [name for _, name, _ in not_installed(check_tree(config))] == (["no-such-compiler"] if needs else [])


@pytest.mark.parametrize(("gigabytes", "fits"), [(1, False), (3, True)])
def test_a_cache_that_can_not_fit_on_its_gpu_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: int, fits: bool
) -> None:
    """Else it grows until the GPU is full, in the middle of the run: 4096 x 1024 tokens of 512 bytes."""
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    (tmp_path / "model" / "tokenizer.json").touch()
    monkeypatch.setattr(device_plan, "visible_gpus", lambda: [Gpu("0", "small", gigabytes * 10**9)] * 2)
    engine = {"type": "embedded", "max_sequences": 4096, "max_sequence_len": 1024}
    found = _problems(tmp_path, model={"path": str(tmp_path / "model")}, inference={"engine": engine})
    words = (
        "inference.engine.max_sequences: 4096 x inference.engine.max_sequence_len 1024 are keys and values of 2.1 GB "
        "when all are in use, and the GPU has 1.0 GB; lower one of them"
    )
    assert found == ([] if fits else [words])


@pytest.mark.parametrize("name", ["borrowed", "Judge", "short", "weigh", "outer"])
def test_function_in_a_file_is_found_without_running_it(tmp_path: Path, name: str) -> None:
    """Whether it is defined, assigned or imported; the file raises if it is run."""
    (tmp_path / "mine.py").write_text(MINE)
    assert _problems(tmp_path, reward=_rewarded(f"{tmp_path}/mine.py:{name}")) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("{}/mine.py:shrot", "{}/mine.py has no function 'shrot', did you mean 'short'?"),
        ("{}/mine.py:inner", "{}/mine.py has no function 'inner'"),
        ("{}/none.py:f", "{}/none.py can't be read: No such file or directory"),
        ("{}/broken.py:f", "{}/broken.py is not Python: '(' was never closed (broken.py, line 1)"),
        ("package.module", "no built-in reward 'package.module'; built in are"),
        ("exact_macth", "no built-in reward 'exact_macth', did you mean 'exact_match'?"),
        ("package/module:f", "'package/module:f' must be a built-in name, package.module:function or file.py:function"),
        ("package.module:", "'package.module:' must be"),
    ],
)
def test_function_that_is_not_there(tmp_path: Path, path: str, problem: str) -> None:
    """Both keys that name functions say the same."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("f = (")
    path, problem = path.format(tmp_path), problem.format(tmp_path)
    (first, second) = _problems(tmp_path, reward=_rewarded(path), eval={"exact_match": path})
    assert first.startswith(f"reward.functions.0.path: {problem}")
    assert second.startswith(f"eval.exact_match: {problem}")


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("reward.steps.path", {"advantage": {"type": "process"}, "steps": {"path": "{}/mine.py:nothing"}}),
        ("reward.advantage.path", {"advantage": {"type": "custom", "path": "{}/mine.py:nothing"}}),
    ],
)
def test_functions_for_steps_and_advantages_are_looked_for_too(
    tmp_path: Path, key: str, section: dict[str, Any]
) -> None:
    """In the same way, without running their file."""
    (tmp_path / "mine.py").write_text(MINE)
    section = json.loads(json.dumps(section).replace("{}", str(tmp_path)))
    functions = {"functions": [{"path": "characters_in_place"}]}
    assert _problems(tmp_path, reward=functions | section) == [f"{key}: {tmp_path}/mine.py has no function 'nothing'"]


def test_the_function_of_a_custom_loss_is_looked_for_too(tmp_path: Path) -> None:
    """In the same way; one of a package is left to the trainer."""
    (tmp_path / "mine.py").write_text(MINE)

    def problems(path: str) -> list[str]:
        return _problems(tmp_path, trainer={"max_steps": 1, "loss": {"type": "custom", "path": path}})

    assert problems(f"{tmp_path}/mine.py:nothing") == [
        f"trainer.loss.path: {tmp_path}/mine.py has no function 'nothing'"
    ]
    assert problems("a.package:function") == []


def test_built_in_functions_need_their_kwargs(tmp_path: Path) -> None:
    """Those without a default; each group would fail for want of them."""
    needs = "reward.functions.0.kwargs: soft_overlong needs "
    assert _problems(tmp_path, reward=_rewarded("soft_overlong")) == [f"{needs}max_tokens, overlong_tokens"]
    assert _problems(tmp_path, reward=_rewarded("soft_overlong", max_tokens=9)) == [f"{needs}overlong_tokens"]
    assert _problems(tmp_path, reward=_rewarded("overlong", max_tokens=9, overlong_tokens=2)) == []
    environments = [{"type": "jsonl", "path": _rows(tmp_path / "rows.jsonl", {"prompt": "a"})}]
    sections = {"environments": environments, "eval": {"num_prompts": 0}}
    assert _problems(tmp_path, reward=_rewarded("length_penalty", max_tokens=9), **sections) == []


def test_a_function_of_trl_that_makes_one_is_refused_where_nothing_calls_it(tmp_path: Path) -> None:
    """In worker processes, and as another function than a reward; TRL need not be installed."""
    path = "trl.rewards:get_soft_overlong_punishment"
    arguments = {"max_completion_len": 9, "soft_punish_cache": 2}
    assert _problems(tmp_path, reward=_rewarded(path, **arguments)) == []
    words = f"{path} returns a function and is none itself; use soft_overlong_punishment"
    functions = [{"path": path, "python": "same", "kwargs": arguments}]
    assert _problems(tmp_path, reward={"functions": functions}) == [f"reward.functions.0.path: {words}"]
    steps = {"functions": [{"path": "characters_in_place"}], "steps": {"path": path}, "advantage": {"type": "process"}}
    assert f"reward.steps.path: {words}" in _problems(tmp_path, reward=steps)


def test_a_kernel_that_does_not_confine_files_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where programs of answers run."""
    for path, version, told in (("code_tests", 0, True), ("code_tests", 1, False), ("exact_match", -1, False)):
        monkeypatch.setattr("actors.ops.preflight.landlock_version", lambda version=version: version)
        environments = [{"type": "jsonl", "path": _rows(tmp_path / "rows.jsonl", {"prompt": "a", "tests": [],
                                                                                 "answer": "b"})}]  # fmt: skip
        sections = {"environments": environments, "eval": {"num_prompts": 0}, "reward": _rewarded(path)}
        config = check_tree(ring_config(tmp_path).model_dump() | sections)
        assert any("this kernel has no Landlock" in note for note in preflight(config)) is told


def test_function_that_only_its_actor_can_find_passes(tmp_path: Path) -> None:
    """Of a package nothing is imported, and what `import *` brings is not known."""
    (tmp_path / "mine.py").write_text("from other import *")
    assert _problems(tmp_path, reward=_rewarded("no_such.package:f")) == []
    assert _problems(tmp_path, reward=_rewarded(f"{tmp_path}/mine.py:anything")) == []


def test_all_bad_files_of_data_are_named(tmp_path: Path) -> None:
    """Missing, without the prompt column, and with a bad row, each with its key."""
    rows = _rows(tmp_path / "rows.jsonl", {"question": "a", "answer": "b"})
    bad = _rows(tmp_path / "bad.jsonl", {"prompt": "a", "answer": "b"}, {"prompt": [{"role": "user"}]})
    environments = [
        {"type": "jsonl", "name": "one", "path": f"{tmp_path}/none.jsonl", "eval_path": bad},
        {"type": "jsonl", "name": "two", "path": rows},
        {"type": "reverse_text"},
    ]
    problems = _problems(tmp_path, environments=environments)
    assert [re.split("; its| with `role`", problem)[0] for problem in problems] == [
        f"environments[].eval_path: {bad}, line 2: the prompt must be text, or a list of messages",
        f"environments[].path: {rows}, line 1: no column 'prompt' (prompt_column)",
        f"environments[].path: there is no file {tmp_path}/none.jsonl",
    ]


def test_the_first_rows_of_data_sets_are_looked_at(tmp_path: Path) -> None:
    """Files, columns and rows, as of JSON Lines; the hub is not asked, and nothing is written."""
    rows = _rows(tmp_path / "rows.jsonl", {"question": "a", "solution": "b"})
    packed = gzip.compress(Path(rows).read_bytes())
    (tmp_path / "rows.jsonl.gz").write_bytes(packed)
    source = {"type": "dataset", "path": f"{rows}.gz", "columns": {"prompt": "question", "answer": "solution"}}
    good = [source, source | {"name": "folder", "path": f"{tmp_path}/*.gz", "eval_split": "train[:1]"}]
    assert _problems(tmp_path, environments=good) == []
    bad = [
        source | {"name": "a", "path": f"{tmp_path}/none-*.parquet"},
        source | {"name": "b", "path": f"{tmp_path}/missing/*.csv"},
        source | {"name": "c", "eval_path": f"{tmp_path}/none.csv"},
        source | {"name": "d", "columns": {"prompt": "problem"}},
        source | {"name": "e", "columns": {"prompt": "question"}},
        {"type": "dataset", "name": "f", "path": "org/sums"},
    ]
    columns, lacks = "its columns are question, solution", f"{rows}.gz has; all rows have solution"
    assert _problems(tmp_path, environments=bad) == [
        f"environments[].path: there is no file {tmp_path}/none-*.parquet",
        f"environments[].path: {rows}.gz, line 1: no column 'problem' (columns.prompt); {columns}",
        f"reward.functions.0.path: characters_in_place needs a column 'answer', which not every row of {lacks}",
        f"environments[].path: there is no file {tmp_path}/missing",
        f"environments[].eval_path: there is no file {tmp_path}/none.csv",
    ]
    config = check_tree(ring_config(tmp_path).model_dump() | {"environments": bad[-1:]})
    notes = preflight(config)
    assert "environments[].path: org/sums is loaded from the hub at the start, and not checked before" in notes
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "rows.jsonl.gz"}


def test_a_preview_is_not_the_whole_data_set(tmp_path: Path) -> None:
    """Rows that can't be sent are counted among the rows that were read, and more rows may be sound."""
    rows = [{"prompt": "a", "answer": "b", "huge": 2**70}] * 100 + [{"prompt": "a", "answer": "b", "huge": 1}]
    environments = [{"type": "dataset", "path": _rows(tmp_path / "rows.jsonl", *rows)}]
    (problem,) = _problems(tmp_path, environments=environments)
    assert "100 of 100 rows" in problem
    few = [{"prompt": "a", "answer": "b", "huge": 2**70}] + [{"prompt": "a", "answer": "b", "huge": 1}] * 150
    environments = [{"type": "dataset", "path": _rows(tmp_path / "rows.jsonl", *few)}]
    config = check_tree(ring_config(tmp_path).model_dump() | {"environments": environments})
    assert any("1 of 100 rows" in note for note in preflight(config))


def test_packages_of_data_sets_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that brings them; a text file needs none."""
    monkeypatch.setattr("actors.ops.requirements.is_installed", lambda name: name not in ("pyarrow", "datasets"))
    monkeypatch.setattr("actors.ops.preflight.is_installed", lambda name: name not in ("pyarrow", "datasets"))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    rows = _rows(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "b"})
    environments = [
        {"type": "dataset", "name": name, "path": path}
        for name, path in (("a", f"{tmp_path}/rows.parquet"), ("b", "org/sums"), ("c", rows))
    ]
    assert _problems(tmp_path, environments=environments) == [
        "environments[].path: needs pyarrow, which is not installed; install grpo-actors[data]",
        "environments[].path: needs datasets, which is not installed; install grpo-actors[data]",
    ]


def test_built_in_functions_need_their_column_in_every_row(tmp_path: Path) -> None:
    """Else each group of that file would be dropped as poison, the evaluated ones without a word."""
    train = _rows(tmp_path / "train.jsonl", {"prompt": "a", "answer": "b"})
    held_out = _rows(tmp_path / "eval.jsonl", {"prompt": "a", "answer": "b", "n": 1}, {"prompt": "a", "n": 1})
    environments = [{"type": "jsonl", "path": train, "eval_path": held_out}]
    lacks = f"needs a column 'answer', which not every row of {held_out} has; all rows have n"
    assert _problems(tmp_path, environments=environments) == [
        f"reward.functions.0.path: characters_in_place {lacks}",
        f"eval.exact_match: exact_match {lacks}; name another function, or null to measure none",
    ]
    reward = _rewarded("characters_in_place", answer=["b"])
    assert _problems(tmp_path, environments=environments, reward=reward, eval={"exact_match": None}) == []
    assert _problems(tmp_path, environments=environments, eval={"num_prompts": 0}) == []


def test_model_directory_must_hold_a_model(tmp_path: Path) -> None:
    """A name on the hub is not asked for, and the fake engine loads none."""
    engine = {"engine": {"type": "embedded"}}
    assert _problems(tmp_path, model={"path": "org/model"}, inference=engine) == []
    assert _problems(tmp_path, model={"path": f"{tmp_path}/none"}) == []
    (problem,) = _problems(tmp_path, model={"path": f"{tmp_path}/none"}, inference=engine)
    assert problem.startswith(f"model.path: there is no folder {tmp_path}/none; ")
    (tmp_path / "config.json").touch()
    assert _problems(tmp_path, model={"path": str(tmp_path)}, inference=engine) == [
        f"model.path: {tmp_path} has no tokenizer.json"
    ]


def test_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is in the way of one; the other's place may not be written to."""
    (tmp_path / "file").touch()
    config = ring_config(tmp_path, weights={"directory": str(tmp_path / "file/weights")})
    with pytest.raises(ConfigError) as caught:
        preflight(config.model_copy(update={"output_dir": str(tmp_path / "file/out")}))
    assert caught.value.problems == [
        f"output_dir: {tmp_path}/file/out can't be created, since {tmp_path}/file is not a folder",
        f"weights.directory: {tmp_path}/file/weights can't be created, since {tmp_path}/file is not a folder",
    ]
    monkeypatch.setattr("os.access", lambda place, mode: mode == 0 and place == tmp_path)  # root may write anywhere
    assert _problems(tmp_path)[0] == f"output_dir: {tmp_path}/out can't be written to, since {tmp_path} is not writable"
    assert not (tmp_path / "out").exists()


def test_up_looks_before_it_starts_anything(tmp_path: Path) -> None:
    """Nothing is left behind by a run that can't begin."""
    with pytest.raises(ConfigError, match="no built-in reward"):
        supervise(ring_config(tmp_path, eval={"exact_match": "exact_macth"}))
    assert not (tmp_path / "out").exists()


def test_no_room_for_the_versions_that_a_run_keeps_is_said_before_it_starts(
    tmp_path: Path, model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weights.keep + 1 of them, counted from the model's files; what a killed run has left there counts as free."""
    model = {"path": str(model_folder("llama")), "dtype": "float32"}
    sections: dict[str, Any] = {"model": model, "inference": {"engine": {"type": "embedded"}}}
    config = check_tree(ring_config(tmp_path).model_dump() | sections)
    size = 4 * sum(math.prod(shape) for shape in model_shapes(config.model).values())
    disk = shutil.disk_usage(tmp_path)
    full = type(disk)(disk.total, disk.used, 4 * size - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda place: full)
    (problem,) = _problems(tmp_path, **sections)
    assert problem.startswith(f"weights.directory: {tmp_path}/weights has 0.00 GB free, and 4 versions of 0.00 GB each")
    assert problem in preflight(config, starts=False)
    left = weights_folder(config)
    left.take()
    (left.path / "1.3").mkdir()
    (left.path / "1.3" / "model.safetensors").write_bytes(b"x")
    assert _problems(tmp_path, **sections) == []
    assert _problems(tmp_path, **sections | {"weights": {"channel": "rendezvous"}}) == []


def test_a_folder_of_the_runs_name_that_is_not_its_own_is_refused_before_it_starts(tmp_path: Path) -> None:
    """By the same words as by the trainer."""
    folder = weights_folder(ring_config(tmp_path))
    (folder.path / "1.0").mkdir(parents=True)
    (problem,) = _problems(tmp_path)
    assert problem == folder.problem()
    assert "so it is not this run's; set another weights.directory" in problem


def test_a_function_with_another_interpreter_is_looked_for_and_not_read(tmp_path: Path) -> None:
    """Its syntax may be that of another Python. The worker checks the rest, which a note says."""
    (tmp_path / "newer.py").write_text("this is no syntax of ours\n")
    sections = {"functions": [{"path": f"{tmp_path}/newer.py:f", "python": "python3"}]}
    config = check_tree(ring_config(tmp_path).model_dump() | {"reward": sections})
    notes = [note for note in preflight(config) if "newer.py" in note]
    assert len(notes) == 1
    assert "is loaded by python3 at the start, and not checked before" in notes[0]
    bad = {"functions": [{"path": f"{tmp_path}/none.py:f", "python": "/no/such/python"}]}
    problems = _problems(tmp_path, reward=bad)
    assert f"reward.functions.0.path: there is no file {tmp_path}/none.py" in problems
    assert any(problem.startswith("reward.functions.0.python: there is no program") for problem in problems)


def test_images_at_urls_are_not_looked_at_before_the_start(tmp_path: Path) -> None:
    """A note names the origins, of supervised rows too; a URL of another origin is a problem. Nothing is written."""

    def rows_at(url: str) -> dict[str, Any]:
        prompt = [{"role": "user", "content": [{"type": "image", "url": url}]}]
        path = _rows(tmp_path / "rows.jsonl", {"prompt": prompt, "answer": "b", "completion": "b"})
        images = {"origins": ["https://data.example.com:443/"]}
        sft = {"path": path, "batch_size": 1, "mu_peak": 0.5, "mu_valley": 0.5, "mu_warmup_steps": 0}
        return {
            "environments": [
                {"type": "jsonl", "path": path, "images": images},
                {"type": "dataset", "path": path, "images": images},
            ],
            "trainer": {"max_steps": 1, "sft": sft | {"mu_decay_steps": 0, "images": images}},
            "inference": {"engine": {"type": "embedded"}},
            "model": {"path": "some/model"},
        }

    config = check_tree(ring_config(tmp_path).model_dump() | rows_at("https://data.example.com/a.png"))
    words = "origins: images at https://data.example.com are downloaded at the start, and not checked before"
    notes = [note for note in preflight(config, starts=False) if "downloaded" in note]
    sections = ["environments[].images", "environments[].images", "trainer.sft.images"]
    assert notes == [f"{section}.{words}" for section in sections]
    problems = _problems(tmp_path, **rows_at("https://example.com/a.png"))
    assert [problem.partition(".origins")[0].rpartition(" ")[2] for problem in problems] == [
        "trainer.sft.images",
        "environments[].images",
        "environments[].images",
    ]
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl"}
