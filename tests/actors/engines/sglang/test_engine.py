"""The engine in front of a stub server: gate, labels, versions, errors."""

from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.external.images import urls_of
from actors.engines.external.upstream import RefusedError
from actors.engines.protocol import Completion, EngineStoppedError, RequestError
from actors.models.served_images import Pixels
from actors.trajectories.forms import AnswerForm
from bus.weights import Weights
from bus.weights.filesystem import FilesystemPublisher, FilesystemReceiver
from schemas.errors import ConfigError
from tests import models
from tests.actors.engines.engines import WAIT, ask, policy, sample, seeing, until_stopped
from tests.actors.engines.sglang.conftest import MakeSglang
from tests.actors.engines.sglang.stub import StubServer, serving, token
from tests.actors.engines.test_contract import weights_of_version
from tests.actors.engines.vllm.test_engine import in_thread
from tests.actors.engines.vllm.test_process import wait_for
from tests.actors.models.vision.seeing import model_config
from tests.conftest import ModelFolder
from tests.folders import folder_at

PROMPT = [1, 8, 9, 3]
ADAPTER = Weights("adapter", {"a": torch.zeros(1)}, {"adapter_config.json": "{}"})


@pytest.fixture
def full() -> Weights:
    """Other weights of the model."""
    return weights_of_version(1)


def under_way(stub: StubServer, number: int = 1) -> None:
    """Until so many requests have reached the stub and stand there."""
    wait_for(lambda: stub.num_running() == number)


def test_a_completion_becomes_one_call(make_sglang: MakeSglang, stub: StubServer) -> None:
    """With seed, seed + 1, …; before the first version without a policy."""
    engine = make_sglang()
    request = ask(PROMPT, n=2, max_tokens=3, seed=5, top_k=7, min_p=0.1, stop=("=",), logit_bias={5: -1.5})
    [[first, second]] = sample(engine, request)
    assert first.token_ids == [token(5, i) for i in range(3)]
    assert first.logprobs == [stub.logprob(t) for t in first.token_ids]
    assert (second.token_ids, second.segments) == ([token(6, i) for i in range(3)], [])
    bodies = stub.asked("/generate")
    assert [body["input_ids"] for body in bodies] == [PROMPT] * 2
    params = bodies[0]["sampling_params"]
    assert (params["sampling_seed"], params["top_k"], params["min_p"], params["stop"]) == (5, 7, 0.1, ["="])
    assert (params["logit_bias"], params["stop_token_ids"]) == ({"5": -1.5}, [2])
    status = engine.status()
    assert (status.policy, status.num_running, status.generated_tokens, status.state) == (None, 0, 6, "clean")
    assert status.busy_seconds > 0


def test_images_go_with_each_completion_as_the_trainers_pixels(
    make_sglang: MakeSglang, stub: StubServer, model_folder: ModelFolder
) -> None:
    """One placeholder each, and the prompt that SGLang makes of them comes back; text goes without these fields."""
    engine, request = make_sglang(family="qwen3_vl"), seeing(n=2)
    [completions] = sample(engine, request)
    assert [len(completion.token_ids) for completion in completions] == [3] * 2
    bodies = stub.asked("/generate")
    assert [body["input_ids"] for body in bodies] == [[1, 30, models.IMAGE, 31, 5, models.IMAGE, 6]] * 2
    urls = urls_of(request, Pixels(model_config(model_folder("qwen3_vl"))))
    assert [body["image_data"] for body in bodies] == [urls] * 2
    assert [body["return_prompt_token_ids"] for body in bodies] == [True] * 2
    sample(engine, ask(PROMPT))
    assert {"image_data", "return_prompt_token_ids"}.isdisjoint(stub.asked("/generate")[2])


