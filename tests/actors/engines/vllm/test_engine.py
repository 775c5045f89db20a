"""The engine in front of a stub server: gate, labels, versions, errors."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.external.images import urls_of
from actors.engines.external.upstream import RefusedError
from actors.engines.protocol import Completion, EngineStoppedError, RequestError, SampleRequest
from actors.engines.vllm.engine import VllmEngine
from actors.models.served_images import Pixels
from bus.weights import Weights
from bus.weights.filesystem import FilesystemPublisher, FilesystemReceiver
from schemas.errors import ConfigError
from schemas.messages import PolicyVersion
from tests import models
from tests.actors.engines.engines import WAIT, ask, policy, sample, seeing
from tests.actors.engines.vllm.conftest import MakeVllm, ServableModel
from tests.actors.engines.vllm.stub import StubServer, token
from tests.actors.engines.vllm.test_process import wait_for
from tests.actors.models.vision.seeing import model_config
from tests.conftest import ModelFolder
from tests.folders import folder_at

PROMPT = [1, 8, 9, 3]
ADAPTER = Weights("adapter", {"a": torch.zeros(1)}, {"adapter_config.json": "{}"})


@pytest.fixture
def full(servable_model: ServableModel) -> Weights:
    """Other weights of the model."""
    from safetensors.torch import load_file

    return Weights("full", load_file(servable_model(1) / "model.safetensors"))


def in_thread(work: Callable[[], Any]) -> "Future[Any]":
    """Its outcome, later."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_request_becomes_one_call(make_vllm: MakeVllm, stub: StubServer) -> None:
    """n completions with seed, seed + 1, …; before the first version without a policy."""
    engine = make_vllm()
    [[first, second]] = sample(engine, ask(PROMPT, n=2, max_tokens=3, seed=5))
    assert first == Completion([token(5, i) for i in range(3)], [-token(5, i) / 10 for i in range(3)], [], "length")
    assert second.token_ids == [token(6, i) for i in range(3)]
    [body] = stub.asked("/inference/v1/generate")
    assert (body["token_ids"], body["sampling_params"]["seed"], body["sampling_params"]["n"]) == (PROMPT, 5, 2)
    status = engine.status()
    assert (status.policy, status.num_running, status.generated_tokens, status.state) == (None, 0, 6, "clean")
    assert status.busy_seconds > 0


def test_images_go_once_for_all_completions_under_their_digests(
    make_vllm: MakeVllm, stub: StubServer, model_folder: ModelFolder
) -> None:
    """One placeholder each, and the prompt that vLLM makes of them comes back; without images nothing else is sent."""
    engine = make_vllm(path=model_folder("qwen3_vl"))
    request = seeing(n=3)
    [completions] = sample(engine, request)
    assert [len(completion.token_ids) for completion in completions] == [3] * 3
    [body] = stub.asked("/inference/v1/generate")
    assert body["token_ids"] == [1, models.VISION_START, models.IMAGE, models.VISION_END, 5, models.IMAGE, 6]
    urls = urls_of(request, Pixels(model_config(model_folder("qwen3_vl"))))
    assert body["content_parts"] == [
        {"type": "image_url", "url": url, "uuid": image.digest} for url, image in zip(urls, request.images, strict=True)
    ]
    sample(engine, ask(PROMPT))
    assert {"content_parts", "return_token_ids"}.isdisjoint(stub.asked("/inference/v1/generate")[1])


def test_a_server_whose_images_have_other_tokens_is_refused(
    make_vllm: MakeVllm, stub: StubServer, model_folder: ModelFolder
) -> None:
    """Its completions would be of another prompt than the trainer's; other requests go on."""
    engine = make_vllm(path=model_folder("qwen3_vl"))
    told = {5: "vLLM makes 10 tokens of the 2 images, and 15 of the prompt; this run makes 8", None: "does not tell"}
    for stub.tokens_per_image, words in told.items():
        with pytest.raises(RequestError, match=f"^images: .*{words}"):
            engine.submit(seeing()).result(WAIT)
    assert sample(engine, ask(PROMPT))[0][0].token_ids
    assert engine.status().state == "clean"


