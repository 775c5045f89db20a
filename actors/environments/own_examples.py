"""Numbers of examples that environments have themselves."""

import asyncio

from actors.environments.errors import EpisodeError
from actors.environments.pool import Examples, describe
from actors.environments.specs import spec_of
from schemas.config.environments import AgentConfig, EnvironmentConfig, PackageConfig, PythonConfig
from schemas.config.services import BusConfig
from schemas.errors import ConfigError


def must_be_asked(config: EnvironmentConfig) -> bool:
    """Return whether only a worker of the environment can tell the number of examples."""
    if isinstance(config, AgentConfig) and not config.path:
        # a program, or a service, has no examples of its own
        return False
    if isinstance(config, PythonConfig):
        return config.rows is None and config.num_examples is None
    return isinstance(config, PackageConfig)


def own_examples(config: EnvironmentConfig, bus: BusConfig, owner: str) -> Examples:
    """Return the numbers of examples that an environment has itself; None where it does not say, or need not be asked.

    A worker is started for it, and ended: on this machine, or by an environment host for the actor `owner`.

    Raises:
        ConfigError: the environment can't be loaded.
    """
    unknown: Examples = {"train": None, "eval": None}
    if not must_be_asked(config):
        return unknown
    assert isinstance(config, PackageConfig | PythonConfig)
    try:
        return asyncio.run(describe(spec_of(config, bus, owner))) or unknown
    except EpisodeError as error:
        raise ConfigError(f"environments[]: {config.label}: {error}\n{error.trace}".rstrip()) from None
