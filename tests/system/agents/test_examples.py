"""The agents of examples/agents, each as its file stands there, with the frameworks of the registry.

The model is scripted: it calls the right tool and answers with the result, or does so badly.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.system.agents.scripted import EXAMPLES, Engines, config_of, player
from tests.system.environments.scripted import call, python_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FILES = ("plain", "with_openai_agents", "with_smolagents", "with_langgraph")
ROWS = [json.loads(line) for line in (EXAMPLES / "tasks.jsonl").read_text().splitlines()]


def wanted(prompt: str) -> tuple[str, str]:
    """The right tool for the newest question of a prompt, and the thing that it asks for."""
    *_, (cost, costing, left) = re.findall(
        r"What does the (\w+) (cost)\?|How many pieces of the (\w+) are left\?", prompt
    )
    return ("price", cost) if costing else ("stock", left)


def result_in(prompt: str) -> str | None:
    """The result of the newest tool call in a prompt, in the writing of any framework."""
    found = re.findall(r"(?:<tool_response>|Observation:)\s*(\d+|unknown|[Ee]rror[^\n]*)", prompt)
    return found[-1] if found else None


def good(prompt: str) -> str:
    """Call the right tool, then answer."""
    name, item = wanted(prompt)
    result = result_in(prompt)
    if result is None:
        return call(name, item=item)
    # smolagents ends with a tool of its own
    return call("final_answer", answer=f"It is {result}.") if "final_answer" in prompt else f"It is {result}."


def wrong_tool(prompt: str) -> str:
    """Call the other tool, then answer with its result."""
    return good(prompt).replace('"price"', '"x"').replace('"stock"', '"price"').replace('"x"', '"stock"')


def invented(prompt: str) -> str:
    """Call a tool that nobody has, with no arguments; then answer all the same."""
    return call("weather") if "weather" not in prompt else "It is 7."


@pytest.mark.parametrize("file", FILES)
async def test_an_agent_earns_its_reward_with_the_right_tool(tmp_path: Path, file: str) -> None:
    """Two rows, one of each kind of question; each call is a turn, and all sampled tokens are trained."""
    engines = Engines(good)
    async with player(config_of(tmp_path, "run.yaml", f"environments.0.path=programs/{file}.py:run"), engines) as play:
        for index in (0, 1):
            for one in await play(index):
                assert one.rewards == {"run": 1.0}
                assert one.tree.num_turns == 2
                trained = sum(sum(sample.loss_mask) for sample in one.tree.samples())
                assert trained == one.tree.num_sampled
                # smolagents writes calls anew, as a text, which is another history
                assert one.tree.num_branches == (1 if file == "with_smolagents" else 0)
    assert all("price" in prompt and "stock" in prompt for prompt in engines.prompts)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("script", [wrong_tool, invented])
async def test_an_agent_that_errs_earns_nothing_and_does_not_fail(tmp_path: Path, file: str, script) -> None:
    """Of the wrong tool the number is wrong; a tool that is not there is told to the model, or is the agent's end."""
    async with player(
        config_of(tmp_path, "run.yaml", f"environments.0.path=programs/{file}.py:run"), Engines(script)
    ) as play:
        for one in await play(0):
            assert one.rewards == {"run": 0.0}
            assert not one.failure


@pytest.mark.parametrize(("file", "script"), [("with_openai_agents", good), ("with_smolagents", lambda _: "It is")])
async def test_an_answer_that_is_cut_off_earns_nothing_and_does_not_fail(tmp_path: Path, file: str, script) -> None:
    """The session refuses to continue such an answer, and both frameworks raise."""
    async with player(
        config_of(tmp_path, "run.yaml", f"environments.0.path=programs/{file}.py:run"),
        Engines(script, finish_reason="length"),
    ) as play:
        for one in await play(0):
            assert one.rewards == {"run": 0.0}
            assert (one.failure, one.stop) == ("", "length")