def test_a_server_whose_images_have_other_tokens_is_refused(make_sglang: MakeSglang, stub: StubServer) -> None:
    """Its completions would be of another prompt than the trainer's; other requests go on."""
    engine = make_sglang(family="qwen3_vl")
    told = {5: "SGLang makes 10 tokens of the 2 images, and 15 of the prompt; this run makes 8", None: "does not tell"}
    for stub.tokens_per_image, words in told.items():
        with pytest.raises(RequestError, match=f"^images: .*{words}"):
            engine.submit(seeing()).result(WAIT)
    assert sample(engine, ask(PROMPT))[0][0].token_ids
    assert engine.status().state == "clean"


def test_images_without_a_place_of_their_own_are_refused_before_the_server_is_asked(
    make_sglang: MakeSglang, stub: StubServer
) -> None:
    """A model of text alone; a place without tokens of an image; a token of images that the policy has sampled."""
    with pytest.raises(RequestError, match=r"images: the model sees none; model\.path"):
        make_sglang().submit(seeing())
    engine, request = make_sglang(family="qwen3_vl"), seeing()
    elsewhere = replace(request.images[0], start=1)
    with pytest.raises(RequestError, match=f"has no tokens with the id {models.IMAGE} from 1 on"):
        engine.submit(replace(request, images=(elsewhere,)))
    with pytest.raises(RequestError, match=f"the prompt has 1 times token {models.IMAGE} outside of its images"):
        engine.submit(replace(request, prompt_ids=[*request.prompt_ids, models.IMAGE])).result(WAIT)
    assert stub.asked("/generate") == []


def test_an_interrupted_completion_goes_on_with_its_images(make_sglang: MakeSglang, stub: StubServer) -> None:
    """The rest is asked for behind the whole prompt, with each image in its place."""
    engine = make_sglang(lora=True, family="qwen3_vl")
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    future = engine.submit(seeing(max_tokens=6))
    under_way(stub)
    engine.load(policy(2), ADAPTER, WAIT)
    engine.load(policy(3), ADAPTER, WAIT)
    stub.holding = False
    [completion] = future.result(WAIT)
    assert [start for start, _, _ in completion.segments] == [0, 2]
    assert len(completion.token_ids) == 6
    first, second = stub.asked("/generate")
    assert second["input_ids"] == [*first["input_ids"], *completion.token_ids[:2]]
    assert second["image_data"] == first["image_data"]


def test_without_chance_one_call_serves_all(make_sglang: MakeSglang, stub: StubServer) -> None:
    """All completions are the same one."""
    [completions] = sample(make_sglang(), ask(PROMPT, n=3, temperature=0.0))
    assert len(stub.asked("/generate")) == 1
    assert completions[0] == completions[1] == completions[2]


def test_ends_are_told_apart(make_sglang: MakeSglang) -> None:
    """The end of sequence has no reason, a stop token of the request is one; alternatives come best first."""
    engine = make_sglang()
    stop = token(0, 2)
    [[stopped]] = sample(engine, ask(PROMPT, stop_token_ids=(stop,), num_top_logprobs=2))
    assert (len(stopped.token_ids), stopped.finish_reason, stopped.stop_reason) == (3, "stop", stop)
    first = stopped.token_ids[0]
    assert [tokens for tokens, _ in stopped.top_logprobs[0]] == [first, first + 1]
    [[ended]] = sample(make_sglang(eos=stop), ask(PROMPT))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("mode", "pause", "flush"), [("interrupt", "retract", True), ("inflight", "in_place", False)])
def test_full_weights_are_switched_while_the_server_stands(
    make_sglang: MakeSglang, stub: StubServer, full: Weights, mode: str, pause: str, flush: bool, tmp_path: Path
) -> None:
    """Pause, load with the label, go on; a request under way has both versions; each has its own salt."""
    engine = make_sglang(mode=mode)
    engine.load(policy(3), full, WAIT)
    stub.holding = True
    future = engine.submit(ask(PROMPT))
    wait_for(lambda: stub.num_sampled == 2)
    stub.calls.clear()
    assert engine.load(policy(4), full, WAIT) > 0
    stub.holding = False
    assert stub.paths() == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    [update], [paused] = stub.asked("/update_weights_from_disk"), stub.asked("/pause_generation")
    assert (paused["mode"], update["flush_cache"]) == (pause, flush)
    assert update["weight_version"].endswith(":1.4.2")
    assert future.result(WAIT)[0].segments == [(0, 1, 3), (2, 1, 4)]
    assert engine.status().policy == policy(4)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 4)]
    assert stub.asked("/generate")[-1]["cache_salt"] == update["weight_version"]
    assert not (tmp_path / "run" / "scratch" / "1.4.2").exists()  # the server has read it


