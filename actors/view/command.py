"""`actors view RUN …`: serve pages about runs until Ctrl-C."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiohttp import web

from actors.ops.screens.watch import config_of
from actors.process.tasks import task
from actors.view.access import token_for
from actors.view.catalogue import cache_folder
from actors.view.server import application
from actors.view.viewed_run import ViewedRun
from schemas.config.services import bracketed, without_brackets
from schemas.errors import ConfigError

SHUTDOWN_SECONDS = 1.0
"""Time for answers under way when the command ends."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at a catalogue that is being made."""


def serve(runs: Sequence[Path], host: str, port: int, cache: Path | None) -> int:
    """Serve pages about runs until SIGINT or SIGTERM; return 0.

    Args:
        runs: output_dirs, or files run.yaml.
        host: address to bind.
        port: port to bind; 0: any free one.
        cache: folder of the catalogues; None: below XDG_CACHE_HOME.

    Raises:
        ConfigError: a run or its catalogue can't be read, or the address can't be bound.
    """
    token = token_for(host)
    with _opened(runs, cache or cache_folder()) as viewed:
        asyncio.run(_serve(viewed, host, port, token))
    return 0


@contextlib.contextmanager
def _opened(runs: Sequence[Path], cache: Path) -> Iterator[list[ViewedRun]]:
    """Provide the runs for a block; a run that is named twice is shown once."""
    with contextlib.ExitStack() as stack:
        viewed: list[ViewedRun] = []
        folders = set()
        for run in runs:
            config = config_of(run, [])
            if config.output.resolve() not in folders:
                folders.add(config.output.resolve())
                viewed.append(ViewedRun(config, cache))
                stack.callback(viewed[-1].close)
        yield viewed


async def _serve(runs: list[ViewedRun], host: str, port: int, token: str) -> None:
    runner = web.AppRunner(application(runs, token), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    site = web.TCPSite(runner, without_brackets(host), port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"--host, --port: {host}:{port} can't be bound: {error.strerror}; --port 0 takes any free port"
        ) from error
    bound = runner.addresses[0][1]
    query = f"?token={token}" if token else ""
    print(f"http://{bracketed(without_brackets(host))}:{bound}/{query}", flush=True)
    if token:
        print("anybody with this address can read the runs, and without TLS also whoever sees the traffic", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await _tell_catalogues(runs, stop)
    await stop.wait()
    await runner.cleanup()


async def _tell_catalogues(runs: Sequence[ViewedRun], stop: asyncio.Event) -> None:
    """Tell how much of each run's lines is in its catalogue, until all of them are or the command ends."""
    for run in runs:
        with task(f"catalogue of {run.name}", unit="bytes") as making:
            while not stop.is_set():
                done, total = await asyncio.to_thread(run.catalogued)
                making.reach(done, total)
                if done >= total:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
