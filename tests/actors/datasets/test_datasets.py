import json
from pathlib import Path
from typing import get_args

import pytest

from actors.datasets import make_dataset
from actors.datasets.jsonl import Jsonl
from schemas.config.data import ArithmeticConfig, JsonlConfig, ReverseTextConfig, Split
from schemas.errors import ConfigError


def test_reverse_text_asks_for_the_word_backwards() -> None:
    """The prompt is the word and =, the answer the word reversed, within the configured lengths."""
    dataset = make_dataset(ReverseTextConfig(min_letters=2, max_letters=3), "train", seed=1)
    for index in range(50):
        example = dataset.example(index)
        word = str(example.prompt).removesuffix("=")
        assert example.columns == {"answer": word[::-1]}
        assert 2 <= len(word) <= 3


def test_arithmetic_answers_are_right() -> None:
    """The answer column is the value of the expression in the prompt."""
    dataset = make_dataset(ArithmeticConfig(operations=["+", "-", "*"], max_operand=12), "eval", seed=3)
    for index in range(50):
        example = dataset.example(index)
        assert eval(str(example.prompt).removesuffix("=")) == int(example.columns["answer"])


def test_an_example_is_the_same_in_every_process_and_another_under_another_seed() -> None:
    """Examples depend on seed, split and index alone, so packer and rollout agree without sending data."""
    config = ReverseTextConfig()
    first = [make_dataset(config, "train", seed=5).example(i).prompt for i in range(20)]
    assert first == [make_dataset(config, "train", seed=5).example(i).prompt for i in range(20)]
    assert first != [make_dataset(config, "train", seed=6).example(i).prompt for i in range(20)]


def test_no_train_prompt_is_ever_an_eval_prompt() -> None:
    """Even in a world of 26 words, whatever the seed: which split a prompt belongs to is a property of the prompt."""
    config = ReverseTextConfig(min_letters=1, max_letters=1)
    train = {make_dataset(config, "train", seed=s).example(i).prompt for s in range(3) for i in range(300)}
    held_out = {make_dataset(config, "eval", seed=s).example(i).prompt for s in range(3) for i in range(300)}
    assert held_out
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 26


def test_an_environment_with_too_few_prompts_says_so() -> None:
    """0+0= is the only problem, it belongs to one split, and the other one reports it instead of hanging."""
    config = ArithmeticConfig(operations=["+"], max_operand=1)
    prompts = {str(make_dataset(config, "train", 0).example(i).prompt) for i in range(20)}
    assert prompts <= {"0+0=", "0+1=", "1+0=", "1+1="}
    with pytest.raises(ValueError, match="too few different prompts"):
        make_dataset(config, "eval", 0).example(0)


def _write(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_jsonl_takes_gsm8k_as_people_download_it(tmp_path: Path) -> None:
    """Columns question and answer: the prompt becomes a chat with the system prompt, the rest are columns."""
    path = _write(
        tmp_path / "train.jsonl", [{"question": "1+1?", "answer": "so #### 2"}, "", {"question": "2+2?", "answer": "4"}]
    )
    config = JsonlConfig(path=path, prompt_column="question", system_prompt="Think.")
    dataset = make_dataset(config, "train", 0)
    assert dataset.num_examples == 2
    example = dataset.example(1)
    assert example.prompt == [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"}]
    assert example.columns == {"answer": "4"}


def test_jsonl_keeps_text_as_text_and_messages_as_messages(tmp_path: Path) -> None:
    """Without chat or system prompt a text prompt stays text; messages stay what they are."""
    messages = [{"role": "user", "content": "hi"}]
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "plain", "n": 3}, {"prompt": messages}])
    dataset = make_dataset(JsonlConfig(path=path), "train", 0)
    assert dataset.example(0).prompt == "plain"
    assert dataset.example(0).columns == {"n": 3}
    assert dataset.example(1).prompt == messages
    assert make_dataset(JsonlConfig(path=path, chat=True), "train", 0).example(0).prompt == [
        {"role": "user", "content": "plain"}
    ]