def test_with_drain_running_requests_end_first(make_sglang: MakeSglang, stub: StubServer, full: Weights) -> None:
    """New ones wait; one that does not end in time leaves the old version serving."""
    engine = make_sglang(mode="drain")
    engine.load(policy(1), full, WAIT)
    stub.holding = True
    old = engine.submit(ask(PROMPT))
    under_way(stub)
    with pytest.raises(TimeoutError, match=r"within 0.1 s \(weights.timeout, weights.update_mode drain\)"):
        engine.load(policy(2), full, 0.1)
    assert (engine.status().policy, engine.status().state) == (policy(1), "clean")
    later = in_thread(lambda: engine.load(policy(2), full, WAIT))
    wait_for(lambda: not engine._gate.is_set())
    new = engine.submit(ask(PROMPT))
    stub.holding = False
    later.result(WAIT)
    assert [future.result(WAIT)[0].segments for future in (old, new)] == [[(0, 1, 1)], [(0, 1, 2)]]


def test_a_server_that_refuses_to_pause_goes_on_with_the_old_version(
    make_sglang: MakeSglang, stub: StubServer, full: Weights
) -> None:
    """Nothing has been overwritten, so requests are let through again; the next update is as good as any."""
    engine = make_sglang()
    engine.load(policy(1), full, WAIT)
    stub.refuse["/pause_generation"] = (500, {"message": "not now"})
    with pytest.raises(RefusedError, match="not now"):
        engine.load(policy(2), full, WAIT)
    stub.refuse.clear()
    assert stub.paths()[-1] == "/continue_generation"
    assert engine.status().state == "clean"
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 1)]
    engine.load(policy(3), full, WAIT)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 3)]


def test_the_server_reads_the_channels_own_files(
    make_sglang: MakeSglang, stub: StubServer, full: Weights, tmp_path: Path
) -> None:
    """Nothing is written a second time."""
    engine, publisher = make_sglang(), FilesystemPublisher(folder_at(tmp_path / "weights"), keep=2)
    manifest = publisher.publish(policy(3), full)
    engine.load(policy(3), FilesystemReceiver(tmp_path).receive(manifest), WAIT)
    assert stub.asked("/update_weights_from_disk")[0]["model_path"] == manifest.uri
    assert not (tmp_path / "run" / "scratch").exists()


def test_weights_of_another_model_are_refused_before_anything_is_touched(
    make_sglang: MakeSglang, stub: StubServer, full: Weights
) -> None:
    """The server would silently keep what a file lacks."""
    engine = make_sglang()
    stub.calls.clear()
    full.tensors.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        engine.load(policy(1), full, WAIT)
    with pytest.raises(ValueError, match="publishes adapter weights, this engine holds full"):
        engine.load(policy(1), ADAPTER, WAIT)
    assert (stub.paths(), engine.status().state) == ([], "clean")


def test_an_update_that_fails_leaves_a_dirty_engine_that_serves_nobody(
    make_sglang: MakeSglang, stub: StubServer, full: Weights
) -> None:
    """The server stays paused, requests wait, and a whole version makes it clean again."""
    engine = make_sglang()
    stub.calls.clear()
    stub.refuse["/update_weights_from_disk"] = (400, {"success": False, "message": "half read"})
    with pytest.raises(ValueError, match="SGLang answers 400 to /update_weights_from_disk: half read"):
        engine.load(policy(1), full, WAIT)
    assert (engine.status().state, engine.status().policy) == ("dirty", None)
    assert "/continue_generation" not in stub.paths()
    waiting = engine.submit(ask(PROMPT))
    stub.refuse.clear()
    engine.load(policy(2), full, WAIT)
    assert waiting.result(WAIT)[0].segments == [(0, 1, 2)]


