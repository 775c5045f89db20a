"""metrics_targets.json: addresses of /metrics of all live actors, in the format of Prometheus' file_sd_configs.

With `telemetry.metrics_port: 0` ports are unknown before the start. Prometheus reads the file again whenever it
changes.
"""

import contextlib
import ipaddress
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from actors.telemetry.reporter import replace
from actors.telemetry.writer import Writer

HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")
Target = tuple[str, str, str]
"""Kind of the actor, its name, and the URL of its /metrics."""


def is_target(url: str) -> bool:
    """Return whether a peer's URL may be given to Prometheus: plain http(s), a host, a port and /metrics, nothing else.

    A peer names its own address, and Prometheus connects from another place in the network. Link-local addresses are
    refused, since clouds serve secrets there.
    """
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        return False
    plain = parts.scheme in ("http", "https") and parts.path == "/metrics" and not (parts.query or parts.fragment)
    if not plain or parts.username is not None or not port or not HOST.fullmatch(host):
        return False
    # a host name passes: only Prometheus knows the address behind the name, in its own network
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return not (address.is_link_local or address.is_multicast or address.is_unspecified)
    return True


class TargetsFile:
    """Writer of metrics_targets.json: only when targets change, atomically (readers find a complete file).

    Args:
        output: folder of the run.
        run_name: name of the run, for the label.
        writer: writer of the run's files.
    """

    def __init__(self, output: Path, run_name: str, writer: Writer) -> None:
        self._path, self._run_name, self._writer = output / "metrics_targets.json", run_name, writer
        self._named: list[Target] | None = None
        """Targets of the file as it is, and those left out."""
        self._written: list[Target] | None = None

    def follow(self, targets: Iterable[Target]) -> None:
        """Write the file if these targets are new. Targets without a usable URL are left out.

        Raises:
            WriteError: the file can't be written now.
        """
        named = sorted(targets)
        # a look at each URL of a thousand peers takes longer than all else that is written in a second
        if named == self._named:
            return
        wanted = [target for target in named if is_target(target[2])]
        # Prometheus reloads all targets at each write
        if wanted != self._written:
            entries = [
                {"targets": [urlsplit(url).netloc], "labels": {"run": self._run_name, "actor": actor, "name": name}}
                for actor, name, url in wanted
            ]
            text = json.dumps(entries, indent=1) + "\n"
            self._writer.write(self._path, wanted, partial(replace, self._path, text))
        # last: a write that has failed is tried again
        self._named, self._written = named, wanted
