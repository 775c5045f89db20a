"""vLLM as an engine: a server behind the actor's HTTP, started and owned by this engine or found at a URL.

process   owned server: command line and environment (`external.owned` starts and stops it)
inside    our modules in an owned server: a guard of the endpoints for changes of weights, a setter of norms, and a
          loader of a base that the trainer holds in memory
norms     norms of a version with noise
compat    supported version of vLLM
client    HTTP client of the server
answers   the server's answers as completions, with the version of each token: pure functions
engine    all of these as an `Engine`
"""

from typing import TYPE_CHECKING

from actors.engines.trainers_base import trainers_base
from actors.process.devices import shares_gpu
from actors.process.output_dir import take
from bus.run_folder import scratch_of
from schemas.config import RunConfig
from schemas.config.vllm_engine import VllmEngineConfig

if TYPE_CHECKING:
    from actors.engines.protocol import Engine


def make(config: RunConfig, engine: VllmEngineConfig, name: str, server_index: int) -> "Engine":
    """Make the engine of an inference actor; the arguments are those of `actors.assembly.ENGINES`."""
    from actors.algorithms.noise import norm_noise  # imports torch
    from actors.engines.vllm.engine import VllmEngine
    from actors.engines.vllm.shared_gpu import beside_receiver, beside_trainer

    take(config)  # the server's log is written there
    log, scratch = config.output / "logs" / f"{name}.vllm.log", scratch_of(config, name, own=not engine.attached)
    memory = None
    if not engine.attached:
        memory = beside_trainer(config, engine) if shares_gpu() else beside_receiver(config, engine)
    noise = norm_noise(config)
    return VllmEngine(
        config.model,
        engine,
        config.weights.update_mode,
        log,
        scratch,
        server_index,
        noise,
        memory,
        takes_turns=config.up.colocate == "turns",
        base=trainers_base(config, engine.startup_timeout),
        tells_experts=config.trainer.router_replay,
    )