@pytest.mark.parametrize("lora", [False, True])
def test_weights_changed_behind_our_back_quarantine_the_engine(
    make_sglang: MakeSglang, stub: StubServer, full: Weights, lora: bool
) -> None:
    """As after a restart of the server: no answer is given out, and all are sampled again once a version is loaded."""
    engine, weights = make_sglang(lora=lora), ADAPTER if lora else full
    engine.load(policy(1), weights, WAIT)
    stub.label = "default"
    stub.adapters.clear()
    futures = [engine.submit(ask(PROMPT, seed=i)) for i in range(3)]
    wait_for(lambda: engine.status().state == "quarantined")
    assert engine.status().policy is None
    assert not any(future.done() for future in futures)
    stub.adapters["policy-1.1.1"] = ""  # which the engine still counts
    engine.load(policy(1), weights, WAIT)
    assert [future.result(WAIT)[0].segments for future in futures] == [[(0, 1, 1)]] * 3
    assert (engine.status().state, engine.status().policy) == ("clean", policy(1))


def test_an_adapter_is_loaded_beside_the_old_one(make_sglang: MakeSglang, stub: StubServer, tmp_path: Path) -> None:
    """Without a pause; a request under way ends under its version, new ones are the new one's."""
    engine = make_sglang(lora=True)
    assert engine.holds_two_versions
    engine.load(policy(1), ADAPTER, WAIT)
    stub.calls.clear()
    stub.holding = True
    old = engine.submit(ask(PROMPT))
    under_way(stub)
    engine.load(policy(2), ADAPTER, WAIT)
    new = engine.submit(ask(PROMPT))
    under_way(stub, 2)
    assert [body["lora_path"] for body in stub.asked("/generate")] == ["policy-1.1.1", "policy-1.2.2"]
    assert "/pause_generation" not in stub.paths()
    assert (tmp_path / "run" / "scratch" / "1.1.1" / "adapter_model.safetensors").exists()
    stub.holding = False
    assert [future.result(WAIT)[0].segments for future in (old, new)] == [[(0, 1, 1)], [(0, 1, 2)]]
    engine.load(policy(3), ADAPTER, WAIT)
    assert sorted(stub.adapters) == ["policy-1.2.2", "policy-1.3.3"]
    assert not (tmp_path / "run" / "scratch" / "1.1.1").exists()


def test_a_third_version_takes_over_what_the_first_one_still_does(make_sglang: MakeSglang, stub: StubServer) -> None:
    """Two tokens by version 1, the rest by version 2, which serves at that moment; they join at the seam."""
    engine = make_sglang(lora=True)
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    old = engine.submit(ask(PROMPT, n=2, max_tokens=5, seed=40))
    wait_for(lambda: stub.num_sampled == 4)
    engine.load(policy(2), ADAPTER, WAIT)
    engine.load(policy(3), ADAPTER, WAIT)
    stub.holding = False
    first, second = old.result(WAIT)
    assert first.segments == second.segments == [(0, 1, 1), (2, 1, 2)]
    assert first.token_ids[:2] == [token(40, 0), token(40, 1)]
    assert [len(c.token_ids) for c in (first, second)] == [5, 5]
    rest = stub.asked("/generate")[2:]
    assert sorted(body["input_ids"] for body in rest) == sorted(PROMPT + c.token_ids[:2] for c in (first, second))
    assert {(body["lora_path"], body["sampling_params"]["max_new_tokens"]) for body in rest} == {("policy-1.2.2", 3)}


