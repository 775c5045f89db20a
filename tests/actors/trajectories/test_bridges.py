"""With chat templates of real models: tokens so far and a bridge are what the template renders, or it is named."""

from collections.abc import Sequence
from typing import Any

import pytest

from actors.trajectories.bridges import MARK, BridgeError, Bridges
from tests.actors.trajectories.families import FAMILIES, Chat

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look around.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
USER = {"role": "user", "content": "Find the key."}
AND_NOW = {"role": "user", "content": "And now?"}
NO_THOUGHTS = ("qwen2_5", "qwen3_instruct_2507", "llama3_1")
"""Families whose templates render every past as it was."""


def call(family: str, at: str, number: int) -> dict[str, Any]:
    """A tool call, with arguments as the family's template wants them."""
    arguments: Any = f'{{"at": "{at}"}}' if family == "deepseekv3" else {"at": at}
    return {"id": f"call{number:05}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def answer(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message."""
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def result(text: str, number: int) -> dict[str, Any]:
    """A tool's message."""
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "look", "content": text}


def sampled_of(chat: Chat, before: Sequence[Any], message: Any, tools: Any) -> str:
    """What the model would have sampled for a message, with its end: the template's rendering behind the prompt."""
    opened = chat.render(before, tools, add_generation_prompt=True)
    text = chat.render([*before, message], tools, add_generation_prompt=False)
    assert text.startswith(opened)
    return text[len(opened) :].rstrip("\n")


@pytest.mark.parametrize("family", [*NO_THOUGHTS, "glm4moe", "gptoss"])
def test_a_question_and_an_answer_are_rendered_as_the_template_has_them(family: str) -> None:
    """Three turns of text: the same tokens as the whole conversation rendered at once, and none of them made anew."""
    chat = Chat(family)
    messages, ids = [USER], chat.bridges.first([USER])
    for number in range(3):
        said = answer(f"In room {number}?")
        text = chat.render([*messages, said, AND_NOW], None, add_generation_prompt=True)
        told = text[len(chat.decode(ids)) :].partition(f"In room {number}?")
        sampled = chat.encode(told[0] + told[1])
        bridge = chat.bridges.next(sampled[-1], [AND_NOW])
        messages += [said, AND_NOW]
        ids += [*sampled, *bridge.boundary_ids, *bridge.environment_ids]
        assert chat.decode(ids) == text
        assert ids == chat.encode(text)
        assert [chat.decode(bridge.boundary_ids)] == [{"glm4moe": "", "gptoss": "<|end|>"}.get(family, _end(family))]


def _end(family: str) -> str:
    return FAMILIES[family].ends[0]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_tool_results_are_rendered_as_the_template_has_them(family: str, rounds: int) -> None:
    """A call in each turn, in one thoughtless conversation; sampled ends included."""
    chat, tools = Chat(family), [LOOK]
    messages: list[Any] = [USER]
    ids = chat.bridges.first(messages, tools)
    for number in range(rounds):
        said = answer("", call(family, f"wall {number}", number))
        sampled = chat.encode(sampled_of(chat, messages, said, tools).removeprefix("<think>\n\n</think>\n\n"))
        assert sampled[-1] == chat.token(_end(family))
        news = [result("It is bare.", number)]
        bridge = chat.bridges.next(sampled[-1], news, said["tool_calls"], tools)
        assert bridge.boundary_ids == []
        messages += [said, *news]
        ids += [*sampled, *bridge.environment_ids]
        assert ids == chat.encode(chat.render(messages, tools, add_generation_prompt=True))


def test_several_results_of_one_turn_stand_together() -> None:
    """Two calls, two results in one message of the template."""
    chat, tools = Chat("qwen3_instruct_2507"), [LOOK]
    said = answer("", call("", "left", 0), call("", "right", 1))
    news = [result("a door", 0), result("a wall", 1)]
    ids = chat.bridges.first([USER], tools) + chat.encode(sampled_of(chat, [USER], said, tools))
    ids += chat.bridges.next(ids[-1], news, said["tool_calls"], tools).environment_ids
    assert ids == chat.encode(chat.render([USER, said, *news], tools, add_generation_prompt=True))


