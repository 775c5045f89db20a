"""What a pool of workers runs, out of the configuration of an environment."""

from dataclasses import replace
from pathlib import Path

from actors.environments import adapters
from actors.environments.spec import EnvironmentSpec, Hosts, Limits
from schemas.config import RunConfig
from schemas.config.environments import AgentConfig, PackageConfig, PythonConfig
from schemas.config.services import BusConfig
from schemas.errors import ConfigError

ADAPTERS = Path(adapters.__file__).parent
PROGRAM_PROCESSES = 64
"""Default limit of processes of an agent that is a program, as in the adapter."""


def spec_of(config: PythonConfig | PackageConfig, bus: BusConfig, owner: str) -> EnvironmentSpec:
    """Return path, options, limits and place of an environment's workers.

    Args:
        config: the environment.
        bus: keys for environment hosts.
        owner: name of the actor.
    """
    limits = config.limits
    options = config.worker_options if isinstance(config, PackageConfig) else config.options
    processes = limits.processes
    if isinstance(config, AgentConfig) and config.command:
        path = f"{ADAPTERS / 'agent_command'}.py:Env"
        options = options | {"command": config.command} | ({"image": config.image} if config.image else {})
        # each program has a limit of its own (option `processes`); that of the worker must not end all of them
        processes = max(processes, config.episodes_per_worker * (1 + options.get("processes", PROGRAM_PROCESSES)) + 1)
    else:
        path = config.path if isinstance(config, PythonConfig) else f"{ADAPTERS / config.adapter}.py:Env"
    return EnvironmentSpec(
        name=config.label,
        path=path,
        options=options,
        python=config.python,
        workers=config.workers,
        episodes=config.episodes_per_worker,
        directory=config.directory,
        variables=config.variables,
        limits=Limits(
            load=limits.load,
            reset=limits.reset,
            step=limits.step,
            score=limits.score,
            silence=limits.silence,
            processes=processes,
        ),
        hosts=Hosts(tuple(config.hosts), owner, bus) if config.hosts else None,
    )


def specs_of_host(config: RunConfig) -> dict[str, EnvironmentSpec]:
    """Return what an environment host runs, by label.

    Raises:
        ConfigError: no environment of the configuration has workers.
    """
    played = [one for one in config.environments if isinstance(one, PythonConfig | PackageConfig)]
    played = [one for one in played if not (isinstance(one, AgentConfig) and one.external)]
    if not played:
        raise ConfigError("environments: none of them has workers; actors run environment is for those with turns")
    return {one.label: replace(spec_of(one, config.bus, ""), hosts=None) for one in played}