def test_a_completion_of_a_demanded_form_begins_again_after_an_interruption(
    make_sglang: MakeSglang, stub: StubServer
) -> None:
    """Behind the tokens so far the server would begin the form anew; with its own seed the completion is the same."""
    engine = make_sglang(lora=True, max_loras=2)
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    form = AnswerForm("json_schema", '{"type": "object"}')
    old = engine.submit(ask(PROMPT, n=2, max_tokens=5, seed=40, form=form))
    under_way(stub, 2)
    engine.load(policy(2), ADAPTER, WAIT)
    engine.load(policy(3), ADAPTER, WAIT)
    stub.holding = False
    completions = old.result(WAIT)
    assert [c.token_ids for c in completions] == [[token(40 + n, i) for i in range(5)] for n in range(2)]
    bodies = stub.asked("/generate")
    assert len(bodies) == 4
    assert all(body["input_ids"] == PROMPT for body in bodies)
    assert all(body["sampling_params"]["json_schema"] == form.text for body in bodies)


def test_an_adapter_that_the_server_refuses_leaves_the_old_one(make_sglang: MakeSglang, stub: StubServer) -> None:
    """In its words."""
    engine = make_sglang(lora=True)
    engine.load(policy(1), ADAPTER, WAIT)
    stub.refuse["/load_lora_adapter"] = (400, {"success": False, "error_message": "rank 64 is too large"})
    with pytest.raises(ValueError, match="rank 64 is too large"):
        engine.load(policy(2), ADAPTER, WAIT)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 1)]


def test_what_a_life_before_has_left_is_cleaned_up(make_sglang: MakeSglang, stub: StubServer) -> None:
    """A pause in the middle of an update, and adapters under names that come again; others stay."""
    stub.paused = True
    stub.adapters |= {"policy-1.1.1": "/gone", "somebody-else": "/there"}
    engine = make_sglang(lora=True)
    assert list(stub.adapters) == ["somebody-else"]
    engine.load(policy(1), ADAPTER, WAIT)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 1)]


def test_a_request_that_cannot_be_served_is_an_error_in_words(make_sglang: MakeSglang, stub: StubServer) -> None:
    """Length is checked here, since the server would cut the completion short without a word."""
    engine = make_sglang()
    with pytest.raises(RequestError, match=r"max_tokens: 4 prompt tokens and 61 new ones exceed 64"):
        engine.submit(ask(PROMPT, max_tokens=61))
    assert len(sample(engine, ask(PROMPT, max_tokens=None))[0][0].token_ids) == 60
    with pytest.raises(RequestError, match="prompt: token ids must be from 0 to 29"):
        engine.submit(ask([30]))
    stub.shortest = 5
    with pytest.raises(RequestError, match="max_tokens: SGLang ended a completion after 5 tokens of 8"):
        engine.submit(ask(PROMPT)).result(WAIT)
    stub.refuse["/generate"] = (400, {"error": {"message": "at most 32 stop strings are allowed"}})
    with pytest.raises(RequestError, match=r"^at most 32 stop strings are allowed$"):
        engine.submit(ask(PROMPT)).result(WAIT)
    stub.refuse["/generate"] = (503, {"object": "error", "message": "The request queue is full."})
    with pytest.raises(EngineStoppedError, match=r"503 .* queue is full"):
        engine.submit(ask(PROMPT)).result(WAIT)


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ({"output_token_logprobs": [(None, 4, None)]}, "logits are not finite"),
        ({"output_token_logprobs": []}, "1 tokens with 0 logprobs"),
    ],
)
def test_tokens_without_logprobs_are_nobodys(
    make_sglang: MakeSglang, stub: StubServer, meta: Any, problem: str
) -> None:
    """What is no number comes as null."""
    engine = make_sglang()
    spans = [{"version": stub.label, "start": 0, "end": 1}]
    meta |= {"finish_reason": {"type": "length"}, "weight_versions": spans}
    stub.refuse["/generate"] = (200, {"output_ids": [4], "meta_info": meta})
    with pytest.raises(EngineStoppedError, match=problem):
        engine.submit(ask(PROMPT, max_tokens=1)).result(WAIT)


def test_a_cancelled_request_is_aborted_in_the_server(make_sglang: MakeSglang, stub: StubServer) -> None:
    """By its ids, and the engine is free."""
    engine = make_sglang()
    stub.holding = True
    future = engine.submit(ask(PROMPT, n=4))
    under_way(stub, 4)
    assert engine.status().num_running == 4
    future.cancel()
    wait_for(lambda: engine.status().num_running == 0 and len(stub.asked("/abort_request")) == 4)
    assert {body["rid"] for body in stub.asked("/abort_request")} == {b["rid"] for b in stub.asked("/generate")}
    with pytest.raises(CancelledError):
        future.result(WAIT)


