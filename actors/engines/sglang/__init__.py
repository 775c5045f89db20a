"""SGLang as an engine: an existing server behind the actor's HTTP. The engine never starts a server.

compat    supported version of SGLang, and the options a server needs
client    HTTP client of the server
answers   requests in SGLang's terms, and answers as completions: pure functions
engine    all of these as an `Engine`
"""

from typing import TYPE_CHECKING

from bus.run_folder import scratch_of
from schemas.config import RunConfig
from schemas.config.sglang_engine import SglangEngineConfig

if TYPE_CHECKING:
    from actors.engines.protocol import Engine


def make(config: RunConfig, engine: SglangEngineConfig, name: str, server_index: int) -> "Engine":
    """Make the engine of an inference actor; the arguments are those of `actors.assembly.ENGINES`."""
    from actors.engines.sglang.engine import SglangEngine

    scratch = scratch_of(config, name, own=False)
    return SglangEngine(config.model, engine, config.weights.update_mode, scratch, server_index)