EXPECTED = {
    "qwen3_5_think": (
        "\n<|im_start|>user\n<tool_response>\na wall\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    ),
    "glm4moe": "\n<tool_response>\na wall\n</tool_response><|assistant|>",
    "gptoss": '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"a wall"<|end|><|start|>assistant',
    "deepseekv3": ("<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>a wall<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_tool_results_of_the_other_families(family: str) -> None:
    """Whose templates render an earlier call otherwise than it was sampled: the bridge, written out."""
    chat = Chat(family)
    end = {"glm4moe": "<|observation|>", "gptoss": "<|call|>"}.get(family, _end(family))
    bridge = chat.bridges.next(chat.token(end), [result("a wall", 0)], [call(family, "left", 0)], [LOOK])
    assert bridge.boundary_ids == []
    assert chat.decode(bridge.environment_ids) == EXPECTED[family]


def test_a_turn_that_was_cut_off_is_closed_once() -> None:
    """By the end that the template writes; a turn that has an end of its own is not."""
    chat = Chat("qwen2_5")
    cut = chat.bridges.next(chat.encode("x")[0], [AND_NOW])
    ended = chat.bridges.next(chat.token("<|im_end|>"), [AND_NOW])
    other = chat.bridges.next(chat.token("<|endoftext|>"), [AND_NOW])
    assert chat.decode(cut.boundary_ids) == "<|im_end|>"
    assert ended.boundary_ids == other.boundary_ids == []
    assert cut.environment_ids == ended.environment_ids == other.environment_ids


def test_an_end_that_opens_the_next_message_is_not_written_twice() -> None:
    """GLM ends a turn with the role that is to speak next, and it may have guessed another role."""
    chat = Chat("glm4moe")
    guessed = chat.bridges.next(chat.token("<|user|>"), [AND_NOW])
    wrong = chat.bridges.next(chat.token("<|observation|>"), [AND_NOW])
    assert chat.decode(guessed.environment_ids) == "\nAnd now?<|assistant|>"
    assert chat.decode(wrong.environment_ids) == "<|user|>\nAnd now?<|assistant|>"
    assert guessed.boundary_ids == wrong.boundary_ids == []


def test_options_of_the_template_count() -> None:
    """Thinking switched off: the template opens and closes the thoughts itself."""
    bridge = Chat("qwen3", enable_thinking=False).bridges.next(0, [AND_NOW])
    text = Chat("qwen3").decode(bridge.environment_ids)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


THOUGHTS = "thoughts of an answer are left out as soon as a user's message follows"
START = "the start of an answer is rendered otherwise as soon as the answer is there"


@pytest.mark.parametrize("tools", [None, [LOOK]], ids=["plain", "tools"])
@pytest.mark.parametrize(
    ("family", "words"),
    [
        *((family, []) for family in (*NO_THOUGHTS, "gptoss")),
        ("qwen3", [THOUGHTS]),
        ("glm4moe", [THOUGHTS]),
        ("qwen3_5_think", [THOUGHTS, START]),
        ("deepseekv3", [START]),
    ],
)
def test_a_template_that_changes_the_past_is_named(family: str, words: list[str], tools: Any) -> None:
    """Before a run, in words."""
    assert Chat(family).bridges.deviations(tools) == words


def test_a_template_whose_messages_depend_on_their_number_is_named() -> None:
    """What a bridge is can't be found for it."""

    def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        return "".join(f"{number}{m['content']}\n" for number, m in enumerate(messages))

    bridges = Bridges(render, lambda text: [ord(c) for c in text], ends=[10], special=[])
    assert bridges.deviations() == ["what follows an answer depends on what was said before it"]


def test_a_template_that_refuses_is_told_in_its_own_words() -> None:
    """Llama 3.1 has one call in a turn."""
    chat = Chat("llama3_1")
    with pytest.raises(BridgeError, match="refuses a conversation: TemplateError: This model only supports single"):
        chat.bridges.next(0, [result("a", 0), result("b", 1)], [call("", "a", 0), call("", "b", 1)], [LOOK])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_may_contain_the_word_of_the_made_up_answer(family: str) -> None:
    """Text, a name or an id: the bridge is the same but for it."""
    chat = Chat(family)
    end = chat.token(_end(family))
    plain = chat.decode(chat.bridges.next(end, [{"role": "user", "content": "no word"}]).environment_ids)
    marked = chat.decode(chat.bridges.next(end, [{"role": "user", "content": f"no {MARK}"}]).environment_ids)
    assert "no word" in plain
    assert marked == plain.replace("no word", f"no {MARK}")


def test_what_stands_before_the_first_question_of_a_bridge_is_kept() -> None:
    """GLM's answers end where the next message starts, whoever speaks."""
    chat = Chat("glm4moe")
    bridge = chat.bridges.next(chat.token("<|endoftext|>"), [{"role": "system", "content": "Be brief."}, AND_NOW])
    assert chat.decode(bridge.environment_ids) == "<|system|>\nBe brief.<|user|>\nAnd now?<|assistant|>"
    bridge = chat.bridges.next(chat.token("<|endoftext|>"), [answer("Four."), AND_NOW])
    text = chat.decode(bridge.environment_ids)
    assert text.startswith("<|assistant|>")
    assert "Four." in text


def test_an_end_within_a_new_message_is_not_the_end_of_the_answer() -> None:
    """gpt-oss ends an answer with <|end|> and a call with <|call|>."""
    chat = Chat("gptoss")
    news = [AND_NOW, answer("", call("gptoss", "left", 1)), result("a wall", 1)]
    text = chat.decode(chat.bridges.next(chat.token("<|return|>"), news, [], [LOOK]).environment_ids)
    assert "And now?" in text
    assert "a wall" in text


@pytest.mark.parametrize("family", ["gptoss", "deepseekv3"])
def test_a_message_that_the_template_moves_to_the_front_is_refused(family: str) -> None:
    """A system message in the middle would never be seen by the model."""
    chat = Chat(family)
    with pytest.raises(BridgeError, match="does not show a new message of the role system"):
        chat.bridges.next(chat.token(_end(family)), [{"role": "system", "content": "Go"}, AND_NOW])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_content_that_a_template_strips_or_escapes_is_shown(family: str) -> None:
    """Blanks, thoughts, quotes: no message is taken for one that is left out."""
    chat = Chat(family)
    chat.bridges.next(chat.token(_end(family)), [{"role": "user", "content": '  <a> "b"\n'}])
    # Mistral's template has no two answers in a row
    if family != "mistral_v3_tekken":
        chat.bridges.next(chat.token(_end(family)), [answer("<think>x</think>y"), AND_NOW])


def test_a_first_conversation_that_the_template_refuses_is_told_in_its_own_words() -> None:
    """As a bridge is."""

    def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        raise RuntimeError("no system messages here")

    with pytest.raises(BridgeError, match="refuses a conversation: RuntimeError: no system messages here"):
        Bridges(render, lambda text: [], ends=[0], special=[1]).first([USER])


@pytest.mark.parametrize(
    ("template", "words"),
    [("{m}", "writes no token behind an answer"), ("", "leaves out an assistant's message")],
)
def test_a_template_without_an_end_is_refused(template: str, words: str) -> None:
    """In words."""

    def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        return "".join(template.format(m=m["content"]) for m in messages)

    with pytest.raises(BridgeError, match=words):
        Bridges(render, lambda text: [ord(c) for c in text], ends=[0], special=[1]).next(5, [AND_NOW])
