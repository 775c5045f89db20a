"""A server's start as a task: the bar in its log."""

import pytest

from actors.engines.external.owned import bar_of


@pytest.mark.parametrize(
    ("line", "bar"),
    [
        (
            "(EngineCore pid=7) Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.20s/it]",
            ("Loading safetensors checkpoint shards", 1, 2),
        ),
        (
            "Capturing CUDA graphs (decode, FULL):  52%|█████▏    | 35/67 [00:02<00:02, 14.51it/s]",
            ("Capturing CUDA graphs (decode, FULL)", 35, 67),
        ),
        ("Multi-thread loading shards: 100% Completed | 4/4 [00:03<00:00]", ("Multi-thread loading shards", 4, 4)),
        ("(APIServer pid=3) INFO 11-27 01:00:00 [api_server.py:99] Starting vLLM server on http://127.0.0.1:80", None),
    ],
)
def test_a_bar_of_a_server_is_known_by_its_last_line(line: str, bar: object) -> None:
    """As vLLM and SGLang write them; other lines have no bar."""
    assert bar_of(f"INFO before: 10% of 3/4\n{line}\n\n") == bar


def test_a_log_that_went_on_has_no_bar() -> None:
    """A bar that has ended says nothing of the work under way."""
    assert bar_of("Loading shards: 100%|##| 4/4\nINFO torch.compile takes 3 s in total") is None
