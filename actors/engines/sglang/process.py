"""Owned SGLang server: command line, keys, environment."""

import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

from actors.engines.external.interpreter import installed_version
from actors.engines.external.owned import OwnedServer
from actors.engines.http.access import secret
from actors.engines.sglang.compat import SUPPORTED, is_supported
from schemas.config.model import ModelConfig
from schemas.config.sglang_engine import SglangEngineConfig
from schemas.errors import ConfigError


class OwnServer(OwnedServer):
    """SGLang server of an inference actor.

    Loopback is open to every user of the machine, so the endpoints that change weights require a key of this engine.
    Keys travel in a file that only this user may read: every user can read a command line, and SGLang takes keys from
    the environment in no form.

    Raises:
        ConfigError: the interpreter has no SGLang, or another version.
    """

    def __init__(self, model: ModelConfig, config: SglangEngineConfig, log: Path) -> None:
        check_installed(config.python or sys.executable)
        self.api_key = secret(config.api_key_env, "inference.engine.api_key_env")
        self.admin_api_key = secrets.token_hex(16)
        # made with rights for this user alone
        descriptor, name = tempfile.mkstemp(prefix="grpo-actors-sglang-", suffix=".yaml")
        self._keys = Path(name)
        keys = {"admin-api-key": self.admin_api_key} | ({"api-key": self.api_key} if self.api_key else {})
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            # JSON is YAML
            json.dump(keys, file)
        try:
            # modules of the folder where the run was started may have the names of SGLang's
            environment = os.environ | {"PYTHONSAFEPATH": "1"}
            super().__init__("SGLang", log, lambda port: command(model, config, port, self._keys), environment)
        except BaseException:
            self.forget_keys()
            raise

    def forget_keys(self) -> None:
        """Remove the file with the keys, once the server has read them."""
        self._keys.unlink(missing_ok=True)

    def close(self, patience: float | None = None) -> None:
        """Stop the server: politely within `patience` seconds, otherwise by SIGKILL. May be called again."""
        self.forget_keys()
        super().close() if patience is None else super().close(patience)


def command(model: ModelConfig, config: SglangEngineConfig, port: int, keys: Path) -> list[str]:
    """Return the server's command line.

    Args:
        model: model of the policy.
        config: configuration of the engine.
        port: port on loopback.
        keys: file with the server's keys.
    """
    options: dict[str, object] = {
        "--config": keys,
        "--host": "127.0.0.1",
        "--port": port,
        "--model-path": model.path,
        "--dtype": model.dtype,
        "--context-length": config.max_model_len,
        "--tensor-parallel-size": config.tensor_parallel_size,
        "--data-parallel-size": config.data_parallel_size,
        "--mem-fraction-static": config.mem_fraction_static,
        "--quantization": config.quantization,
    }
    if model.lora is not None:
        options["--max-lora-rank"] = config.max_lora_rank or model.lora.rank
        options["--lora-target-modules"] = "all"
        # requests without an adapter count too
        options["--max-loras-per-batch"] = options["--max-loaded-loras"] = config.max_loras + 1
    flags = {
        "--enable-lora": model.lora is not None,
        "--enable-deterministic-inference": config.deterministic,
        "--enable-fp32-lm-head": model.has_exact_head,
        "--trust-remote-code": model.trust_remote_code,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    start = [config.python or sys.executable, "-m", "sglang.launch_server"]
    # `extra_args` last, so that they win
    return [*start, *given, *(name for name, on in flags.items() if on), *config.extra_args]


def check_installed(python: str) -> None:
    """Check that an interpreter has a supported SGLang.

    Raises:
        ConfigError: there is no such interpreter, no SGLang in its environment, or another version.
    """
    _, version = installed_version(python, ["sglang"])
    if not version:
        raise ConfigError(
            f"inference.engine.python: {python} has no SGLang; install sglang=={SUPPORTED} there, or name the "
            "interpreter of an environment that has it, or existing servers (inference.engine.urls)"
        )
    if not is_supported(version):
        raise ConfigError(f"inference.engine: {python} has SGLang {version}, this engine is for {SUPPORTED}")