def test_an_interrupted_completion_goes_on_with_its_images(
    make_vllm: MakeVllm, stub: StubServer, model_folder: ModelFolder
) -> None:
    """The rest is asked for behind the whole prompt, with each image in its place."""
    engine = make_vllm(lora=True, path=model_folder("qwen3_vl"))
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    future = engine.submit(seeing(max_tokens=6))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    engine.load(policy(2), ADAPTER, WAIT)
    engine.load(policy(3), ADAPTER, WAIT)
    stub.release()
    [completion] = future.result(WAIT)
    assert [start for start, _, _ in completion.segments] == [0, 2]
    assert len(completion.token_ids) == 6
    first, second = stub.asked("/inference/v1/generate")
    assert second["token_ids"] == [*first["token_ids"], *completion.token_ids[:2]]
    assert second["content_parts"] == first["content_parts"]


def test_a_model_of_text_alone_refuses_images(make_vllm: MakeVllm, stub: StubServer) -> None:
    """Before the server is asked."""
    with pytest.raises(RequestError, match=r"images: the model sees none; model\.path"):
        make_vllm().submit(seeing())
    assert not stub.asked("/inference/v1/generate")


def test_pieces_are_whole_completions(make_vllm: MakeVllm) -> None:
    """Told before the future is done: whose tokens they are is only known at the end."""
    told: list[tuple[int, Completion]] = []
    request = SampleRequest(PROMPT, 2, 3, 0, on_piece=lambda number, piece: told.append((number, piece)))
    completions = make_vllm().submit(request).result(WAIT)
    assert told == list(enumerate(completions))


@pytest.mark.parametrize(
    ("device", "release", "take"), [("cuda", ["/release_kv_cache_memory"], ["/wake_up"]), ("cpu", [], [])]
)
def test_a_server_at_rest_has_given_its_cache_back(
    make_vllm: MakeVllm, stub: StubServer, device: str, release: list[str], take: list[str]
) -> None:
    """Running requests stop between two tokens, new ones wait here; on a CPU vLLM has no such mode, and only pauses."""
    stub.device, stub.in_parts = device, False
    engine = make_vllm()
    stub.calls.clear()
    engine.rest(WAIT)
    assert stub.paths() == ["/pause", *release]
    assert stub.asked("/pause") == [{"mode": "keep", "clear_cache": "false"}]
    future = engine.submit(ask(PROMPT))
    with pytest.raises(TimeoutError):
        future.result(0.3)
    assert not stub.asked("/inference/v1/generate")
    engine.wake(WAIT)
    assert future.result(WAIT)[0].token_ids
    assert stub.paths()[1 + len(release) :] == [*take, "/resume", "/inference/v1/generate"]


def test_a_server_that_does_not_rest_in_time_is_told(make_vllm: MakeVllm, stub: StubServer) -> None:
    """The actor ends with it, and its supervisor starts another server."""
    engine = make_vllm()
    stub.silent.add("/pause")
    with pytest.raises(TimeoutError):
        engine.rest(0.3)


@pytest.mark.parametrize(("mode", "wanted"), [("interrupt", "true"), ("inflight", "false"), ("drain", "true")])
def test_full_weights_are_switched_while_the_server_stands(
    make_vllm: MakeVllm, stub: StubServer, full: Weights, mode: str, wanted: str
) -> None:
    """Pause, reload, label, resume; each version has a salt of its own in the prefix cache."""
    engine = make_vllm(mode=mode)
    stub.calls.clear()
    assert engine.load(policy(4), full, WAIT) > 0
    reset = ["/reset_prefix_cache"] if wanted == "true" else []
    assert stub.paths() == ["/pause", *reset, "/collective_rpc", "/update_weight_version", "/resume"]
    assert stub.asked("/pause") == [{"mode": "wait" if mode == "drain" else "keep", "clear_cache": wanted}]
    assert engine.status().policy == policy(4)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 4)]
    engine.load(policy(4), full, WAIT)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 4)]
    salts = [body["cache_salt"] for body in stub.asked("/inference/v1/generate")]
    assert salts == ["1.4.1", "1.4.2"]
    assert stub.label.endswith(":1.4.2")


def test_the_server_reads_the_channels_own_files(
    make_vllm: MakeVllm, stub: StubServer, full: Weights, tmp_path: Path
) -> None:
    """Nothing is written a second time."""
    engine, publisher = make_vllm(), FilesystemPublisher(folder_at(tmp_path / "weights"), keep=2)
    manifest = publisher.publish(policy(3), full)
    engine.load(policy(3), FilesystemReceiver(tmp_path).receive(manifest), WAIT)
    [call] = stub.asked("/collective_rpc")
    assert call == {"method": "reload_weights", "kwargs": {"weights_path": manifest.uri}}
    assert not (tmp_path / "run" / "scratch").exists()


