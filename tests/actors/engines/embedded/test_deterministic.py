"""A deterministic engine gives a request the same bits in any company, and after a restart."""

import json
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import Completion, SampleRequest
from bus.weights import Weights
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from tests import models
from tests.actors.engines.engines import WAIT, MakeEngine, ask, held, load_in_thread, policy, sample
from tests.conftest import ModelFolder
from tests.marks import first_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
PROMPTS = ([1, 8, 3], [1, 20, 9, 14, 5, 6, 7, 3], [1, *(4 + i % 20 for i in range(33)), 3])
"""Short, of eight tokens, and longer than the blocks in which kernels add."""
LARGEST = ask([1, 9, 3], n=8, max_tokens=61, seed=77)
"""As many rows and as long as there may be: it makes the cache grow."""

Bits = list[tuple[list[int], bytes]]


def requests() -> list[SampleRequest]:
    """Twelve, of one to five completions, of 3 to 19 tokens, in several distributions."""
    return [
        ask(
            PROMPTS[i % 3],
            n=1 + i % 5,
            max_tokens=3 + 5 * i % 17,
            seed=100 * i,
            temperature=(1.0, 0.5, 0.0)[i % 3],
            top_p=(1.0, 0.8)[i // 2 % 2],
        )
        for i in range(12)
    ]


def bits(completions: list[Completion]) -> Bits:
    """Tokens and the bytes of their logprobs, which are float32."""
    return [(c.token_ids, np.array(c.logprobs, np.float32).tobytes()) for c in completions]


def alone(engine: EmbeddedEngine, asked: list[SampleRequest]) -> list[Bits]:
    """Each request when nothing else is there."""
    return [bits(sample(engine, request)[0]) for request in asked]


@pytest.fixture(
    params=[
        ("qwen3", "float32", 1),
        # two threads wait for each other wherever other tests run beside them
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (("qwen3", "bfloat16", 2), ("mistral", "float32", 2), ("gemma2", "float32", 2))
        ),
    ],
    ids=str,
)
def engine(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Iterator[EmbeddedEngine]:
    """Deterministic engines of some families, in both precisions, with one thread and two."""
    family, dtype, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield make_engine(family, dtype=dtype, deterministic=True)
    torch.set_num_threads(before)


# --- in company ------------------------------------------------------------------------------------------------------


def test_bits_are_the_same_alone_and_in_any_order(engine: EmbeddedEngine) -> None:
    """All at once, forwards, backwards and shuffled."""
    asked = requests()
    expected = alone(engine, asked)
    shuffled = random.Random(0).sample(range(len(asked)), len(asked))
    for order in (range(len(asked)), range(len(asked) - 1, -1, -1), shuffled):
        together = sample(engine, *(asked[i] for i in order))
        assert [bits(group) for group in together] == [expected[i] for i in order]


@pytest.mark.slow
def test_bits_are_the_same_for_requests_that_come_and_go_at_random_times(engine: EmbeddedEngine) -> None:
    """Three rounds; every third of the others is cancelled at some moment."""
    asked, draw = requests(), random.Random(1)
    expected = alone(engine, asked)
    for _ in range(3):
        futures, others = {}, []
        for i in draw.sample(range(len(asked)), len(asked)):
            others.append(engine.submit(ask(PROMPTS[i % 3], n=1 + i % 8, max_tokens=10, seed=draw.randrange(1000))))
            threading.Event().wait(draw.uniform(0, 0.02))
            futures[i] = engine.submit(asked[i])
            if i % 3 == 0:
                draw.choice(others).cancel()
        assert [bits(futures[i].result(WAIT)) for i in range(len(asked))] == expected


def test_bits_are_the_same_for_a_late_request_and_for_the_one_that_runs_when_it_comes(engine: EmbeddedEngine) -> None:
    """The second comes behind the third token of the first, when the cache is as large as it gets."""
    asked = [ask(PROMPTS[0], n=4, max_tokens=30), ask(PROMPTS[1], n=3, max_tokens=20, seed=9)]
    expected = alone(engine, asked)
    sample(engine, LARGEST)
    with held(engine, 3, asked[0]) as [first]:
        late = engine.submit(asked[1])
    assert [bits(future.result(WAIT)) for future in (first, late)] == expected


def test_without_the_flag_company_changes_bits(make_engine: MakeEngine) -> None:
    """So the tests above can fail; tokens and logprobs stay close all the same."""
    engine, asked = make_engine(), requests()
    expected = alone(engine, asked)
    found = [bits(group) for group in sample(engine, *asked)]
    if found == expected:
        pytest.skip("the kernels of this machine give rows the same bits in every shape that these requests have")
    assert [[tokens for tokens, _ in group] for group in found] == [[tokens for tokens, _ in g] for g in expected]


# --- weights and restarts --------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> Weights:
    """What a trainer would publish of a model with tied embeddings."""
    state = models.plain(folder).state_dict()
    return Weights("full", {name: tensor for name, tensor in state.items() if name != "lm_head.weight"})


def test_a_request_is_sampled_by_one_version_with_the_bits_that_it_has_alone(
    model_folder: ModelFolder, make_engine: MakeEngine
) -> None:
    """In mode interrupt too: an update waits for the request that runs, not for those that wait."""
    weights = [weights_of(model_folder(seed=seed)) for seed in (0, 1)]
    request, engine = ask(PROMPTS[1], n=3, max_tokens=20), make_engine(mode="interrupt", deterministic=True)
    expected = []
    for version in (1, 2):
        engine.load(policy(version), weights[version - 1], WAIT)
        expected += alone(engine, [request])
    engine.load(policy(1), weights[0], WAIT)
    with held(engine, 3, request) as [running]:
        waiting = engine.submit(request)
        done = load_in_thread(engine, 2, weights[1])
    assert done.result(WAIT) >= 0
    groups = [future.result(WAIT) for future in (running, waiting)]
    assert [{tuple(c.segments) for c in group} for group in groups] == [{((0, 1, 1),)}, {((0, 1, 2),)}]
    assert [bits(group) for group in groups] == expected
    assert expected[0] != expected[1]


def bits_of(folder: Path, dtype: Any = "float32") -> list[Bits]:
    """Those of the requests, each alone, with the engine as it starts from this folder."""
    config = EmbeddedEngineConfig(max_sequences=8, max_sequence_len=64, deterministic=True)
    engine = EmbeddedEngine(ModelConfig(path=str(folder), dtype=dtype, device="cpu"), config, "interrupt")
    try:
        return alone(engine, requests())
    finally:
        engine.close()


def test_bits_do_not_depend_on_where_a_file_has_its_weights(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The same weights behind a header that is 8 bytes longer, which moves all of them by 8 bytes."""
    tensors, found = load_file(model_folder() / "model.safetensors"), []
    for padding in ("", "8 bytes."):
        folder = shutil.copytree(model_folder(), tmp_path / f"model{len(padding)}")
        save_file(tensors, folder / "model.safetensors", {"format": "pt", "padding": padding})
        found.append(bits_of(folder))
    assert found[0] == found[1]


def print_bits(folder: str, dtype: str, threads: str) -> None:
    """What the test below runs in a process of its own."""
    torch.set_num_threads(int(threads))
    print(json.dumps([[(tokens, data.hex()) for tokens, data in group] for group in bits_of(Path(folder), dtype)]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first_of(["float32", "bfloat16"]))
def test_bits_are_the_same_after_a_restart_of_the_process(
    model_folder: ModelFolder, make_engine: MakeEngine, dtype: str
) -> None:
    """Here after the largest request and all at once, there alone and in a new process."""
    engine = make_engine(dtype=dtype, deterministic=True)
    sample(engine, LARGEST)
    here = [bits(group) for group in sample(engine, *requests())]
    code = f"import sys; from {__name__} import print_bits; print_bits(*sys.argv[1:])"
    arguments = [str(model_folder()), dtype, str(torch.get_num_threads())]
    output = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=WAIT * 4
    ).stdout
    assert [[(t, bytes.fromhex(data)) for t, data in group] for group in json.loads(output)] == here
