"""Secrets in places where anything may be written are refused, since all of it is written down."""

import pytest

from schemas.config.load import check_tree
from schemas.config.secrets import found_in
from schemas.errors import ConfigError
from tests.schemas.config.test_load import _tree


@pytest.mark.parametrize(
    "kwargs",
    [
        {"api_key": "sk-1"}, {"openai_api_key": "x"}, {"HF_TOKEN": "x"}, {"password": "x"}, {"db_password": "x"},
        {"client-secret": "x"}, {"judge": {"auth_token": "x"}}, {"judges": [{"apikey": "x"}]},
        {"AWS_SECRET_ACCESS_KEY": "x"}, {"pwd": "x"}, {"db_pwd": "x"}, {"secret": "f3Qz81LmXw0Vb2Nc7RtY"},
        {"token": "hf_abcDEF123456"}, {"openai_key": "sk-abc123def456"}, {"key": "0123456789abcdef" * 2},
        {"judge_key": "sk-proj-abc_123-def"}, {"api_key": "AKIAIOSFODNN7EXAMPLE"},
    ],
)  # fmt: skip
def test_secret_among_kwargs_is_refused_with_the_way_out(kwargs: dict[str, object]) -> None:
    """config.resolved.yaml, the ledger and the list of processes would show it."""
    with pytest.raises(ConfigError) as caught:
        check_tree(_tree(reward__functions=[{"path": "mine.py:score", "kwargs": kwargs}]))
    (problem,) = caught.value.problems
    assert problem.startswith("reward.functions.0.kwargs.")
    assert "environment variable" in problem
    assert "sk-1" not in problem


@pytest.mark.parametrize(
    "words", [["--api-key", "sk-1"], ["--api-key=sk-1"], ["--hf-token", "x"], ["--x", "--ssl-password=1"]]
)
def test_secret_among_arguments_of_a_server_is_refused(words: list[str]) -> None:
    """ps shows them to everybody."""
    assert list(found_in({"inference": {"engine": {"extra_args": words}}}))


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@h:8000", "https://hf_abcdefgh1234@h", "https://h/v1?api_key=sk-1", "postgresql://:p@h/db",
        "s3://h/x?a=1&password=x", "HTTPS://u:p@h",
    ],
)  # fmt: skip
def test_a_url_with_a_secret_is_refused_wherever_it_is(url: str) -> None:
    """Servers of an engine, a tracker's server, arguments of functions and programs: trackers are sent all of them."""
    for tree in ({"a": url}, {"urls": [url]}, {"kwargs": {"base": url}}, {"extra_args": ["--x", f"--db={url}", url]}):
        assert list(found_in(tree)), tree
    with pytest.raises(ConfigError) as caught:
        check_tree(_tree(telemetry__trackers=[{"type": "mlflow", "tracking_uri": url}]))
    (problem,) = caught.value.problems
    assert problem.startswith("telemetry.trackers.0.tracking_uri: looks like a secret")
    assert url not in problem


@pytest.mark.parametrize("name", ["Authorization", "Proxy-Authorization", "cookie"])
def test_a_header_with_a_secret_is_refused(name: str) -> None:
    """`{"headers": {"Authorization": "Bearer …"}}` is how many clients are given a key."""
    assert list(found_in({"kwargs": {"headers": {name: "Bearer x"}}}))


def test_two_trackers_of_one_place_are_refused() -> None:
    """Both would find the run by its id, and each value would be there twice."""
    for place in ({"type": "wandb"}, {"type": "mlflow", "tracking_uri": "https://h", "experiment": "e"}):
        with pytest.raises(
            ConfigError, match=r"telemetry\.trackers\.1: sends to the same place as telemetry\.trackers\.0"
        ):
            check_tree(_tree(telemetry__trackers=[place, place | {"name": "b"}]))
    check_tree(_tree(telemetry__trackers=["wandb", "mlflow", {"type": "wandb", "project": "b"}]))


def test_what_is_no_secret_is_left_alone() -> None:
    """Names of variables, counts of tokens, keys of data, and everything outside kwargs and extra_args."""
    kwargs = {
        "api_key_env": "JUDGE_KEY", "max_tokens": 7, "token": 5, "stop_token": "</s>", "hash_key": "id", "key": "x",
        "secret": "apple", "password": None, "pwd": "", "tokenizer": "t", "pad_token": "p",
        "api_key": "JUDGE_KEY_ENV", "auth_token": "${JUDGE_TOKEN}", "client-secret": "$KEY",
        "end_token": "<|endoftext|>", "answer_key": "the_solution_column",
        "cache_key": "data/Judge_2024_v1_answers.jsonl", "base": "https://user@h:80/v1?max_tokens=5",
        "db": "postgresql://me:$DB_PASSWORD@h/x", "text": "as in http://u:p@h of old",
    }  # fmt: skip
    check_tree(_tree(reward__functions=[{"path": "mine.py:score", "kwargs": kwargs}]))
    assert not list(
        found_in({"inference": {"api_key": "x", "engine": {"extra_args": ["--max-model-len", "5", "--api-key"]}}})
    )