def test_a_tied_head_is_written_out_for_a_server_on_cpus(
    make_vllm: MakeVllm, stub: StubServer, servable_model: ServableModel, tmp_path: Path
) -> None:
    """Beside a link to the version's file: the server packs the head anew only if it gets one."""
    from safetensors.torch import load_file

    stub.device = "cpu"
    engine, source = make_vllm(tied=True), servable_model(1, tied=True)
    seen: dict[str, Any] = {}
    head = tmp_path / "run" / "scratch" / "1.1.1" / "head.safetensors"
    stub.before["/collective_rpc"] = lambda: seen.update(load_file(head))
    engine.load(policy(1), Weights("full", load_file(source / "model.safetensors"), directory=str(source)), WAIT)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(seen["lm_head.weight"], embedding)
    assert stub.asked("/collective_rpc")[0]["kwargs"]["weights_path"] == str(tmp_path / "run" / "scratch" / "1.1.1")
    assert not (tmp_path / "run" / "scratch" / "1.1.1").exists()  # the server has read it


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        (lambda t: t.update(other=torch.zeros(1)), r"unknown \['other'\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\)"),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_touched(
    make_vllm: MakeVllm, stub: StubServer, full: Weights, change: Any, problem: str
) -> None:
    """The server would silently keep what a file lacks."""
    engine = make_vllm()
    stub.calls.clear()
    change(full.tensors)
    with pytest.raises(ValueError, match=problem):
        engine.load(policy(1), full, WAIT)
    assert stub.paths() == []
    assert engine.status().state == "clean"
    with pytest.raises(ValueError, match="publishes adapter weights, this engine holds full"):
        engine.load(policy(1), ADAPTER, WAIT)


def test_a_reload_that_fails_leaves_a_dirty_engine_that_serves_nobody(
    make_vllm: MakeVllm, stub: StubServer, full: Weights
) -> None:
    """The server stays paused, requests wait, and a whole version makes it clean again."""
    engine = make_vllm()
    stub.calls.clear()
    stub.refuse["/collective_rpc"] = (500, {"error": {"message": "half read"}})
    with pytest.raises(ValueError, match="vLLM answers 500 to /collective_rpc: half read"):
        engine.load(policy(1), full, WAIT)
    assert (engine.status().state, engine.status().policy) == ("dirty", None)
    assert "/resume" not in stub.paths()
    waiting = engine.submit(ask(PROMPT))
    stub.refuse.clear()
    engine.load(policy(2), full, WAIT)
    assert waiting.result(WAIT)[0].segments == [(0, 1, 2)]
    assert engine.status().state == "clean"