def test_jsonl_without_an_eval_file_holds_nothing_out(tmp_path: Path) -> None:
    """The eval split is empty then."""
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    assert make_dataset(JsonlConfig(path=path), "eval", 0).num_examples == 0


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["not json"], r"line 1: not JSON"),
        ([{"prompt": "fine"}, {"text": "x"}], r"line 2: no column 'prompt' \(prompt_column\); its columns are text"),
        ([[1, 2]], r"line 1: no column 'prompt'.*not an object"),
        ([{"prompt": 3}], r"line 1: the prompt must be text, or a list of messages"),
        ([{"prompt": []}], r"line 1: the prompt must be"),
        ([{"prompt": [{"role": "user"}]}], r"line 1: the prompt must be"),
        ([{"prompt": [{"role": "user", "content": None}]}], r"line 1: the prompt must be"),
        ([{"prompt": [{"role": "user", "content": ["part"]}]}, "", {"prompt": 3}], r"line 3: the prompt must be"),
    ],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_jsonl_names_file_and_line_of_a_bad_row(tmp_path: Path, split: Split, rows: list[object], words: str) -> None:
    """The environment is not even made: the error tells where and what, and what is there instead."""
    good = _write(tmp_path / "good.jsonl", [{"prompt": "a"}])
    bad = _write(tmp_path / "bad.jsonl", rows)
    path, eval_path = (bad, good) if split == "train" else (good, bad)
    key = "path" if split == "train" else "eval_path"
    with pytest.raises(ConfigError, match=rf"environments\[\]\.{key}: {bad}, {words}"):
        make_dataset(JsonlConfig(path=path, eval_path=eval_path), split, 0)


def test_jsonl_knows_the_columns_that_every_row_has(tmp_path: Path) -> None:
    """Functions can count on those alone; the prompt is none of them."""
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "a", "x": 1, "y": 2}, {"prompt": "b", "y": 3, "z": 4}])
    assert Jsonl(JsonlConfig(path=path), "train").columns == {"y"}


def test_jsonl_says_when_a_file_was_changed_under_it(tmp_path: Path) -> None:
    """A row that was good and is not any more."""
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    dataset = make_dataset(JsonlConfig(path=path), "train", 0)
    _write(Path(path), ["changed"])
    with pytest.raises(ConfigError, match="row 1 is not what it was when the file was read first: not JSON"):
        dataset.example(0)


def test_jsonl_without_a_check_parses_a_row_when_it_is_asked_for(tmp_path: Path) -> None:
    """Each of many rollout actors starts with an index alone; the rows and the words about a bad one are the same."""
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "a", "n": 1}\n\n  \nnot JSON\n{"prompt": "c"}')
    with pytest.raises(ConfigError, match="line 5: not JSON"):
        Jsonl(JsonlConfig(path=str(path)), "train")
    indexed = Jsonl(JsonlConfig(path=str(path)), "train", check=False)
    assert indexed.num_examples == 3
    assert (indexed.example(0).prompt, indexed.example(0).columns) == ("a", {"n": 1})
    assert indexed.example(2).prompt == "c"
    with pytest.raises(ConfigError, match="row 2 is not what it was"):
        indexed.example(1)


def test_jsonl_that_is_replaced_under_its_name_stays_what_was_read(tmp_path: Path) -> None:
    """The index fits the file that was read, so a draw neither opens the new one nor mixes the two."""
    path = tmp_path / "rows.jsonl"
    dataset = make_dataset(JsonlConfig(path=_write(path, [{"prompt": "a"}, {"prompt": "b"}])), "train", 0)
    other = tmp_path / "other.jsonl"
    _write(other, [{"prompt": "something longer"}])
    other.replace(path)
    assert [dataset.example(i).prompt for i in range(2)] == ["a", "b"]


def test_jsonl_says_when_the_file_is_missing_or_empty(tmp_path: Path) -> None:
    """Both name the key and the path."""
    with pytest.raises(ConfigError, match=r"environments\[\].path: .*nothing.jsonl can't be read"):
        make_dataset(JsonlConfig(path=str(tmp_path / "nothing.jsonl")), "train", 0)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for split in get_args(Split):
        config = JsonlConfig(path=str(tmp_path / "empty.jsonl"), eval_path=str(tmp_path / "empty.jsonl"))
        with pytest.raises(ConfigError, match="has no rows"):
            make_dataset(config, split, 0)


def test_the_key_of_an_example_is_its_content() -> None:
    """Equal prompts of one environment have one key; the environment's name is part of it."""
    dataset = make_dataset(ReverseTextConfig(), "train", seed=5)
    assert dataset.example(3).key("a") == make_dataset(ReverseTextConfig(), "train", 5).example(3).key("a")
    assert dataset.example(3).key("a") != dataset.example(3).key("b")
    assert dataset.example(3).key("a") != dataset.example(4).key("a")
