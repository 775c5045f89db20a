"""Surogate files with traps: keys that it does not read, variables, an engine of its own, two sizes of a step."""

from pathlib import Path

import pytest

from actors.imports.job import Import, Options
from actors.imports.surogate import read
from schemas.errors import ConfigError
from tests.actors.imports.checks import check_values, check_verdicts

TRAIN = "model: Qwen/Qwen3-0.6B\nlearning_rate: 1e-5\nsequence_len: 2048\n"
ORCH = "env: [{id: gsm8k}]\nbatch_size: 64\nrollouts_per_example: 8\nmax_steps: 5\nsampling: {max_tokens: 512}\n"


def imported(tmp_path: Path, train: str = TRAIN, orch: str = ORCH, infer: str = "") -> Import:
    """Return the import of the three files."""
    files = []
    for name, text in (("train", train), ("orch", orch), ("infer", infer)):
        if text:
            files.append(tmp_path / f"{name}.yaml")
            files[-1].write_text(text)
    return read(files, [], Options())


def test_keys_of_sampling_that_are_not_read_are_not_taken(tmp_path: Path) -> None:
    """GRPOSamplingConfig reads top_p, and neither top_k nor min_p; extra_body carries them."""
    orch = ORCH.replace("{max_tokens: 512}", "{max_tokens: 512, top_p: 0.9, top_k: 20, min_p: 0.1}")
    job = imported(tmp_path, orch=orch)
    check_values(job, {"rollout.top_p": 0.9, "rollout.top_k": 0, "rollout.min_p": 0.0})
    check_verdicts(job, {"orch.sampling.top_p": "renamed", "orch.sampling.top_k": "irrelevant",
                         "orch.sampling.min_p": "irrelevant"})  # fmt: skip
    carried = imported(tmp_path, orch=ORCH.replace("{max_tokens: 512}", "{max_tokens: 512, extra_body: {top_k: 20}}"))
    check_values(carried, {"rollout.top_k": 20})


def test_keys_of_its_own_engine_are_no_arguments_of_vllm(tmp_path: Path) -> None:
    """GRPOInferenceConfig has a plan of memory for its own engine; what it does not read, vLLM would refuse."""
    infer = (
        "model: Qwen/Qwen3-0.6B\nmax_model_len: 4096\nmax_num_seqs: 64\ngpu_layers: all\ndecode_prefill_chunk: 512\n"
        "gpu_memory_utilisation: 0.5\n"
    )
    job = imported(tmp_path, infer=infer)
    check_values(job, {"inference.engine.extra_args": ["--max-num-seqs", "64"]})
    check_verdicts(job, {"infer.gpu_layers": "irrelevant", "infer.decode_prefill_chunk": "irrelevant",
                         "infer.gpu_memory_utilisation": "refused"})  # fmt: skip
    entry = next(entry for entry in job.report.entries if entry.key == "infer.gpu_memory_utilisation")
    assert "did you mean infer.gpu_memory_utilization?" in entry.text


def test_evaluations_have_their_own_truncation_and_length(tmp_path: Path) -> None:
    """GRPOEvalSamplingConfig: temperature, top_p, top_k, max_tokens; a row has room for a prompt."""
    sampling = "sampling: {temperature: 0.6, top_p: 0.8, top_k: 30, max_tokens: 4096, min_tokens: 2}"
    job = imported(tmp_path, orch=f"{ORCH}eval: {{interval: 5, env: [{{id: gsm8k}}], {sampling}}}\n")
    check_values(job, {"eval.temperature": 0.6, "eval.top_p": 0.8, "eval.top_k": 30, "eval.max_tokens": 2047})
    check_verdicts(job, {"orch.eval.sampling.top_p": "converted", "orch.eval.sampling.max_tokens": "converted",
                         "orch.eval.sampling.min_tokens": "refused"})  # fmt: skip


def test_a_step_of_tokens_has_no_number_of_completions(tmp_path: Path) -> None:
    """Exactly one of batch_size and token_batch_size: the other must be null, since batch_size is 128 by default."""
    orch = ORCH.replace("batch_size: 64", "batch_size: null\ntoken_batch_size: 65536\nmax_inflight_rollouts: 256")
    job = imported(tmp_path, orch=orch)
    assert {question.target for question in job.report.questions} == {"packer.groups_per_step"}
    assert job.run.get("rollout.max_concurrent_groups") == 32
    check_verdicts(job, {"orch.batch_size": "irrelevant", "orch.token_batch_size": "refused",
                         "orch.max_inflight_rollouts": "converted"})  # fmt: skip
    with pytest.raises(ConfigError, match=r"orch\.batch_size: is 128 by default"):
        imported(tmp_path, orch=ORCH.replace("batch_size: 64", "token_batch_size: 65536"))
    with pytest.raises(ConfigError, match=r"orch\.batch_size: set either batch_size or token_batch_size"):
        imported(tmp_path, orch=f"{ORCH}token_batch_size: 65536\n")


def test_variables_of_the_environment_are_asked_for_by_name(tmp_path: Path) -> None:
    """Surogate expands ${NAME}; a path with the sign in it would be another one."""
    train = TRAIN.replace("Qwen/Qwen3-0.6B", "${MODELS}/Qwen3-0.6B") + "output_dir: ${HOME}/out\n"
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, train=train)
    assert [problem.partition(",")[0] for problem in error.value.problems] == [
        "train.model: needs the environment variable MODELS",
        "train.output_dir: needs the environment variable HOME",
    ]


def test_a_key_that_stands_twice_is_noted(tmp_path: Path) -> None:
    """PyYAML takes the last one without a word; texts become numbers."""
    job = imported(tmp_path, train=f"{TRAIN}learning_rate: '2e-5'\n")
    check_values(job, {"trainer.learning_rate": 2e-5})
    note = "train.yaml: learning_rate (lines 2 and 4) stands twice in a map; the last one counts, as there"
    assert note in job.report.notes


def test_prompts_in_the_file_are_refused_with_a_way(tmp_path: Path) -> None:
    """grpo-native has prompts in its file; here rows stand in a file of their own."""
    native = f"{TRAIN}max_steps: 3\ngeneration: {{num_completions: 4}}\nreward: {{mode: callback, prompts: [a, b]}}\n"
    job = imported(tmp_path, train=native, orch="")
    entry = next(entry for entry in job.report.entries if entry.key == "train.reward.prompts")
    assert "--data FILE" in entry.text