def test_a_server_that_does_not_come_to_rest_in_time_goes_on(
    make_vllm: MakeVllm, stub: StubServer, full: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update mode drain: the old version serves on, and the error names both keys."""
    engine = make_vllm(mode="drain")
    engine.load(policy(1), full, WAIT)
    stub.silent.add("/pause")
    in_time = engine._in_time  # the pause alone: the server may take longer to resume
    monkeypatch.setattr(engine, "_in_time", lambda version, _: in_time(version, 0.1))
    with pytest.raises(TimeoutError, match=r"within 0.1 s \(weights.timeout, weights.update_mode drain\)"):
        engine.load(policy(2), full, WAIT)
    assert stub.paths()[-1] == "/resume"
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 1)]


def test_a_server_that_refuses_to_pause_goes_on_with_the_old_version(
    make_vllm: MakeVllm, stub: StubServer, full: Weights
) -> None:
    """Nothing has been overwritten, so requests are let through again; the next update is as good as any."""
    engine = make_vllm()
    engine.load(policy(1), full, WAIT)
    stub.refuse["/pause"] = (500, {"detail": "not now"})
    with pytest.raises(RefusedError, match="not now"):
        engine.load(policy(2), full, WAIT)
    stub.refuse.clear()
    assert stub.paths()[-1] == "/resume"
    assert engine.status().state == "clean"
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 1)]
    engine.load(policy(3), full, WAIT)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 3)]


def test_a_server_that_keeps_its_cache_goes_on_with_the_old_version(
    make_vllm: MakeVllm, stub: StubServer, full: Weights
) -> None:
    """Keys and values of old weights would be read under new ones without a sign."""
    engine = make_vllm()
    engine.load(policy(1), full, WAIT)
    stub.resets_cache = False
    with pytest.raises(RefusedError, match="/reset_prefix_cache: the keys and values of old weights stay"):
        engine.load(policy(2), full, WAIT)
    assert stub.asked("/reset_prefix_cache")[-1] == {"reset_running_requests": "true"}
    assert stub.paths()[-1] == "/resume"
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 1)]


def test_a_server_that_ends_in_the_middle_of_an_update_is_not_waited_for(
    make_vllm: MakeVllm, stub: StubServer, full: Weights
) -> None:
    """Its HTTP server would not answer before its core does: the actor is told as soon as that is known to be dead."""
    engine = make_vllm()
    stub.silent.add("/pause")
    loading = in_thread(lambda: engine.load(policy(1), full, 600.0))
    stub.healthy = False
    with pytest.raises(EngineStoppedError, match="/health answers 503"):
        loading.result(WAIT)


def test_weights_changed_behind_our_back_quarantine_the_engine(
    make_vllm: MakeVllm, stub: StubServer, full: Weights
) -> None:
    """No answer of theirs is given out; what was asked is sampled again when a version has been loaded."""
    engine = make_vllm()
    engine.load(policy(1), full, WAIT)
    stub.label = "someone-else"
    futures = [engine.submit(ask(PROMPT, seed=i)) for i in range(3)]
    wait_for(lambda: engine.status().state == "quarantined")
    assert engine.status().policy is None
    assert not any(future.done() for future in futures)
    engine.load(policy(1), full, WAIT)
    assert [future.result(WAIT)[0].segments for future in futures] == [[(0, 1, 1)]] * 3
    assert (engine.status().state, engine.status().policy) == ("clean", policy(1))
    assert len({body["cache_salt"] for body in stub.asked("/inference/v1/generate")}) == 2


def test_an_adapter_that_is_gone_from_the_server_quarantines_the_engine(make_vllm: MakeVllm, stub: StubServer) -> None:
    """As if the server had been started anew."""
    engine = make_vllm(lora=True)
    engine.load(policy(1), ADAPTER, WAIT)
    stub.adapters.clear()
    future = engine.submit(ask(PROMPT))
    wait_for(lambda: engine.status().state == "quarantined")
    engine.load(policy(1), ADAPTER, WAIT)
    assert future.result(WAIT)[0].segments == [(0, 1, 1)]


def test_an_adapter_is_loaded_beside_the_old_one(make_vllm: MakeVllm, stub: StubServer, tmp_path: Path) -> None:
    """Without a pause; a request under way ends under its version, new ones are the new one's."""
    engine = make_vllm(lora=True)
    assert engine.holds_two_versions
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    old = engine.submit(ask(PROMPT))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    engine.load(policy(2), ADAPTER, WAIT)
    new = engine.submit(ask(PROMPT))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 2)
    assert [body["model"] for body in stub.asked("/inference/v1/generate")] == ["policy-1.1.1", "policy-1.2.2"]
    assert "/pause" not in stub.paths()
    assert (tmp_path / "run" / "scratch" / "1.1.1" / "adapter_model.safetensors").exists()
    stub.release()
    assert [future.result(WAIT)[0].segments for future in (old, new)] == [[(0, 1, 1)], [(0, 1, 2)]]
    engine.load(policy(3), ADAPTER, WAIT)
    assert sorted(stub.adapters) == ["policy-1.2.2", "policy-1.3.3"]
    assert not (tmp_path / "run" / "scratch" / "1.1.1").exists()


def test_a_third_version_takes_over_what_the_first_one_still_does(make_vllm: MakeVllm, stub: StubServer) -> None:
    """Two tokens by version 1, then version 2, which serves at that moment; tokens and seeds join at the seam."""
    engine = make_vllm(lora=True)
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    old = engine.submit(ask(PROMPT, n=2, max_tokens=5, seed=40))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    engine.load(policy(2), ADAPTER, WAIT)
    engine.load(policy(3), ADAPTER, WAIT)
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 3)
    stub.release()
    first, second = old.result(WAIT)
    assert first.segments == second.segments == [(0, 1, 1), (2, 1, 2)]
    assert first.token_ids[:2] == [token(40, 0), token(40, 1)]
    assert [len(c.token_ids) for c in (first, second)] == [5, 5]
    bodies = stub.asked("/inference/v1/generate")[1:]
    assert sorted(body["token_ids"] for body in bodies) == sorted(PROMPT + c.token_ids[:2] for c in (first, second))
    assert {(body["model"], body["sampling_params"]["max_tokens"]) for body in bodies} == {("policy-1.2.2", 3)}


