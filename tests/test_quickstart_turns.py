"""The quickstart with turns: its environments, its chat template, and both tasks as real runs."""

import ast
import importlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.model_chat import chat_of
from actors.trajectories.recorder import Recorder, TurnAnswer, TurnLimits, TurnRequest
from schemas.config.model import ModelConfig
from tests.docs.pages import page
from tests.test_examples import ROOT, run_quickstart

FOLDER = ROOT / "examples/quickstart"
TASKS = ("find_number", "calculator")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import of a module of the example by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_the_environment_of_the_readme_is_the_file_that_is_trained() -> None:
    """The same code, without docstrings in at most fifteen lines."""
    (block,) = [found for found in page("README.md").blocks if found.title == "find_number.py"]
    assert _without_docstrings(block.text) == _without_docstrings((FOLDER / "find_number.py").read_text())
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 15


def _without_docstrings(code: str) -> str:
    """Code without empty lines, comments and docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.unparse(tree)


NUM_GAMES = 400


def play(game: Any, split: str, index: int, guess: Callable[[str, random.Random], int]) -> bool:
    """Whether a policy finds the number in seven turns; it sees the newest message."""
    rng = random.Random(index)
    message = game.reset(index, split)
    for _ in range(7):
        message, reward, is_done = game.step(str(guess(message, rng)))
        if is_done:
            return bool(reward == 1.0)
    return False


def numbers(message: str) -> tuple[int, int]:
    """Range that a message tells."""
    low, high = map(int, re.findall(r"\d+", message))
    return low, high


def test_the_hidden_number_is_found_by_halving(modules: Any) -> None:
    """In each game, and what is no number counts as too low."""
    game = modules("find_number").FindNumber()
    for split in ("train", "eval"):
        for index in range(NUM_GAMES):
            assert play(game, split, index, lambda message, _: sum(numbers(message)) // 2)
    low, high = numbers(game.reset(0, "eval"))
    assert game.step("I don't know") == (f"from {low} to {high}", 0.0, False)


def test_the_hidden_number_is_rarely_found_without_the_answers(modules: Any) -> None:
    """The best seven guesses that no answer changes, and guesses at random, find at most 0.3 of the numbers."""
    game = modules("find_number").FindNumber()
    numbers_of = {split: Counter(number_in(game, split, index) for index in range(3000)) for split in ("train", "eval")}
    for counts in numbers_of.values():
        assert set(counts) == set(range(1, 29))
        assert sum(count for _, count in counts.most_common(7)) / 3000 <= 0.3
    wins = [play(game, "eval", index, lambda _, rng: rng.randint(1, 28)) for index in range(NUM_GAMES)]
    assert sum(wins) / NUM_GAMES <= 0.3


def number_in(game: Any, split: str, index: int) -> int:
    """The hidden number of a game, of which the first message tells nothing."""
    assert game.reset(index, split) == "from 1 to 28"
    return int(game.number)


def test_held_out_games_and_questions_are_others_than_those_of_training(modules: Any) -> None:
    """Games are drawn with another seed, so none can be known by heart; of 112 questions 20 are kept apart."""
    game, task = modules("find_number").FindNumber(), modules("calculator").Calculator()
    drawn = [[number_in(game, split, index) for index in range(NUM_GAMES)] for split in ("train", "eval")]
    assert sum(one == other for one, other in zip(*drawn, strict=True)) / NUM_GAMES < 0.1
    questions = [{task.reset(index, split) for index in range(3000)} for split in ("train", "eval")]
    assert (len(questions[0]), len(questions[1]), len(questions[0] | questions[1])) == (92, 20, 112)


def test_the_question_of_the_calculator_needs_the_right_tool_and_its_result(modules: Any) -> None:
    """Without a call at most 0.3 of the questions are answered right, and with one of the tools at most 0.6."""
    task = modules("calculator").Calculator()
    answers: dict[str, Counter[int]] = {"+": Counter(), "*": Counter()}
    right: Counter[str] = Counter()
    for index in range(NUM_GAMES):
        a, sign, b = task.reset(index, "eval")[:3]
        answer = task.columns["answer"]
        answers[sign][answer] += 1
        for name in ("add", "multiply"):
            right[name] += getattr(task, name)(a, b) == answer
        assert answer == (task.add(a, b) if sign == "+" else task.multiply(a, b))
        assert task.get_reward() == {"calls": 3.0}
    assert sum(counts.most_common(1)[0][1] for counts in answers.values()) / NUM_GAMES <= 0.3
    assert max(right.values()) / NUM_GAMES <= 0.6


def played_by(turns_model: Any, task: str, index: int) -> Any:
    """Conversation of the warm-up of a task."""
    return turns_model.TASKS[task].play(random.Random(index), index, turns_model.TASKS[task].errors)


@pytest.mark.parametrize("task", TASKS)
def test_players_of_the_warm_up_succeed_less_than_half_of_the_time(task: str, modules: Any) -> None:
    """A model that imitates them perfectly has room to improve."""
    environment = {"find_number": "FindNumber", "calculator": "Calculator"}[task]
    played = getattr(modules(task), environment)()
    wins = 0
    for index in range(NUM_GAMES):
        messages, _ = played_by(modules("turns_model"), task, index)
        played.reset(index, "train")
        answer = played.number if task == "find_number" else played.columns["answer"]
        wins += messages[-1]["content"] == str(answer)
    assert 0.3 <= wins / NUM_GAMES <= 0.5


@pytest.fixture
def start_model(modules: Any, tmp_path: Path) -> Any:
    """Tokenizer and weights of a task before the warm-up, in a folder."""

    def make(task: str) -> Path:
        turns_model = modules("turns_model")
        played = [played_by(turns_model, task, index) for index in range(200)]
        tokenizer = turns_model.make_tokenizer(played)
        tokenizer.save_pretrained(tmp_path)
        modules("model").make_model(len(tokenizer), 64).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.mark.parametrize("task", TASKS)
async def test_bridges_continue_a_players_conversation_as_the_template_renders_it(
    task: str, modules: Any, start_model: Any
) -> None:
    """A conversation that is sampled turn by turn has the tokens of the warm-up, calls are read, and nothing forks."""
    folder = start_model(task)
    turns_model = modules("turns_model")
    chat = chat_of(ModelConfig(path=str(folder)))
    assert chat.bridges.deviations() == []
    for index in range(20):
        messages, tools = played_by(turns_model, task, index)
        whole = chat.bridges.first(messages, tools)[:-1]  # without the start of another answer
        asked = 0

        async def sample(request: TurnRequest, whole: list[int] = whole) -> TurnAnswer:
            nonlocal asked
            asked += 1
            start = len(request.prompt_ids)
            assert request.prompt_ids == whole[:start]
            end = whole.index(turns_model.END, start) + 1
            return TurnAnswer(whole[start:end], [-1.0] * (end - start), [(0, 0, 0)], "stop")

        recorder = Recorder(chat, sample, TurnLimits(512, 64, 10), seed=0)
        shown: list[Any] = []
        for message in messages:
            if message["role"] != "assistant":
                shown.append(message)
                continue
            said = await recorder.ask(shown, tools)
            assert said["content"] == message["content"]
            read = [json.loads(call["function"]["arguments"]) for call in said.get("tool_calls", ())]
            assert read == [call["function"]["arguments"] for call in message.get("tool_calls", ())]
            shown.append(said)
        assert (asked, recorder.tree.num_turns, recorder.tree.num_branches) == (asked, asked, 0)
        assert recorder.num_malformed == 0


@pytest.mark.parametrize("task", TASKS)
def test_the_warm_up_teaches_nothing_but_the_players_words(task: str, modules: Any, start_model: Any) -> None:
    """Masked tokens are the answers with their ends, in their order."""
    folder = start_model(task)
    turns_model = modules("turns_model")
    chat = chat_of(ModelConfig(path=str(folder)))
    messages, tools = played_by(turns_model, task, 1)
    ids = modules("torch").tensor([chat.bridges.first(messages, tools)[:-1]])
    said = ids[turns_model._said_by_the_player(ids)].tolist()
    texts = chat.decode(said).split("<|end|>")[:-1]
    assert [text for text in texts if "<tool_call>" not in text] == [
        message["content"] for message in messages if message["role"] == "assistant" and message["content"]
    ]
    assert len(texts) == sum(message["role"] == "assistant" for message in messages)


def run_task(task: str, output: Path, *overrides: str) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """Summary, printed text and samples of a run of the quickstart with turns."""
    completed = run_quickstart([sys.executable, FOLDER / "turns.py", "--task", task, "--output", output, *overrides])
    assert completed.returncode == 0, completed.stdout + completed.stderr
    folder = output / task
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert f"{folder / 'report.html'} shows curves" in completed.stdout
    assert "<h2>Completions, best</h2>" in (folder / "report.html").read_text()
    assert (folder / "report-pictures" / "reward_mean.png").stat().st_size > 5_000
    return json.loads((folder / "summary.json").read_text()), completed.stdout, samples


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("quickstart")
@pytest.mark.parametrize("task", TASKS)
def test_a_short_run_of_the_quickstart_with_turns_is_whole(task: str, tmp_path: Path) -> None:
    """Three steps: turns or tool calls in the samples, nothing lost, a lag of at most 1, a report."""
    overrides = ("trainer.max_steps=3", "trainer.warmup_steps=1", "eval.num_prompts=8")
    summary, printed, samples = run_task(task, tmp_path, *overrides)
    ledger = summary["ledger"]
    assert (ledger["issued"], ledger["trained"], ledger["trained_twice"]) == (12, 12, 0)
    assert summary["lag_max"] <= 1
    assert "lost 0, trained twice 0" in printed
    assert "held-out success" in printed
    turns = [turns for sample in samples for turns in sample["turns"]]
    calls = [calls for sample in samples for calls in sample["tool_calls"]]
    assert max(turns) == {"find_number": 7, "calculator": max(turns)}[task] > 1
    assert (sum(calls) > 0) == (task == "calculator")
    stops = {stop for sample in samples for stop in sample["stop_conditions"]}
    assert "done" in stops
    assert task != "find_number" or "max_turns" in stops


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("quickstart")
@pytest.mark.parametrize("task", TASKS)
def test_the_quickstart_with_turns_learns_both_tasks(task: str, tmp_path: Path) -> None:
    """Held-out success rises from at most 0.5 to at least 0.9; nothing is lost or trained twice."""
    summary, printed, _ = run_task(task, tmp_path)
    assert summary["eval_before"][task]["mean_reward"] <= 0.5
    assert summary["eval_after"][task]["mean_reward"] >= 0.9
    assert "lost 0, trained twice 0" in printed
