"""What a pool of workers runs, out of the configuration of an environment."""

from actors.environments.pool import EnvironmentSpec, Limits
from schemas.config.environments import EnvironmentBase, PythonConfig


def spec_of(config: EnvironmentBase) -> EnvironmentSpec:
    """Return path, options and limits of an environment's workers."""
    assert isinstance(config, PythonConfig)
    limits = config.limits
    return EnvironmentSpec(
        name=config.label,
        path=config.path,
        options=config.options,
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
            processes=limits.processes,
        ),
    )