def test_with_drain_a_third_version_waits_for_the_first(make_vllm: MakeVllm, stub: StubServer) -> None:
    """Under weights.timeout; afterwards it is taken."""
    engine = make_vllm(lora=True, mode="drain")
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    old = engine.submit(ask(PROMPT))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    engine.load(policy(2), ADAPTER, WAIT)
    with pytest.raises(TimeoutError, match=r"weights.timeout, weights.update_mode drain"):
        engine.load(policy(3), ADAPTER, 0.2)
    assert engine.status().policy == policy(2)
    later = in_thread(lambda: engine.load(policy(3), ADAPTER, WAIT))
    stub.release()
    later.result(WAIT)
    assert old.result(WAIT)[0].segments == [(0, 1, 1)]
    assert "/abort_requests" not in stub.paths()


def test_a_server_that_refuses_to_be_taken_over_names_the_key_and_leaves_no_thread(
    make_vllm: MakeVllm, stub: StubServer
) -> None:
    """One with an API key, of an actor that has none."""
    stub.refuse["/v1/models"] = (401, {"error": "Unauthorized"})
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"inference.engine.api_key_env: vLLM answers 401 to /v1/models: Unau"):
        make_vllm(lora=True)
    wait_for(lambda: not set(threading.enumerate()) - before)


def test_an_engine_that_is_quarantined_while_it_waits_for_the_server_to_rest_stays_closed(
    make_vllm: MakeVllm, stub: StubServer, full: Weights
) -> None:
    """The switch fails, nothing was overwritten, and still nobody knows what the server holds."""
    engine = make_vllm()
    engine.load(policy(1), full, WAIT)
    stub.label, stub.holding = "someone-else", True
    future = engine.submit(ask(PROMPT))
    wait_for(lambda: stub.asked("/inference/v1/generate"))
    stub.calls.clear()
    stub.silent, stub.refuse = {"/pause"}, {"/pause": (500, {"detail": "no"})}
    loading = in_thread(lambda: engine.load(policy(2), full, WAIT))
    wait_for(lambda: stub.asked("/pause"))
    stub.release()
    wait_for(lambda: engine.status().state == "quarantined")
    stub.silent = set()
    with pytest.raises(ValueError, match="vLLM answers 500 to /pause"):
        loading.result(WAIT)
    assert engine.status().state == "quarantined"
    assert stub.paths() == ["/pause"]  # neither resumed nor asked for tokens
    stub.refuse.clear()
    engine.load(policy(2), full, WAIT)
    assert future.result(WAIT)[0].segments == [(0, 1, 2)]
    [body] = stub.asked("/inference/v1/generate")
    assert body["cache_salt"] == "1.2.3"


def test_a_server_is_taken_over_from_an_engine_that_ended_in_an_update(make_vllm: MakeVllm, stub: StubServer) -> None:
    """It stands still, and has adapters of that life under names that come again; what else it serves stays."""
    stub.adapters |= {"policy-1.1.1": "/gone", "somebody-else": "/there"}
    engine = make_vllm(lora=True)
    assert stub.paths() == ["/resume", "/v1/unload_lora_adapter", "/update_weight_version"]
    engine.load(policy(1), ADAPTER, WAIT)
    assert sorted(stub.adapters) == ["policy-1.1.1", "somebody-else"]
    assert stub.adapters["policy-1.1.1"] != "/gone"


def test_an_adapter_that_the_server_refuses_leaves_the_old_one(make_vllm: MakeVllm, stub: StubServer) -> None:
    """In its words."""
    engine = make_vllm(lora=True)
    engine.load(policy(1), ADAPTER, WAIT)
    stub.refuse["/v1/load_lora_adapter"] = (500, {"error": {"message": "rank 64 is too large"}})
    with pytest.raises(ValueError, match="rank 64 is too large"):
        engine.load(policy(2), ADAPTER, WAIT)
    assert engine.status().policy == policy(1)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 1)]


