"""Trajectories in the language of real families: no token is made again, each sampled token trains once."""

import random
from typing import Any

import pytest

from actors.trajectories.bridges import Message
from actors.trajectories.recorder import Recorder, TrajectoryOverError, TurnLimits
from actors.trajectories.tree import Origin
from tests.actors.trajectories.families import FAMILIES, Chat
from tests.actors.trajectories.writer import Writer

USER: Message = {"role": "user", "content": "Begin."}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move",
        "parameters": {"type": "object", "properties": {"to": {"type": "integer"}}, "required": ["to"]},
    },
}
HERMES = '<tool_call>\n{{"name": "move", "arguments": {{"to": {0}}}}}\n</tool_call>'
CALLS = {
    "qwen2_5": HERMES,
    "qwen3": "<think>\nhm {0}\n</think>\n\n" + HERMES,
    "qwen3_instruct_2507": HERMES,
    "llama3_1": '{{"name": "move", "parameters": {{"to": {0}}}}}',
    "gptoss": '<|channel|>commentary to=functions.move <|constrain|>json<|message|>{{"to": {0}}}',
    "glm4moe": "\n<think>{0}</think>\n<tool_call>move\n<arg_key>to</arg_key>\n<arg_value>{0}</arg_value>\n</tool_call>",
}
ENDS = {"gptoss": "<|call|>", "glm4moe": "<|observation|>"}


def all_sampled(writer: Writer) -> list[int]:
    """Tokens of all answers."""
    return [token for answer in writer.answers for token in answer.token_ids]


async def talk_for_ever(recorder: Recorder) -> None:
    """Ask until a limit is reached."""
    messages = [USER]
    while True:
        messages += [await recorder.ask(messages), USER]


