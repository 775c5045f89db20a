"""Teacher that is served elsewhere."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.learner import TorchLearner
from actors.learner.teacher_server import token_logprobs
from schemas.config import RunConfig
from schemas.errors import RunFailedError
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.actors.learner.test_images import batch_of
from tests.actors.learner.test_reference_models import joined, plain_logprobs, trained_on
from tests.actors.models.vision.seeing import Piece, Seen, loaded, seen
from tests.conftest import ModelFolder


class Served:
    """Server with a model of transformers that answers in the form of vLLM; `faults` come first, one per request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.requests, self.keys = models.plain(folder), [], []
        self.faults: list[tuple[int, Any]] = []
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and content of an answer."""
        with self._lock:
            self.requests.append(body)
            if self.faults:
                return self.faults.pop(0)
            if path == "/v1/completions":
                return 200, {"choices": [{"text": "", "prompt_logprobs": self._logprobs(body["prompt"])}]}
            assert path == "/inference/v1/generate"
            prompt = self._seen(body)
            more = {
                "pixel_values": prompt.pixels,
                "image_grid_thw": prompt.grids,
                "mm_token_type_ids": prompt.types(len(prompt.ids)),
            }
            return 200, {"prompt_token_ids": prompt.ids, "prompt_logprobs": self._logprobs(prompt.ids, **more)}

    def _logprobs(self, ids: list[int], **more: Any) -> list[Any]:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids]), **more).logits[0].float().log_softmax(-1)
        rest = [{str(i): {"logprob": float(logprobs[at, i]), "rank": 1}} for at, i in enumerate(ids[1:])]
        return [None, *rest]

    def _seen(self, body: dict[str, Any]) -> Seen:
        """The prompt with as many tokens for each placeholder as the image has that was sent."""
        files = iter(base64.b64decode(part["url"].partition(",")[2]) for part in body["content_parts"])
        pieces: list[Piece] = []
        for token in body["token_ids"]:
            if token == models.IMAGE:
                pieces[-1:] = [next(files)]
            elif token != models.VISION_END:
                pieces.append(token)
        _, reader, cache = loaded(self.folder)
        return seen(pieces, cache, reader)


@contextmanager
def serving(teacher: Served) -> Iterator[str]:
    """The address of a teacher."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            teacher.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = teacher.answer(self.path, body)
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def served(model_folder: ModelFolder) -> Iterator[tuple[Served, str]]:
    """A teacher of another seed, and its address."""
    teacher = Served(model_folder("llama", seed=5))
    with serving(teacher) as url:
        yield teacher, url


def config_of(
    model_folder: ModelFolder, url: str, families: tuple[str, str] = ("qwen3", "llama"), **keys: Any
) -> RunConfig:
    """A run that is pulled towards the served teacher; families of policy and teacher."""
    policy, of_teacher = families
    teacher = {"path": str(model_folder(of_teacher, seed=5)), "dtype": "float32"}
    return run_config(
        model_folder(policy), teacher=teacher, loss={"type": "ref_kl"}, teacher_server={"url": url} | keys
    )


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_served_logprobs_are_those_of_transformers(
    served: tuple[Served, str], model_folder: ModelFolder, micro_batches: int
) -> None:
    """All tokens of all samples; one request for each, which has the model's name and no tokens to sample but one."""
    teacher, url = served
    samples = random_samples()
    learner = TorchLearner(config_of(model_folder, url))
    found = trained_on(learner, step_batch(samples, micro_batches=micro_batches))
    expected_T = plain_logprobs(model_folder("llama", seed=5), samples)
    torch.testing.assert_close(joined(found, "teacher_logprobs_T"), expected_T, rtol=0, atol=1e-5)
    assert sorted(one["prompt"] for one in teacher.requests) == sorted(s.prompt + s.completion for s in samples)
    assert {(one["model"], one["max_tokens"]) for one in teacher.requests} == {(str(model_folder("llama", seed=5)), 1)}
    assert teacher.keys == [None] * len(samples)
    assert learner.inexact