def test_a_server_that_is_gone_stops_the_engine(make_sglang: MakeSglang, stub: StubServer) -> None:
    """Requests under way fail, status raises, and so does all that comes later."""
    engine = make_sglang()
    stub.holding = True
    future = engine.submit(ask(PROMPT))
    under_way(stub)
    stub.close()
    with pytest.raises(EngineStoppedError, match="SGLang at http"):
        future.result(WAIT)
    assert "SGLang at http" in until_stopped(engine)
    with pytest.raises(EngineStoppedError):
        engine.submit(ask(PROMPT))


@pytest.mark.parametrize(
    ("info", "lora", "problem"),
    [
        ({"version": "0.5.22"}, False, r"is version 0.5.22, this engine is for 0.5.23"),
        ({"disaggregation_mode": "decode"}, False, "--disaggregation-mode decode"),
        ({"enable_lora": False}, True, r"serves no adapters \(model.lora\); start it with --enable-lora"),
        ({"dp_size": 2}, True, "--dp-size 2"),
        ({"max_loaded_loras": 1}, True, "--max-loaded-loras 1 adapters, inference.engine.max_loras is 2"),
        ({"version": "0.5.23.post1", "enable_lora": False, "dp_size": 2}, False, None),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_by_name(
    make_sglang: MakeSglang, stub: StubServer, info: Any, lora: bool, problem: str | None
) -> None:
    """With what to start it with."""
    stub.info |= info
    if problem is None:
        make_sglang(lora=lora)
        return
    with pytest.raises(ConfigError, match=problem):
        make_sglang(lora=lora)


def test_keys_come_from_the_environment(make_sglang: MakeSglang, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for samplers, one for those who change weights; a wrong or missing one is named."""
    with serving(api_key="one", admin_api_key="two") as guarded:
        with pytest.raises(ConfigError, match=r"inference.engine.api_key_env: .* 401 .* Unauthorized"):
            make_sglang(urls=[guarded.url])
        with pytest.raises(
            ConfigError, match=r"inference.engine.api_key_env: the environment variable SGLANG_KEY is not set"
        ):
            make_sglang(urls=[guarded.url], api_key_env="SGLANG_KEY")
        monkeypatch.setenv("SGLANG_KEY", "one")
        with pytest.raises(ConfigError, match=r"inference.engine.admin_api_key_env: .* 401"):
            make_sglang(urls=[guarded.url], api_key_env="SGLANG_KEY")
        monkeypatch.setenv("SGLANG_ADMIN", "two")
        engine = make_sglang(urls=[guarded.url], api_key_env="SGLANG_KEY", admin_api_key_env="SGLANG_ADMIN")
        assert isinstance(sample(engine, ask(PROMPT))[0][0], Completion)


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_configured(
    make_sglang: MakeSglang, stub: StubServer
) -> None:
    """The error names the key; an actor without a server is refused."""
    stub.refuse["/server_info"] = (503, None)
    with pytest.raises(EngineStoppedError, match=r"after 0.5 s \(inference.engine.startup_timeout\)"):
        make_sglang(startup_timeout=0.5)
    with pytest.raises(ConfigError, match=r"inference.engine.urls: has none for inference-0"):
        make_sglang(urls=[])


def test_adapters_that_others_use_are_waited_for_no_longer_than_configured(
    make_sglang: MakeSglang, stub: StubServer
) -> None:
    """SGLang unloads one only when nobody uses it; the error names the key."""
    stub.adapters["policy-1.1.1"] = "/there"
    stub.used_by_others.add("policy-1.1.1")
    with pytest.raises(EngineStoppedError, match=r"could not be taken over within 0.5 s \(inference.engine.startup"):
        make_sglang(lora=True, startup_timeout=0.5)