@pytest.mark.slow
@pytest.mark.parametrize("family", list(CALLS))
async def test_two_hundred_turns_of_a_tool_break_no_prefix(family: str) -> None:
    """Each prompt is the exact tokens so far and something new; the trajectory is one sample."""
    chat = Chat(family)
    writer = Writer(chat, [CALLS[family].format(turn) for turn in range(200)], ENDS.get(family, ""))
    recorder = writer.recorder()
    messages: list[Message] = [USER]
    so_far: list[int] = []
    for turn in range(200):
        message = await recorder.ask(messages, [TOOL])
        [call] = message["tool_calls"]
        assert call["function"]["arguments"].replace(" ", "") == f'{{"to":{turn}}}'
        prompt = writer.requests[-1].prompt_ids
        assert prompt[: len(so_far)] == so_far
        so_far = prompt + writer.answers[-1].token_ids
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "name": "move", "content": f"at {turn}"}]
    assert (recorder.tree.num_branches, recorder.num_calls, recorder.num_malformed) == (0, 200, 0)
    [sample] = recorder.tree.samples()
    assert [*sample.prompt_ids, *sample.token_ids] == so_far
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert trained == all_sampled(writer)
    assert [value for value, mask in zip(sample.logprobs, sample.loss_mask, strict=True) if mask] == [
        value for answer in writer.answers for value in answer.logprobs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_caller_does_each_sampled_token_trains_once(family: str, seed: int) -> None:
    """Goes on, forks an earlier conversation, drops thoughts, edits answers, asks again, begins anew, is cut off."""
    rng = random.Random(seed)
    chat = Chat(family)
    writer = Writer(chat, lambda request: "".join(rng.choices("ab <>{}\n", k=rng.randint(1, 12))))
    recorder = writer.recorder(TurnLimits(100_000, 9, 1000))
    known: list[list[Message]] = [[USER]]
    for _ in range(25):
        messages = list(rng.choice(known))
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": rng.choice(["on", "again"])})
        way = rng.random()
        edited = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if way < 0.2 and edited:
            at = rng.choice(edited)
            messages[at] = {"role": "assistant", "content": "something else"}
        elif way < 0.3 and len(messages) > 2:
            messages = [USER, {"role": "assistant", "content": "In short."}, {"role": "user", "content": "on"}]
        message = await recorder.ask(messages)
        known.append([*messages, message])
    samples = recorder.tree.samples()
    trained = sorted(
        (token, round(logprob, 6))
        for sample in samples
        for token, mask, logprob in zip(sample.token_ids, sample.loss_mask, sample.logprobs, strict=True)
        if mask
    )
    expected = sorted(
        (token, round(logprob, 6))
        for answer in writer.answers
        for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert trained == expected
    assert sum(sum(sample.loss_mask) for sample in samples) == recorder.tree.num_sampled
    # each sampled turn stands behind exactly the prompt that its engine was given
    whole = [[*sample.prompt_ids, *sample.token_ids] for sample in samples]
    for request, answer in zip(writer.requests, writer.answers, strict=True):
        seen = [*request.prompt_ids, *answer.token_ids]
        assert any(tokens[: len(seen)] == seen for tokens in whole)


async def test_a_history_that_is_sent_back_in_another_form_is_the_same() -> None:
    """Clients send null, an empty text or nothing for what is absent; thoughts that come back are no edit either."""
    writer = Writer(Chat("qwen3"), [CALLS["qwen3"].format(1), "a", "b", "c", "d"])
    recorder = writer.recorder()
    message = await recorder.ask([USER], [TOOL])
    [call] = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    for form in ({"content": None}, {"content": ""}, {"content": None, "refusal": None}):
        await recorder.ask([USER, message | form, result], [TOOL])
    assert {tuple(request.prompt_ids) for request in writer.requests[1:]} == {tuple(writer.requests[1].prompt_ids)}
    # a caller that drops the thoughts shows the model another past
    without = {key: value for key, value in message.items() if key != "reasoning_content"}
    await recorder.ask([USER, without, result], [TOOL])
    assert writer.requests[4].prompt_ids != writer.requests[3].prompt_ids
    assert recorder.tree.num_branches == 3


async def test_a_turn_that_was_cut_off_is_closed_before_it_goes_on() -> None:
    """By tokens that nobody sampled: they are marked as boundary, and not trained."""
    chat = Chat("qwen2_5")
    writer = Writer(chat, ["abcdefgh", "x"])
    recorder = writer.recorder(TurnLimits(1000, 4))
    message = await recorder.ask([USER])
    assert (recorder.cut_off, message["content"]) == (True, "abcd")
    await recorder.ask([USER, message, {"role": "user", "content": "on"}])
    [sample] = recorder.tree.samples()
    origins = [origin for *_, origin, _ in sample.segments]
    assert origins == [Origin.MODEL, Origin.BOUNDARY, Origin.ENVIRONMENT, Origin.MODEL]
    assert (
        chat.decode(sample.token_ids)
        == "abcd<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\nx<|im_end|>"
    )
    assert sum(sample.loss_mask) == 4 + 2


async def test_a_cut_turn_may_be_kept_out_of_the_loss() -> None:
    """Its tokens stay in the row: later turns were sampled behind them."""
    writer = Writer(Chat("qwen2_5"), ["abcdefgh", "x"])
    recorder = writer.recorder(TurnLimits(1000, 4, train_cut_turns=False))
    message = await recorder.ask([USER])
    await recorder.ask([USER, message, {"role": "user", "content": "on"}])
    [sample] = recorder.tree.samples()
    assert sum(sample.loss_mask) == 2


@pytest.mark.parametrize(
    ("limits", "stop", "turns"),
    [
        (TurnLimits(1000, 5, max_turns=3), "max_turns", 3),
        (TurnLimits(1000, 5, max_turns=50, max_total_tokens=8), "max_total_tokens", 2),
        (TurnLimits(150, 5, max_turns=50), "context_full", 2),
    ],
)
async def test_limits_are_checked_before_a_request(limits: TurnLimits, stop: str, turns: int) -> None:
    """No engine is asked for what can't be used; the last turn gets what is left of a budget."""
    writer = Writer(Chat("qwen2_5"), lambda request: "abcdefghi")
    recorder = writer.recorder(limits)
    with pytest.raises(TrajectoryOverError) as over:
        await talk_for_ever(recorder)
    assert (over.value.stop, len(writer.requests)) == (stop, turns)
    for request in writer.requests:
        assert len(request.prompt_ids) + request.max_tokens <= limits.sequence_len
    if limits.max_total_tokens:
        assert [request.max_tokens for request in writer.requests] == [5, 3]


async def test_long_messages_of_the_environment_lose_their_middle() -> None:
    """Before they are rendered, so that the engine sees what is trained; answers and short messages stay whole."""
    chat = Chat("qwen2_5")
    writer = Writer(chat, ["a" * 50, "b"])
    recorder = writer.recorder(TurnLimits(10_000, 100, max_message_tokens=10))
    message = await recorder.ask([{"role": "user", "content": "x" * 6 + "y" * 1000 + "z" * 5}])
    await recorder.ask([{"role": "user", "content": "x" * 6 + "y" * 1000 + "z" * 5}, message, USER])
    text = chat.decode(writer.requests[1].prompt_ids)
    assert "xxxxx\n[1001 tokens left out]\nzzzzz" in text
    assert "a" * 50 in text
    assert "Begin." in text


async def test_a_turn_that_is_asked_again_has_the_same_seed() -> None:
    """The first turn has the seed that a single turn has; later ones differ from each other and between members."""
    seeds = []
    for seed in (7, 8):
        writer = Writer(Chat("qwen2_5"), lambda request: "a")
        recorder, messages = writer.recorder(seed=seed), [USER]
        for _ in range(20):
            messages += [await recorder.ask(messages), USER]
        seeds.append([request.seed for request in writer.requests])
        assert seeds[-1] == [recorder.turn_seed(turn) for turn in range(20)]
    assert (seeds[0][0], seeds[1][0]) == (7, 8)
    assert len({*seeds[0], *seeds[1]}) == 40
    assert all(0 <= seed < 2**48 for seed in (*seeds[0], *seeds[1]))
