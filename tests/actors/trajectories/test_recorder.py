"""Trajectories in the language of real families: no token is made again, each sampled token trains once."""

import asyncio
import contextlib
import random
from typing import Any

import pytest

from actors.trajectories.bridges import BridgeError, Message
from actors.trajectories.forms import AnswerForm, Demand
from actors.trajectories.recorder import Recorder, TrajectoryOverError, TurnAnswer, TurnLimits, TurnRequest
from actors.trajectories.tree import Origin
from tests.actors.trajectories.families import FAMILIES, Chat
from tests.actors.trajectories.writer import Writer, language
from tests.marks import long_but

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
    "qwen3_5_think": (
        "hm {0}\n</think>\n\n<tool_call>\n<function=move>\n<parameter=to>\n{0}\n</parameter>\n</function>\n</tool_call>"
    ),
    "deepseekv3": (
        "hm {0}</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>move\n"
        '```json\n{{"to": {0}}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
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


@pytest.mark.parametrize("place", [0, 2])
async def test_an_image_of_an_environment_is_refused_in_words(place: int) -> None:
    """In the first message and behind an answer."""
    recorder = Writer(Chat("qwen3"), ["yes"] * 3).recorder()
    messages: list[Message] = [USER]
    image = USER | {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    if place:
        messages += [await recorder.ask(messages), USER]
    messages[-1] = image
    with pytest.raises(BridgeError, match="the role user has a part of type 'image_url', and trajectories are"):
        await recorder.ask(messages)


@pytest.mark.slow
@pytest.mark.parametrize("family", long_but(list(CALLS)[:3], CALLS))
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
        # a turn that was cut off can't be continued
        with contextlib.suppress(TrajectoryOverError):
            known.append([*messages, await recorder.ask(messages)])
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


async def test_a_turn_that_a_stop_string_ended_is_closed_before_it_goes_on() -> None:
    """By tokens that nobody sampled: they are marked as boundary, and not trained."""
    chat = Chat("qwen2_5")
    writer = Writer(chat, ["ab##", "x"])
    recorder = writer.recorder()
    message = await recorder.ask([USER], stop=["##"])
    await recorder.ask([USER, message, {"role": "user", "content": "on"}])
    [sample] = recorder.tree.samples()
    origins = [origin for *_, origin, _ in sample.segments]
    assert origins == [Origin.MODEL, Origin.BOUNDARY, Origin.ENVIRONMENT, Origin.MODEL]
    assert (
        chat.decode(sample.token_ids)
        == "ab##<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\nx<|im_end|>"
    )
    assert sum(sample.loss_mask) == 4 + 2


async def test_a_message_is_told_without_the_stop_string_that_ended_it() -> None:
    """As in OpenAI's API; a stop that ends a call leaves the call whole, and an end of its own is no stop."""
    glm = CALLS["glm4moe"].format(4)
    writer = Writer(Chat("qwen2_5"), ["ab##", HERMES.format(3), "a# b"])
    recorder = writer.recorder()
    assert (await recorder.ask([USER], stop=["##", "never"]))["content"] == "ab"
    [call] = (await recorder.ask([USER], [TOOL], stop=["</tool_call>"]))["tool_calls"]
    assert call["function"]["arguments"] == '{"to": 3}'
    assert (await recorder.ask([USER], stop=["##"]))["content"] == "a# b"
    message = await Writer(Chat("glm4moe"), [glm]).recorder().ask([USER], [TOOL], stop=["</tool_call>"])
    assert (message["content"], len(message["tool_calls"])) == ("", 1)


async def test_a_turn_that_was_cut_off_is_not_continued() -> None:
    """Half a message is no move, whoever drives; the same question may be asked again."""
    writer = Writer(Chat("qwen2_5"), ["abcdefgh", "x"])
    recorder = writer.recorder(TurnLimits(1000, 4))
    message = await recorder.ask([USER])
    assert (recorder.cut_off, message["content"]) == (True, "abcd")
    with pytest.raises(TrajectoryOverError) as over:
        await recorder.ask([USER, message, {"role": "user", "content": "on"}])
    assert (over.value.stop, len(writer.requests)) == ("length", 1)
    await recorder.ask([USER])
    assert not recorder.cut_off


async def test_a_cut_turn_may_be_kept_out_of_the_loss() -> None:
    """The turn that was asked anew trains alone."""
    writer = Writer(Chat("qwen2_5"), ["abcdefgh", "x"])
    recorder = writer.recorder(TurnLimits(1000, 4, train_cut_turns=False))
    await recorder.ask([USER])
    await recorder.ask([USER])
    [sample] = recorder.tree.samples()
    assert sum(sample.loss_mask) == 2


@pytest.mark.parametrize(("trains", "trained"), [(False, 2), (True, 3)])
async def test_a_turn_of_a_demanded_form_stays_in_the_context_and_trains_only_if_it_may(
    trains: bool, trained: int
) -> None:
    """Its logprobs are of a cut distribution; the free turn behind it always trains."""
    writer = Writer(Chat("qwen2_5"), ["", "x"])
    recorder = writer.recorder(TurnLimits(1000, 4, train_forced_turns=trains))
    message = await recorder.ask([USER], demand=Demand({"type": "object"}))
    await recorder.ask([USER, message, {"role": "user", "content": "on"}])
    forms = [request.form for request in writer.requests]
    assert forms == [AnswerForm("json_schema", '{"type": "object"}'), None]
    [sample] = recorder.tree.samples()
    assert (sum(sample.loss_mask), recorder.num_forced) == (trained, 1)


class Gate:
    """Engine that answers when it is let, in the order in which it is let."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.asked: list[TurnRequest] = []
        self.let: list[asyncio.Event] = []

    async def sample(self, request: TurnRequest) -> TurnAnswer:
        """Wait, and write."""
        event = asyncio.Event()
        self.asked.append(request)
        self.let.append(event)
        await event.wait()
        return await self._writer.sample(request)


async def test_turns_that_are_asked_at_the_same_time_are_apart() -> None:
    """Each with its seed and ids of calls; the later ones continue the turn that they came from."""
    chat = Chat("qwen2_5")
    writer = Writer(chat, [HERMES.format(1), HERMES.format(0), "c", "d"])
    gate = Gate(writer)
    recorder = Recorder(language(chat), gate.sample, TurnLimits(10_000, 1000, max_turns=4), 7)
    starts = [{"role": "user", "content": text} for text in ("first", "second")]
    tasks = [asyncio.create_task(recorder.ask([start], [TOOL])) for start in starts]
    await asyncio.sleep(0)
    # the second one comes first
    for number in (1, 0):
        gate.let[number].set()
        await tasks[number]
    messages = [task.result() for task in tasks]
    assert [m["tool_calls"][0]["function"]["arguments"] for m in messages] == ['{"to": 0}', '{"to": 1}']
    assert messages[0]["tool_calls"][0]["id"] != messages[1]["tool_calls"][0]["id"]
    assert [request.seed for request in gate.asked] == [recorder.turn_seed(0), recorder.turn_seed(1)]
    later = [
        asyncio.create_task(recorder.ask([start, message, USER], [TOOL]))
        for start, message in zip(starts, messages, strict=True)
    ]
    await asyncio.sleep(0)
    with pytest.raises(TrajectoryOverError, match="4 turns are the limit"):
        await recorder.ask([USER])
    for event in gate.let:
        event.set()
    await asyncio.gather(*later)
    for number in range(2):
        so_far = gate.asked[number].prompt_ids + writer.answers[1 - number].token_ids
        assert gate.asked[2 + number].prompt_ids[: len(so_far)] == so_far


async def test_tokens_under_way_count_against_the_limit_of_all_turns() -> None:
    """What a turn may still bring is no other turn's."""
    chat = Chat("qwen2_5")
    gate = Gate(Writer(chat, lambda request: "a"))
    recorder = Recorder(language(chat), gate.sample, TurnLimits(1000, 5, max_total_tokens=8), 7)
    tasks = [asyncio.create_task(recorder.ask([USER])) for _ in range(2)]
    await asyncio.sleep(0)
    assert [request.max_tokens for request in gate.asked] == [5, 3]
    with pytest.raises(TrajectoryOverError, match="max_total_tokens"):
        await recorder.ask([USER])
    for event in gate.let:
        event.set()
    await asyncio.gather(*tasks)
    # four tokens came of the eight
    again = asyncio.create_task(recorder.ask([USER]))
    await asyncio.sleep(0)
    assert gate.asked[2].max_tokens == 4
    again.cancel()


async def test_a_turn_that_failed_is_asked_again_with_its_seed() -> None:
    """It takes no place among the turns."""
    chat, requests = Chat("qwen2_5"), []

    async def sample(request: TurnRequest) -> TurnAnswer:
        requests.append(request)
        if len(requests) == 1:
            raise OSError("the engine is gone")
        return await Writer(chat, ["a"]).sample(request)

    recorder = Recorder(language(chat), sample, TurnLimits(1000, 5, max_turns=1), 7)
    with pytest.raises(OSError, match="gone"):
        await recorder.ask([USER])
    await recorder.ask([USER])
    assert [request.seed for request in requests] == [7, 7]


async def test_a_closed_recorder_asks_and_adds_nothing() -> None:
    """A task that an environment has left behind comes too late, even with its answer on the way."""
    chat = Chat("qwen2_5")
    gate = Gate(Writer(chat, lambda request: "a"))
    recorder = Recorder(language(chat), gate.sample, TurnLimits(1000, 5), 7)
    late = asyncio.create_task(recorder.ask([USER]))
    await asyncio.sleep(0)
    recorder.close()
    gate.let[0].set()
    with pytest.raises(TrajectoryOverError, match="the episode is over"):
        await late
    with pytest.raises(TrajectoryOverError, match="the episode is over"):
        await recorder.ask([USER])
    assert (recorder.tree.num_turns, len(gate.asked)) == (0, 1)


async def test_other_tools_start_a_branch() -> None:
    """They are part of the prompt; the same ones, read anew, are no other ones."""
    chat = Chat("qwen2_5")
    writer = Writer(chat, ["a", "b", "c"])
    recorder = writer.recorder()
    message = await recorder.ask([USER])
    await recorder.ask([USER, message, USER], [TOOL])
    assert '"move"' in chat.decode(writer.requests[1].prompt_ids)
    assert recorder.tree.num_branches == 1
    await recorder.ask([USER, message, USER], [])
    assert recorder.tree.continued(writer.requests[2].prompt_ids) == 0


@pytest.mark.parametrize("max_tokens", [0, -1])
async def test_a_turn_without_room_for_a_token_is_refused(max_tokens: int) -> None:
    """0 is no word for any number."""
    writer = Writer(Chat("qwen2_5"), ["a"])
    with pytest.raises(ValueError, match=f"max_tokens: {max_tokens} is less than 1"):
        await writer.recorder().ask([USER], max_tokens=max_tokens)
    assert writer.requests == []


async def test_an_empty_answer_of_an_engine_is_told() -> None:
    """In words."""

    async def sample(request: TurnRequest) -> TurnAnswer:
        return TurnAnswer([], [], [], "stop")

    with pytest.raises(ValueError, match="answered a turn without a token"):
        await Recorder(language(Chat("qwen2_5")), sample, TurnLimits(1000, 5), 7).ask([USER])


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
    writer = Writer(Chat("qwen2_5"), lambda request: "abcd")
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
    writer = Writer(chat, ["a" * 50, "b", "c"])
    recorder = writer.recorder(TurnLimits(10_000, 100, max_message_tokens=10))
    message = await recorder.ask([USER])
    long = {"role": "user", "content": "x" * 6 + "y" * 1000 + "z" * 5}
    await recorder.ask([USER, message, long])
    # rendered anew behind an edited answer as well
    await recorder.ask([USER, {"role": "assistant", "content": "a" * 50 + "b"}, long])
    for request in writer.requests[1:]:
        text = chat.decode(request.prompt_ids)
        assert "xxxxx\n[1001 tokens left out]\nzzzzz" in text
        assert "a" * 50 in text
        assert "Begin." in text


async def test_the_prompt_of_the_example_is_not_cut() -> None:
    """max_message_tokens is for what the environment says."""
    chat = Chat("qwen2_5")
    writer = Writer(chat, ["a"])
    recorder = writer.recorder(TurnLimits(10_000, 100, max_message_tokens=10))
    await recorder.ask([{"role": "system", "content": "s" * 500}, {"role": "user", "content": "u" * 500}])
    text = chat.decode(writer.requests[0].prompt_ids)
    assert "s" * 500 in text
    assert "u" * 500 in text


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
