"""`actors check` finds without torch what `actors up` finds 10 to 20 s after its start."""

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.ops import fit
from actors.ops.functions import definition_of, signature_findings
from actors.ops.preflight import image_bytes, preflight
from actors.ops.sizes import sizes
from actors.process import devices
from schemas import limits
from schemas.config import RunConfig, check_tree, dump_config
from schemas.errors import ConfigError
from tests.conftest import ModelFolder
from tests.images import png
from tests.ring.harness import ring_config

REWARDS = """
LIMIT = 3
def plain(prompts, completions, answer, **columns): ...
def narrow(prompts, completions): ...
def stateful(prompts, completions, trainer_state, **columns): ...
def lacking(prompts, completions, level, *, factor, **columns): ...
"""


@pytest.fixture
def run(tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a run of a tiny model on these rows; sections are merged into it. There is time for all rows."""
    monkeypatch.setattr(fit, "PROMPT_SECONDS", 120.0)

    def make(*rows: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows or ({"prompt": "abc", "answer": "c"},)))
        (tmp_path / "my_rewards.py").write_text(REWARDS)
        tree = ring_config(tmp_path).model_dump() | {
            "model": {"path": str(model_folder()), "dtype": "float32"},
            "environments": [{"type": "jsonl", "path": str(data)}],
            "inference": {"engine": {"type": "embedded", "max_sequence_len": 64}},
            "packer": {"groups_per_step": 1, "sequence_len": 64},
            "eval": {"num_prompts": 0},
        }
        for name, section in sections.items():
            tree[name] = tree[name] | section
        return check_tree(tree)

    return make


def problems(config: RunConfig) -> list[str]:
    """What `check` refuses."""
    try:
        preflight(config, starts=False)
    except ConfigError as error:
        return error.problems
    return []


def test_a_run_that_fits_is_good(run: Any) -> None:
    """Neither problem nor note."""
    assert preflight(run(), starts=False) == []


@pytest.fixture
def seeing(run: Any, tmp_path: Path, model_folder: ModelFolder) -> Any:
    """Make a run of a tiny model that sees images; one of its two rows has an image of 40 × 16 pixels, 10 tokens."""
    (tmp_path / "wide.png").write_bytes(png(16, 40))
    parts = [{"type": "image", "path": "wide.png"}, {"type": "text", "text": "a"}]
    rows = [{"prompt": [{"role": "user", "content": content}], "answer": "c"} for content in (parts, "a")]

    def make(family: str = "qwen3_vl", **sections: dict[str, Any]) -> RunConfig:
        model = {"path": str(model_folder(family)), "chat_template": "{{ messages[0].role }}"}
        return run(*rows, **sections | {"model": model | sections.get("model", {})})

    return make


def test_a_run_with_images_that_fits_is_good(seeing: Any) -> None:
    """For each family, and with an adapter."""
    assert preflight(seeing(), starts=False) == []
    assert preflight(seeing("qwen2_5_vl", model={"lora": {"rank": 4}}), starts=False) == []
    served = {"inference": {"engine": {"type": "sglang", "urls": ["http://127.0.0.1:1"]}}}
    assert preflight(seeing(**served), starts=False) == []


def test_rows_with_images_are_refused_before_the_start(seeing: Any, tmp_path: Path) -> None:
    """By file and number of rows, and with the key to change."""
    found = [
        problem for problem in problems(seeing(inference={"engine": {"type": "fake"}})) if "have images" in problem
    ]
    where = f"environments[].path: 1 of 2 rows of {tmp_path / 'rows.jsonl'} have images"
    assert [one.startswith(f"{where}; inference.engine.type fake takes no images; take embedded") for one in found] == [
        True
    ]


def test_a_model_of_text_alone_is_refused_for_rows_with_images(seeing: Any) -> None:
    """It has no image processor; runs of it on text ask for none."""
    (problem,) = problems(seeing("qwen3"))
    assert "takes no images: it has neither preprocessor_config.json nor processor_config.json" in problem


def test_tokens_of_images_count_in_prompts(seeing: Any) -> None:
    """Texts of messages are counted without a template; the row with the image has ten tokens all the same."""
    (note,) = preflight(seeing(rollout={"max_tokens": 55}), starts=False)
    assert "1 of 2 prompts of" in note
    assert "have more than 9 tokens (the longest 10)" in note


def test_sizes_count_the_images_of_the_rows(seeing: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A group has the images of its example once, a batch those of its groups; two rows have half an image each."""
    config, half = seeing(packer={"groups_per_step": 5}), len(png(16, 40)) / 2
    assert image_bytes(config) == half
    plain, seen = ({size.name: size.num_bytes for size in sizes(config, images)} for images in (0.0, half))
    more = {name: seen[name] - plain[name] for name in plain}
    assert (more["group"], more["batch of a rank"]) == pytest.approx((half, 5 * half))
    assert more["network, per step"] == pytest.approx(15 * half)
    assert more["largest array of a group"] == 0
    (tmp_path / "run.yaml").write_text(dump_config(config))
    main(["check", str(tmp_path / "run.yaml"), "--sizes"])
    assert f", with {half:,.4g} B of images in a group; without columns" in capsys.readouterr().out


def test_images_of_a_step_that_no_message_holds_are_refused(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean of the rows that were read."""
    num_bytes = len(png(16, 40))
    monkeypatch.setattr(fit, "MESSAGE_BYTES", num_bytes)
    assert problems(seeing(packer={"groups_per_step": 2})) == []
    (problem,) = problems(seeing(packer={"groups_per_step": 3}))
    assert problem.startswith("packer.groups_per_step: the images of 3 rows of ")


def test_messages_need_a_chat_template(run: Any) -> None:
    """The tiny model has none; the row is named."""
    (problem,) = problems(run({"prompt": [{"role": "user", "content": "a"}], "answer": "c"}))
    assert "has no chat template, but the prompt in row 1 of " in problem


def test_prompts_without_room_are_counted(run: Any) -> None:
    """64 tokens less 12 new ones leave 52: all too long ends a run, some are only said."""
    short, long = {"prompt": "abc", "answer": "c"}, {"prompt": "a" * 60, "answer": "c"}
    (problem,) = problems(run(long))
    assert "1 of 1 prompts of" in problem
    assert "have more than 52 tokens (the longest 61)" in problem
    (note,) = preflight(run(short, long), starts=False)
    assert "1 of 2 prompts of" in note


def test_prompts_are_no_problem_while_some_have_not_been_looked_at(run: Any, monkeypatch: Any) -> None:
    """A file may be sorted, longest first: there is time for its first row alone."""
    monkeypatch.setattr(fit, "PROMPT_SECONDS", 0.0)
    short, long = {"prompt": "abc", "answer": "c"}, {"prompt": "a" * 60, "answer": "c"}
    (note,) = preflight(run(long, short), starts=False)
    assert "1 of the first 1 prompts of" in note
    (problem,) = problems(run(long))
    assert "1 of 1 prompts of" in problem


def scaled(run: Any, tmp_path: Path, rope: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Make a run of the tiny model with 96 positions, and with this scaling of them."""
    config: RunConfig = run()
    model = shutil.copytree(config.model.path, tmp_path / "scaled")
    tree = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(tree | rope))
    long = {"rollout": {"max_tokens": 150}, "packer": {"sequence_len": 256}}
    scaled_run: RunConfig = run(**long, model={"path": str(model)}, **sections)
    return scaled_run


YARN = {"factor": 4.0, "original_max_position_embeddings": 96}


@pytest.mark.parametrize(
    "rope", [{"rope_scaling": YARN | {"type": "yarn"}}, {"rope_parameters": YARN | {"rope_type": "yarn"}}]
)
@pytest.mark.parametrize(
    "engine", [{"type": "vllm", "urls": ["http://h:1"]}, {"type": "embedded", "max_sequence_len": 256}]
)
def test_a_model_with_scaled_positions_has_as_many_as_its_scaling_gives(
    run: Any, tmp_path: Path, rope: dict[str, Any], engine: dict[str, Any]
) -> None:
    """96 positions × 4 have room for 150 new tokens, in the names of transformers 4 and 5."""
    assert preflight(scaled(run, tmp_path, rope, inference={"engine": engine}), starts=False) == []


def test_completions_beyond_the_models_positions_are_a_note_where_a_server_samples(run: Any, tmp_path: Path) -> None:
    """The server may have been told to go beyond them; the embedded engine refuses such requests."""
    vllm = {"engine": {"type": "vllm", "urls": ["http://h:1"]}}
    (note,) = preflight(scaled(run, tmp_path, {}, inference=vllm), starts=False)
    assert note.startswith("rollout.max_tokens: 150 leaves no room for a prompt in the 96 tokens that ")


def test_an_engine_longer_than_the_model_is_said(run: Any) -> None:
    """The tiny model has 96 positions."""
    engine = {"engine": {"type": "embedded", "max_sequence_len": 128}}
    (note,) = preflight(run(inference=engine), starts=False)
    assert note.startswith("inference.engine.max_sequence_len: 128 is more than the 96 tokens that ")
    (problem,) = problems(run(inference=engine, rollout={"max_tokens": 100}, packer={"sequence_len": 128}))
    assert problem.startswith("rollout.max_tokens: 100 leaves no room for a prompt in the 96 tokens that ")


def test_adapters_for_modules_that_are_not_there_are_refused(run: Any) -> None:
    """By the headers of the model's files; a list of which one exists is a note."""
    (problem,) = problems(run(model={"lora": {"target_modules": ["query", "value"]}}))
    assert problem.startswith("model.lora.target_modules: the model has no module query, value; it has ")
    assert "q_proj" in problem
    (note,) = preflight(run(model={"lora": {"target_modules": ["q_proj", "value"]}}), starts=False)
    assert "no module value" in note


@pytest.mark.parametrize(
    ("key", "size", "expected"),
    [
        ("context_parallel", 1, []),
        ("context_parallel", 2, []),
        ("context_parallel", 4, []),
        ("context_parallel", 3, ["set 1, 2 or 4"]),
        ("context_parallel", 8, ["set 1, 2 or 4"]),
        ("tensor_parallel", 2, []),
        ("tensor_parallel", 4, ["set 1 or 2"]),  # two heads of keys
    ],
)
def test_ranks_that_can_not_divide_the_heads_are_refused(run: Any, key: str, size: int, expected: list[str]) -> None:
    """By config.json alone, before any process starts."""
    found = problems(run(trainer={"num_ranks": size, "sharding": "fsdp", key: size}))
    assert [problem.rpartition("; ")[2] for problem in found] == expected


@pytest.mark.parametrize(
    ("family", "trainer", "expected"),
    [
        ("qwen3", {"tensor_parallel": 2}, ""),
        ("qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}, ""),
        ("deepseek_v3", {"tensor_parallel": 2}, "tensor_parallel: transformers has no plan that cuts DeepseekV3Att"),
        ("qwen3", {"expert_parallel": 2}, "expert_parallel: transformers has no plan that sends tokens to the experts"),
        ("qwen3_moe", {"expert_parallel": 3}, "expert_parallel: 3 ranks can't divide the 4 experts of a layer"),
    ],
)
def test_weights_and_experts_that_can_not_be_divided_are_refused(
    run: Any, model_folder: ModelFolder, family: str, trainer: dict[str, int], expected: str
) -> None:
    """By the model's shapes and transformers' plans, before any process starts."""
    trainer = trainer | {"num_ranks": max(trainer.values()), "sharding": "fsdp"}
    found = problems(run(model={"path": str(model_folder(family))}, trainer=trainer))
    assert [problem.removeprefix("trainer.")[: len(expected)] for problem in found] == ([expected] if expected else [])


def test_adapters_on_experts_that_are_divided_are_refused(run: Any, model_folder: ModelFolder) -> None:
    """Before any process starts."""
    path, trainer = str(model_folder("qwen3_moe")), {"expert_parallel": 2, "num_ranks": 2, "sharding": "fsdp"}
    assert problems(run(model={"path": path, "lora": {"target_modules": ["q_proj"]}}, trainer=trainer)) == []
    (problem,) = problems(run(model={"path": path, "lora": {"target_modules": "all-linear"}}, trainer=trainer))
    assert problem.startswith("trainer.expert_parallel: experts with adapters are not divided; ")


def test_a_column_with_the_name_of_an_argument_is_refused(run: Any) -> None:
    """Functions receive what was sampled under it."""
    (problem,) = problems(run({"prompt": "a", "answer": "b", "completions": "c"}))
    assert "has a column 'completions'" in problem


def test_rows_that_no_receiver_would_take_are_named_with_column_and_bound(run: Any) -> None:
    """A run in which they are more than may be dropped is refused; a few of them are only said."""
    good = {"prompt": "abc", "answer": "c"}
    bad = good | {"ids": list(range(limits.LIST_ITEMS + 1))}
    words = f"rows of .* line 1, column 'ids': a list of 8001 items, and {limits.LIST_ITEMS} are the most that travel"
    (problem,) = problems(run(bad))
    assert re.search(f"environments.*: 1 of 1 {words}", problem)
    (note,) = preflight(run(bad, good, good), starts=False)
    assert re.search(f"environments.*: 1 of 3 {words}", note)
    chat = {"prompt": [{"role": "user", "content": "a"}] * 8001, "answer": "c"}
    assert "line 1, the prompt: a list of 8001 items" in problems(run(chat))[0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("plain", None),
        ("LIMIT", "LIMIT is not a function"),
        ("narrow", "narrow does not take 'answer'; add **columns to its arguments"),
        ("stateful", None),
        ("lacking", "lacking needs 'factor', and the data has no such column; all rows have answer"),
    ],
)
def test_a_functions_arguments_are_held_against_the_columns(
    run: Any, tmp_path: Path, function: str, words: str
) -> None:
    """Without running the file."""
    found = problems(run(reward={"functions": [{"path": f"{tmp_path}/my_rewards.py:{function}"}]}))
    assert bool(found) == bool(words)
    assert not words or words in found[0]


def test_kwargs_and_defaults_count_as_given() -> None:
    """A keyword from the configuration, one with a default, and one that is not there."""
    tree = ast.parse("def f(prompts, completions, a, b=1, *, c, d=2, **rest): ...")
    found = signature_findings(definition_of(tree, "f"), "f", {"answer"}, {"a"}, "key")
    assert [finding.words.split(",")[0] for finding in found] == ["key: f needs 'c'"]


def test_a_gpu_that_is_not_there_is_a_note_for_check_and_a_problem_for_up(run: Any, monkeypatch: Any) -> None:
    """A configuration is as good on another machine."""
    monkeypatch.setattr(devices, "GPU_DEVICES", ("no-such-device",))
    config = run(model={"device": "cuda"})
    assert preflight(config, starts=False) == [
        "model.device: cuda, but this machine has no GPU (/dev/nvidia*); use cpu or auto"
    ]
    with pytest.raises(ConfigError, match=r"model.device: cuda"):
        preflight(config)


@pytest.mark.parametrize("device", ["nvidia0", "nvhost-gpu", "nvmap"])
def test_a_gpu_is_found_by_its_device_file(run: Any, monkeypatch: Any, tmp_path: Path, device: str) -> None:
    """A Jetson has no `nvidia0`, and its GPU works."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    monkeypatch.setattr(devices, "DEVICES", tmp_path / "dev")
    assert not [words for words in preflight(run(model={"device": "cuda"}), starts=False) if "no GPU" in words]


def test_a_name_that_is_no_folder_is_said_to_be_one_of_the_hub(run: Any) -> None:
    """`qwen22` may be a slip; `organisation/model` is meant."""
    (note,) = preflight(run(model={"path": "qwen22"}), starts=False)
    assert note.startswith("model.path: there is no folder qwen22 next to the configuration file")
    assert preflight(run(model={"path": "Qwen/Qwen2.5-0.5B"}), starts=False) == []


def test_fewer_rows_than_groups_of_a_step_are_said(run: Any) -> None:
    """Two rows for eight groups."""
    row = {"prompt": "abc", "answer": "c"}
    (note,) = preflight(run(row, row, packer={"groups_per_step": 8}), starts=False)
    assert note.startswith("packer.groups_per_step: 8, but ")


def test_vllm_that_is_not_installed_is_found(run: Any, monkeypatch: Any) -> None:
    """Unless servers are there already, or another Python has it."""
    monkeypatch.setattr("actors.ops.requirements.is_installed", lambda name: False)
    (note,) = preflight(run(inference={"engine": {"type": "vllm"}}), starts=False)
    assert note.startswith(
        "inference.engine.type: vllm is not installed here; a run needs it, install grpo-actors[vllm]"
    )
    attached = {"engine": {"type": "vllm", "urls": ["http://h:1"]}}
    assert preflight(run(inference=attached), starts=False) == []


def test_an_expression_that_names_no_module_is_told_before_the_start(run: Any) -> None:
    """Whole names are compared, so a part of one is no match."""
    (problem,) = problems(run(model={"lora": {"target_modules": "q_proj"}}))
    assert problem.startswith("model.lora.target_modules: no module's name matches q_proj, e.g. ")
    assert problems(run(model={"lora": {"target_modules": r".*\.q_proj"}})) == []


@pytest.mark.parametrize(("kind", "words"), [("drop", "are left out"), ("truncate_left", "are cut")])
def test_prompts_above_their_own_limit_are_counted(run: Any, kind: str, words: str) -> None:
    """A note; an error only if every prompt is left out."""
    rows = [{"prompt": letters, "answer": "c"} for letters in ("abc", "abcdefgh", "abcdefghi")]
    config = run(*rows)
    [one] = config.environments

    def limited(limit: int) -> RunConfig:
        changed = one.model_copy(update={"max_prompt_tokens": limit, "long_prompts": kind})
        return config.model_copy(update={"environments": [changed]})

    told = preflight(limited(5), starts=False)
    assert any("2 of 3 prompts" in note and words in note and "the longest 10" in note for note in told), told
    found = problems(limited(2))
    assert [words in problem for problem in found] == ([True] if kind == "drop" else [])
