"""Arguments of GRPOTrainer other than names and functions: objects that are taken, and those that are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments

from actors import GRPOConfig, GRPOTrainer
from actors.api.translation import Program, translated
from schemas.config import check_tree
from schemas.errors import ConfigError
from tests.conftest import ModelFolder

ROWS = [{"prompt": "ab=", "answer": "ba"}, {"prompt": "cd=", "answer": "dc"}]


def ones(completions: list[str], **columns: Any) -> list[float]:
    """Return the same reward for all."""
    return [1.0] * len(completions)


def _trainer(tmp_path: Path, model: Any, reward_funcs: Any = ones, **arguments: Any) -> GRPOTrainer:
    given = GRPOConfig(output_dir=tmp_path / "out", max_steps=1, bf16=False, use_cpu=True)
    return GRPOTrainer(model=model, reward_funcs=reward_funcs, args=given, train_dataset=ROWS, **arguments)


@dataclass
class TheirConfig(TrainingArguments):
    """Arguments as TRL has them, as far as one is computed from others."""

    num_generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    beta: float = 0.0

    def __post_init__(self) -> None:
        """Compute what is not given."""
        super().__post_init__()
        if self.generation_batch_size is not None:
            self.steps_per_generation = self.generation_batch_size // self.per_device_train_batch_size
        elif self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        self.generation_batch_size = self.per_device_train_batch_size * (self.steps_per_generation or 1)


def test_the_arguments_of_trl_are_those_that_were_given() -> None:
    """Defaults and computed values count as not given; a given size of the generation counts."""

    def given(**arguments: Any) -> dict[str, Any]:
        found = GRPOConfig.of(TheirConfig(output_dir="out", use_cpu=True, report_to="none", **arguments)).given
        return {name: value for name, value in found.items() if name in GRPOConfig(**arguments).given}

    for arguments in (
        {"gradient_accumulation_steps": 4, "beta": 0.04},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 8},
        {"learning_rate": 1e-3, "num_generations": 4, "run_name": "mine"},
    ):
        assert given(**arguments) == {"output_dir": "out"} | arguments
    assert "steps_per_generation" not in GRPOConfig.of(TheirConfig(output_dir="out", use_cpu=True)).given
    large = GRPOConfig.of(TheirConfig(output_dir="out", use_cpu=True, generation_batch_size=32))
    assert large.given["steps_per_generation"] == 4


@pytest.mark.parametrize(
    ("lora", "keys"),
    [
        (
            lambda: LoraConfig(
                r=4, lora_alpha=12, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            {"rank": 4, "alpha": 12.0, "dropout": 0.1, "target_modules": "all-linear"},
        ),
        # peft's own table for the family of the model
        (lambda: LoraConfig(), {"rank": 8, "alpha": 8.0, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}),
        (
            lambda: LoraConfig(target_modules=["o_proj"], use_rslora=True),
            {"target_modules": ["o_proj"], "rslora": True},
        ),
    ],
    ids=["values", "defaults", "form"],
)
def test_a_configuration_of_peft_becomes_keys_of_the_adapter(
    model_folder: ModelFolder, lora: Callable[[], LoraConfig], keys: dict[str, Any]
) -> None:
    """Values that differ from peft's defaults, and those defaults."""
    arguments = GRPOConfig(output_dir="out", max_steps=1, bf16=False, use_cpu=True)
    program = Program(
        model=str(model_folder()),
        rewards=["mine:ones"],
        arguments=arguments,
        rows=Path("rows.jsonl"),
        num_rows=8,
        peft_config=lora(),
    )
    tree, _ = translated(program)
    adapter = check_tree(tree).model.lora
    assert adapter is not None
    assert {name: getattr(adapter, name) for name in keys} == keys


def test_a_model_as_an_object_needs_its_tokenizer_and_no_adapters(tmp_path: Path, model_folder: ModelFolder) -> None:
    """Nothing would tell how its texts become tokens, and adapters of it would be trained under another name."""
    model = AutoModelForCausalLM.from_pretrained(model_folder())
    with pytest.raises(ConfigError, match="processing_class: a model given as an object needs its tokenizer"):
        _trainer(tmp_path, model)
    with pytest.raises(ConfigError, match=r"model: PeftModel.* adapters are given as peft_config"):
        _trainer(tmp_path, get_peft_model(model, LoraConfig(target_modules=["q_proj"])))


def test_what_another_process_must_import_is_refused_inside_a_function(
    tmp_path: Path, model_folder: ModelFolder
) -> None:
    """With its name, before anything starts."""

    def add(a: int) -> int:
        """Add."""
        return a

    class World:
        def reset(self) -> str:
            return ""

    for arguments, name in (({"tools": [add]}, "tools: add"), ({"environment_factory": World}, "environment_factory")):
        with pytest.raises(ConfigError, match=f"{name}.* can't import it; define it at the top level of a file"):
            _trainer(tmp_path, str(model_folder()), **arguments)


class Game:
    """An environment that another process can import."""

    def reset(self, **row: Any) -> str:
        """Begin."""
        return "Play."

    def step(self, answer: str) -> tuple[str, float, bool]:
        """End."""
        return "", 1.0, True


def test_a_reward_of_environments_themselves_is_refused(tmp_path: Path, model_folder: ModelFolder) -> None:
    """TRL passes the instances; here they are in other processes."""

    def won(environments: list[Game], **columns: Any) -> list[float]:
        return [0.0] * len(environments)

    with pytest.raises(ConfigError, match=r"reward_funcs: won takes environments.*get_reward"):
        _trainer(tmp_path, str(model_folder()), won, environment_factory=Game)
