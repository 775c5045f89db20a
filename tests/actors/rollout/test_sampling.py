"""Sampling parameters on their way from the configuration to the engines."""

from pathlib import Path
from typing import Any

from actors.engines.fake import FakeEngine
from actors.engines.http.client import CompletionClient
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import SampleRequest
from actors.engines.sglang.answers import generate_body
from actors.engines.vllm.answers import sampling_params
from actors.ledger import ExampleRef, Group
from actors.ledger.replies import ticket_of
from actors.packer.settings import settings_of
from bus import codec
from schemas.config import RunConfig
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.sampling import SamplingParams
from schemas.messages import EnginePeer, PolicyVersion, RolloutDirective, Ticket
from tests.actors.engines.engines import WAIT
from tests.ring.harness import ring_config
from tests.schemas.messages.examples import EXAMPLES, decoded

OTHER: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.875,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "min_tokens": 3,
}
"""A value besides the default for each parameter."""


class Recording(FakeEngine):
    """A fake engine that keeps the requests, and answers as if all had the usual distribution."""

    asked: SampleRequest

    def submit(self, request: SampleRequest) -> Any:
        """Keep it."""
        self.asked = request
        return super().submit(SampleRequest(request.prompt_ids, request.num_completions, 4, request.seed))


def config_with(folder: Path, **rollout: Any) -> RunConfig:
    """A run with these sampling parameters."""
    return ring_config(folder, rollout={**rollout, "group_size": 2, "max_tokens": 12})


def sent(config: RunConfig, policy: PolicyVersion | None = None) -> Ticket:
    """The ticket of a group of the first step, as a rollout actor reads it from the wire."""
    group = Group(0 if policy is None else -1, ExampleRef("reverse_text", 0, "key"), 9, 2, 0, policy)
    directive = EXAMPLES["rollout_directive"].model_copy(update={"tickets": [ticket_of(group, settings_of(config))]})
    found = decoded([bytes(frame) for frame in codec.encode(directive)])
    assert isinstance(found, RolloutDirective)
    return found.tickets[0]


async def test_every_parameter_of_the_configuration_reaches_every_engine(tmp_path: Path) -> None:
    """Over ticket and HTTP to the engine in the actor, and on to vLLM's and SGLang's own requests."""
    assert set(OTHER) == set(SamplingParams.model_fields)
    ticket = sent(config_with(tmp_path, **OTHER, stop=["x"], ignore_eos=True))
    engine = Recording(FakeEngineConfig())
    server, client = CompletionServer(engine, "tiny", "b1", "127.0.0.1", 0, WAIT), CompletionClient("tiny", WAIT, 4)
    peer = EnginePeer(
        name="inference-0",
        boot_id="b1",
        url=f"http://127.0.0.1:{server.port}",
        policy=PolicyVersion(lineage=1, version=0),
        load=0,
    )
    try:
        await client.sample(peer, ticket, [3, 4], ["y", "x"])
    finally:
        await client.close()
        server.close()
        engine.close()
    assert engine.asked.sampling == SamplingParams(**OTHER)
    assert (engine.asked.stop, engine.asked.ignore_eos) == (("x", "y"), True)
    params = sampling_params(engine.asked, frozenset({2}))
    assert params.items() >= OTHER.items()
    assert (params["stop"], params["stop_token_ids"], params["ignore_eos"]) == (["x", "y"], [], True)
    params = generate_body(engine.asked, 0, 4, frozenset({2}), "salt")["sampling_params"]
    assert "min_tokens" not in params
    assert (params | {"min_tokens": params["min_new_tokens"]}).items() >= OTHER.items()
    assert (params["stop"], params["stop_token_ids"], params["ignore_eos"]) == (["x", "y"], [], True)


def test_evaluations_sample_the_whole_distribution_at_their_own_temperature(tmp_path: Path) -> None:
    """Cuts are for exploration; what is evaluated is the policy."""
    given = config_with(tmp_path, **OTHER, stop=["x"], ignore_eos=True)
    ticket = sent(given, PolicyVersion(lineage=1, version=0))
    assert ticket.sampling == SamplingParams(temperature=0.0)
    assert (ticket.stop, ticket.ignore_eos) == (["x"], False), "a stop string is part of the task"
