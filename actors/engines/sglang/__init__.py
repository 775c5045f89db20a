"""SGLang as an engine: a server behind the actor's HTTP, started and owned by this engine or found at a URL.

process   owned server: command line, keys and environment (`external.owned` starts and stops it)
compat    supported version of SGLang, and the options a server needs
client    HTTP client of the server
answers   requests in SGLang's terms, and answers as completions: pure functions
engine    all of these as an `Engine`
"""

from typing import TYPE_CHECKING

from actors.process.output_dir import take
from bus.run_folder import scratch_of
from schemas.config import RunConfig
from schemas.config.sglang_engine import SglangEngineConfig

if TYPE_CHECKING:
    from actors.engines.protocol import Engine


def make(config: RunConfig, engine: SglangEngineConfig, name: str, server_index: int) -> "Engine":
    """Make the engine of an inference actor; the arguments are those of `actors.assembly.ENGINES`."""
    from actors.engines.sglang.engine import SglangEngine

    scratch, log_path = scratch_of(config, name, own=not engine.attached), None
    if not engine.attached:
        take(config)  # the server's log is written there
        log_path = config.output / "logs" / f"{name}.sglang.log"
    return SglangEngine(config.model, engine, config.weights.update_mode, scratch, server_index, log_path)