def test_a_request_that_cannot_be_served_is_an_error_in_the_servers_words(
    make_vllm: MakeVllm, stub: StubServer
) -> None:
    """Length is checked here, since the server would cut the completion short without a word; tokens as everywhere."""
    engine = make_vllm()
    with pytest.raises(RequestError, match=r"max_tokens: 4 prompt tokens and 61 new ones exceed 64"):
        engine.submit(ask(PROMPT, max_tokens=61))
    with pytest.raises(RequestError, match="prompt: is empty"):
        engine.submit(ask([]))
    with pytest.raises(RequestError, match="prompt: token ids must be from 0 to 29"):
        engine.submit(ask([1, 30]))
    stub.refuse["/inference/v1/generate"] = (400, {"error": {"message": "temperature is too high"}})
    with pytest.raises(RequestError, match=r"^temperature is too high$"):
        engine.submit(ask(PROMPT)).result(WAIT)
    stub.refuse["/inference/v1/generate"] = (500, {"detail": "out of memory"})
    with pytest.raises(EngineStoppedError, match=r"500 .* out of memory"):
        engine.submit(ask(PROMPT)).result(WAIT)


def test_a_cancelled_request_leaves_the_server(make_vllm: MakeVllm, stub: StubServer) -> None:
    """The connection is closed, and the engine is free."""
    engine = make_vllm()
    stub.holding = True
    future = engine.submit(ask(PROMPT, n=4))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    assert engine.status().num_running == 4
    future.cancel()
    wait_for(lambda: engine.status().num_running == 0)
    with pytest.raises(CancelledError):
        future.result(WAIT)
    stub.release()
    assert len(sample(engine, ask(PROMPT))[0]) == 1


@pytest.mark.parametrize("end", ["unhealthy", "gone"])
def test_a_server_that_is_gone_stops_the_engine(make_vllm: MakeVllm, stub: StubServer, end: str) -> None:
    """Requests under way fail, status raises, and so does all that comes later."""
    engine = make_vllm()
    stub.holding = True
    future = engine.submit(ask(PROMPT))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    stub.healthy = False
    if end == "gone":
        stub.close()
    with pytest.raises(EngineStoppedError):
        future.result(WAIT)

    def stopped() -> bool:
        try:
            engine.status()
        except EngineStoppedError as error:
            return stub.url in str(error)
        return False

    wait_for(stopped)
    with pytest.raises(EngineStoppedError):
        engine.submit(ask(PROMPT))


def test_closing_fails_what_is_under_way(make_vllm: MakeVllm, stub: StubServer, tmp_path: Path) -> None:
    """May be done twice; nothing that was written stays."""
    engine = make_vllm(lora=True)
    engine.load(policy(1), ADAPTER, WAIT)
    assert (tmp_path / "run" / "scratch").exists()
    stub.holding = True
    future = engine.submit(ask(PROMPT))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    engine.close()
    engine.close()
    assert not (tmp_path / "run" / "scratch").exists()
    for ended in (lambda: future.result(WAIT), lambda: engine.submit(ask(PROMPT))):
        with pytest.raises(EngineStoppedError, match="has been closed"):
            ended()


@pytest.mark.parametrize(
    ("attributes", "lora", "problem"),
    [
        ({"version": "0.31.0"}, False, r"has vLLM 0.31.0, this engine is for vLLM 0.32.\*"),
        ({"logprobs_mode": "raw_logprobs"}, False, "gives raw_logprobs; start it with --logprobs-mode"),
        ({"device": "cpu", "in_parts": True}, False, "--no-enable-chunked-prefill"),
        ({"refuse": {"/server_info": (404, {"detail": "Not Found"})}}, False, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_at_a_url_that_cannot_be_used_is_refused(
    make_vllm: MakeVllm, stub: StubServer, attributes: dict[str, Any], lora: bool, problem: str
) -> None:
    """With what it lacks."""
    for name, value in attributes.items():
        setattr(stub, name, value)
    with pytest.raises(ConfigError, match=problem):
        make_vllm(lora=lora)


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_configured(
    make_vllm: MakeVllm, stub: StubServer
) -> None:
    """The error names the key."""
    stub.healthy = False
    with pytest.raises(
        EngineStoppedError, match=r"/health answers 503 after 0.5 s \(inference.engine.startup_timeout\)"
    ):
        make_vllm(startup_timeout=0.5)


def test_text_and_messages_are_tokenised_as_the_rollouts_do(make_vllm: MakeVllm) -> None:
    """By the model's tokenizer; there is no chat template."""
    engine: VllmEngine = make_vllm()
    assert engine.tokenize("ef=") == [1, 8, 9, 3]
    assert (engine.detokenize([8, 9, 2]), engine.token_text(2)) == ("ef", "<eos>")
    with pytest.raises(RequestError, match=r"messages: .* no chat template"):
        engine.tokenize([{"role": "user", "content": "a"}])
    assert isinstance(engine.status().policy, PolicyVersion | None)