@pytest.mark.parametrize("file", ["with_openai_agents", "with_smolagents"])
async def test_an_engine_that_fails_is_no_reward_of_zero(tmp_path: Path, file: str) -> None:
    """The model is not to blame, whatever the framework makes of the error."""

    def lost(prompt: str) -> str:
        raise ConnectionError("the engine is gone")

    path = f"environments.0.path=programs/{file}.py:run"
    async with player(
        config_of(tmp_path, "run.yaml", path, "environments.0.on_failure=unscorable"), Engines(lost)
    ) as play:
        with pytest.raises(ConnectionError, match="the engine is gone"):
            await play(0)


@pytest.mark.parametrize("file", ["with_openai_agents", "with_smolagents"])
def test_a_connection_that_is_lost_is_raised(file: str) -> None:
    """No answer is no act of the model."""
    calling = (
        f"import asyncio, inspect, {file} as agent\n"
        "data = {'prompt': [{'role': 'user', 'content': 'What does the lamp cost?'}]}\n"
        "found = agent.run(data, 'http://127.0.0.1:9/v1', 'key')\n"
        "print('reward', asyncio.run(found) if inspect.isawaitable(found) else found)\n"
    )
    command = [python_of("agents"), "-c", calling]
    ended = subprocess.run(command, cwd=EXAMPLES / "programs", capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert "Connection error" in ended.stderr
    assert "reward" not in ended.stdout


async def test_a_program_earns_the_reward_that_it_writes(tmp_path: Path) -> None:
    """command.py, in a folder of its own, without a package."""
    for script, reward in ((good, 1.0), (wrong_tool, 0.0)):
        async with player(config_of(tmp_path, "command.yaml"), Engines(script)) as play:
            for one in await play(0):
                assert one.rewards == {"agent": reward}
                assert (one.tree.num_turns, one.tree.num_branches) == (2, 0)


async def test_a_shell_script_earns_its_reward_by_its_status(tmp_path: Path) -> None:
    """curl.sh; the facts are in the prompt."""
    answer = ROWS[0]["answer"]
    for text, reward in ((f"It is {answer}.", 1.0), (f"It is 1{answer}.", 0.0), ("I do not know.", 0.0)):
        engines = Engines(lambda _, text=text: text)
        async with player(config_of(tmp_path, "curl.yaml"), engines) as play:
            for one in await play(0):
                assert one.rewards == {"agent": reward}
        assert f"costs {ROWS[0]['price']}, and {ROWS[0]['stock']} pieces" in engines.prompts[0]


MENDED = "return max(0, min(first[1], second[1]) - max(first[0], second[0]) + 1)"


async def test_mini_swe_agent_mends_a_repository_and_the_tests_decide(tmp_path: Path) -> None:
    """Its own command line, with its own prompts and its bash; the repository of the example stays as it is."""
    commands = [
        "cat intervals.py",
        f"sed -i 's/return max.*/{MENDED}/' intervals.py",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]

    def mends(prompt: str) -> str:
        return call("bash", command=commands[prompt.count("<|im_start|>assistant") - 1])

    def gives_up(prompt: str) -> str:
        return call("bash", command=commands[-1])

    before = (EXAMPLES / "repository/intervals.py").read_text()
    for script, reward, turns in ((mends, 1.0, 3), (gives_up, 0.0, 1)):
        engines = Engines(script)
        path = str(Path(config_of(tmp_path, "mini_swe.yaml").environments[0].python).parent)
        variables = f'environments.0.options.variables.PATH="{path}:/usr/bin:/bin"'
        async with player(config_of(tmp_path, "mini_swe.yaml", variables), engines) as play:
            for one in await play(0):
                assert one.rewards == {"agent": reward}
                assert one.tree.num_turns == turns
        if turns == 3:
            assert "both ends belong to an interval" in engines.prompts[-1]
    assert (EXAMPLES / "repository/intervals.py").read_text() == before
