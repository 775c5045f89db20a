"""From prompts to token ids: texts without torch, messages through the model's chat template."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.datasets.base import Example
from actors.datasets.prompts import Prompts
from actors.engines.tokenizing import Tokenizing
from actors.models.loading import tokenizer_files
from actors.models.tokenizer import Tokenizer, eos_ids
from actors.rollout.model_chat import chat_of
from schemas.config.data import JsonlConfig
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from tests.conftest import ModelFolder

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def model_config(folder: Path) -> ModelConfig:
    """Configuration of a model directory."""
    return ModelConfig(path=str(folder))


@pytest.fixture
def chat_folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A tokenizer with a chat template that its vocabulary can write."""
    (tmp_path / "tokenizer.json").write_text((model_folder() / "tokenizer.json").read_text())
    settings = json.loads((model_folder() / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (tmp_path / "config.json").write_text((model_folder() / "config.json").read_text())
    return tmp_path


def test_a_text_is_encoded_with_special_tokens_and_decoded_without(model_folder: ModelFolder) -> None:
    """`<bos>` is 1, letters start at 4."""
    tokenizer = Tokenizer(model_config(model_folder()))
    assert tokenizer.encode("abz=") == [1, 4, 5, 29, 3]
    assert tokenizer.decode([1, 4, 5, 2]) == "ab"


def test_messages_go_through_the_chat_template(chat_folder: Path) -> None:
    """Rendered with the opening of the answer; what the template writes is all, no second `<bos>`."""
    tokenizer = Tokenizer(model_config(chat_folder))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.encode(messages)) == "u=hia="
    assert tokenizer.encode(messages)[0] == tokenizer.encode("u")[1]


def test_messages_without_a_template_are_refused_by_key(model_folder: ModelFolder) -> None:
    """The message names the model and what to do."""
    tokenizer = Tokenizer(model_config(model_folder()))
    with pytest.raises(ConfigError, match=r"model\.path: .* has no chat template.*environments\[\]\.chat: false"):
        tokenizer.encode([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, {7, 8}),
        ({"eos_token_id": 7}, {}, {7}),
        ({}, {"eos_token_id": 2}, {2}),
        (None, {"eos_token_id": 2}, {2}),
    ],
)
def test_end_of_sequence_is_the_generation_configs_else_the_configs(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], ids: set[int]
) -> None:
    """One id or several."""
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_ids(model_config(tmp_path)) == ids


def test_a_model_that_names_no_end_or_lacks_a_file_is_refused_by_key(tmp_path: Path) -> None:
    """Both say which file of which model."""
    with pytest.raises(ConfigError, match=r"model\.path: .* has no tokenizer\.json"):
        Tokenizer(model_config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path: .* names no eos_token_id"):
        eos_ids(model_config(tmp_path))


@pytest.mark.slow
def test_texts_need_no_torch(model_folder: ModelFolder) -> None:
    """A rollout actor that samples texts never loads it."""
    code = (
        "import sys; from actors.models.tokenizer import Tokenizer; from schemas.config.model import ModelConfig; "
        f"print(Tokenizer(ModelConfig(path={str(model_folder())!r})).encode('ab'), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert found.stdout == "[1, 4, 5] False\n"


def test_a_template_of_the_run_is_that_of_engine_rollout_recorder_and_checkpoints(chat_folder: Path) -> None:
    """In place of the model's own; with the environment's variables all write the same prompt."""
    own = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'b' if brief else 'a' }}="
    model = ModelConfig(path=str(chat_folder), chat_template=own)
    messages, variables = [{"role": "user", "content": "xyz"}], {"brief": True}
    config = JsonlConfig(path="rows.jsonl", name="rows", chat_template_kwargs=variables)
    expected = [27, 28, 29, 5, 3]
    prompts = Prompts({"rows": config}, Tokenizer(model).encode)
    assert prompts.encode("rows", Example(messages, {})).ids == expected
    assert Tokenizing(model).tokenize(messages, (), variables) == expected
    assert chat_of(model, variables).bridges.first(messages, None) == expected
    assert Tokenizer(ModelConfig(path=str(chat_folder))).encode(messages) != expected
    assert tokenizer_files(model)["chat_template.jinja"].decode() == own
    assert "chat_template.jinja" not in tokenizer_files(ModelConfig(path=str(chat_folder)))


def test_variables_of_the_template_are_refused_for_a_plain_text(chat_folder: Path) -> None:
    """They would do nothing."""
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: 'brief' has no effect on a prompt of plain text"):
        Tokenizer(model_config(chat_folder)).encode("xyz", (), {"brief": True})