def test_faults_that_pass_are_asked_again(
    served: tuple[Served, str], model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overload and a restart of the server cost time alone; the key comes from the environment."""
    monkeypatch.setenv("TEACHER_KEY", "abc")
    teacher, url = served
    teacher.faults = [(503, "starting"), (429, "busy")]
    samples = random_samples()
    found = trained_on(TorchLearner(config_of(model_folder, url, api_key_env="TEACHER_KEY")), step_batch(samples))
    expected_T = plain_logprobs(model_folder("llama", seed=5), samples)
    torch.testing.assert_close(joined(found, "teacher_logprobs_T"), expected_T, rtol=0, atol=1e-5)
    assert len(teacher.requests) == len(samples) + 2
    assert set(teacher.keys) == {"Bearer abc"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((400, "prompt too long"), r"refuses \d+ tokens: HTTP 400: prompt too long"),
        ((401, "who"), r"HTTP 401: who \(trainer.teacher_server.api_key_env is not set\)"),
        ((200, {"choices": [{"text": "x"}]}), "no prompt_logprobs of the given tokens"),
        ((200, {"choices": [{"prompt_logprobs": [None]}]}), r"prompt_logprobs has 1 entries for \d+ tokens"),
        ((200, "no JSON"), "the server must be vLLM's"),
    ],
)
def test_a_refusal_ends_the_run_in_words(
    served: tuple[Served, str], model_folder: ModelFolder, fault: tuple[int, Any], words: str
) -> None:
    """Nothing is asked again for these, and no weight has changed."""
    teacher, url = served
    learner = TorchLearner(config_of(model_folder, url, max_concurrent=1))
    before = {name: tensor.clone() for name, tensor in learner.trained.state_dict().items()}
    teacher.faults = [fault]
    with pytest.raises(RunFailedError, match=words):
        learner.step(step_batch(random_samples()))
    assert len(teacher.requests) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.trained.state_dict().items())


def test_a_server_that_is_away_ends_the_run_after_its_time(model_folder: ModelFolder) -> None:
    """The words name the server, the limit and its key."""
    learner = TorchLearner(config_of(model_folder, "http://127.0.0.1:9", timeout=0.6))
    with pytest.raises(RunFailedError, match=r"127\.0\.0\.1:9 gave no logprobs within 0.6 s .*teacher_server.timeout"):
        learner.step(step_batch(random_samples()))


def test_tokens_of_another_temperature_are_no_number_of_the_server(
    served: tuple[Served, str], model_folder: ModelFolder
) -> None:
    """A group may have been sampled before the configuration was changed."""
    samples = random_samples()
    samples[0].temperature = 0.7
    with pytest.raises(RunFailedError, match="another temperature than 1"):
        TorchLearner(config_of(model_folder, served[1])).step(step_batch(samples))


def test_the_given_token_is_found_next_to_the_likeliest() -> None:
    """vLLM lists both where they differ."""
    entries = [None, {"7": {"logprob": -3.0}, "2": {"logprob": -0.1}}, {"4": {"logprob": -0.5}}]
    assert token_logprobs({"choices": [{"prompt_logprobs": entries}]}, [1, 7, 4]) == [-3.0, -0.5]


SEEING = ("qwen3_vl", "qwen3_vl")


@pytest.mark.parametrize("sequence_len", [48, 400])
def test_a_served_teacher_sees_the_images(model_folder: ModelFolder, sequence_len: int) -> None:
    """As one that the trainer loads; samples of text go on to the completions API."""
    teacher = Served(model_folder("qwen3_vl", seed=5))
    with serving(teacher) as url:
        config = config_of(model_folder, url, SEEING)
        (batch,) = batch_of(model_folder("qwen3_vl"), sequence_len)
        found = trained_on(TorchLearner(config), batch)
    tree = config.model_dump()
    tree["trainer"]["teacher_server"] = None
    here = trained_on(TorchLearner(RunConfig.model_validate(tree)), batch)
    ours, theirs = (joined(each, "teacher_logprobs_T") for each in (here, found))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    with_images = [request for request in teacher.requests if "token_ids" in request]
    assert len(with_images) == sum(bool(places) for places in batch.places_of_samples())
    assert 0 < len(with_images) < len(teacher.requests) == batch.prompt_lengths.size
    assert all(request["sampling_params"]["max_tokens"] == 1 for request in with_images)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((404, "Not Found"), r"HTTP 404: Not Found; samples with images need .*--enable-scale-out"),
        ((200, [1]), "vLLM does not tell the tokens of the prompt"),
        ((200, {"prompt_logprobs": [None]}), "vLLM does not tell the tokens of the prompt"),
        ((200, {"prompt_token_ids": [1, 2], "prompt_logprobs": [None]}), "vLLM makes 0 tokens of the . images"),
    ],
)
def test_a_server_without_images_ends_the_run_in_words(
    model_folder: ModelFolder, fault: tuple[int, Any], words: str
) -> None:
    """No number of another prompt gets into the loss."""
    teacher = Served(model_folder("qwen3_vl", seed=5))
    teacher.faults = [fault] * 99
    with serving(teacher) as url:
        learner = TorchLearner(config_of(model_folder, url, SEEING, max_concurrent=1))
        (batch,) = batch_of(model_folder("qwen3_vl"))
        with pytest.raises(RunFailedError, match=rf"trainer\.teacher_server.*{words}"):
            learner.step(batch)
