"""What the actors stand on: ledger, bus, weights, telemetry."""

import re
from typing import Literal

from pydantic import Field, field_validator

from schemas.config.base import Section

UpdateMode = Literal["drain", "interrupt", "inflight"]


class LedgerConfig(Section):
    """The packer's SQLite ledger."""

    path: str = ""
    """File of the ledger; `output_dir/ledger.sqlite` where empty. A local disk: WAL does not work on NFS or Lustre."""
    sync: Literal["process", "node"] = "process"
    """`process` survives kill -9 of the packer; `node` survives power loss (fsync at each commit)."""
    keep_steps: int = Field(0, ge=0)
    """Newest steps whose groups are kept at least, for `actors replay`; since the oldest checkpoint all are."""
    commit_timeout: float = Field(60.0, gt=0)
    """Seconds for which a commit is tried again when the disk is full or the file locked, before the run fails."""


class BusConfig(Section):
    """ZeroMQ sockets."""

    control: str = "ipc"
    """The packer's control address, the only one that is configured (P0): `ipc` (one host), or `tcp://host:port`."""
    host: str = "127.0.0.1"
    """Address that data sockets bind to when control is tcp."""
    advertise_host: str | None = None
    """Name under which others reach this machine; `host` where empty."""
    high_water_mark: int = Field(64, ge=1)
    """Messages queued per data edge and side; bounds memory, never staleness."""
    socket_buffer_bytes: int | None = Field(None, ge=1)
    """Kernel buffer per data socket; the system's default where empty."""
    beat_interval: float = Field(1.0, gt=0)
    """Seconds between beats where nothing changes."""
    lease: float = Field(3.0, gt=0)
    """Seconds without a beat after which a peer counts as gone (P8)."""
    resend_after: float = Field(30.0, gt=0)
    """Seconds until an unsettled group is sent again to a peer that still lives; doubles (P13)."""
    peer_timeout: float = Field(1800.0, gt=0)
    """Seconds of the packer's silence after which an actor gives up."""
    keys: str = ""
    """Folder of the keys with which every tcp socket is encrypted and closed to strangers (`actors keys new DIR` makes
    one; docs/security.md); empty: no encryption, and so nothing beyond loopback."""
    allow_plaintext: bool = False
    """Without keys, let sockets bind and connect beyond loopback all the same."""

    @field_validator("control")
    @classmethod
    def _is_address(cls, control: str) -> str:
        port = re.fullmatch(r"tcp://(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", control)
        # `inproc` joins threads of one process and is for tests.
        if control not in ("ipc", "inproc") and not (port and 0 < int(port[1]) < 65536):
            raise ValueError("must be 'ipc' or 'tcp://host:port'")
        return control


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine alone; a name other than localhost counts as reachable."""
    return host in ("localhost", "[::1]", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


class WeightsConfig(Section):
    """How new weights reach the engines."""

    channel: Literal["filesystem", "rendezvous"] = "filesystem"
    """`filesystem`: versioned directories, switched atomically. `rendezvous`: the trainer broadcasts to all engines at
    once (gloo, through the hosts' memory, where each engine keeps a copy); nothing is written."""
    directory: str = ""
    """Where versions lie; on one host /dev/shm where empty, else `output_dir/weights`. What an engine lays out for a
    server of its own that reads files lies beside it; in /dev/shm where empty."""
    keep: int = Field(3, ge=2)
    """Newest versions kept, on disk or in the trainer's memory."""
    bucket_bytes: int = Field(8 << 20, ge=1)
    """Of one broadcast of the rendezvous channel. Engines check a bucket while the next ones are on the wire."""
    update_mode: UpdateMode = "interrupt"
    """What happens to completions in the making: finish first, go on under the new weights with KV recomputed, or go on
    with the KV they have."""
    timeout: float = Field(120.0, gt=0)
    """Seconds until an update is given up: in which members have not met, nothing has come, or an engine has not
    switched."""


class TelemetryConfig(Section):
    """Logs, metrics, samples."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe lines shown."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """`auto`: for people on a terminal, JSON elsewhere."""
    metrics_host: str = "127.0.0.1"
    """Address of /metrics."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /metrics; 0: any free one, written to `output_dir/metrics_targets.json`."""
    sample_groups_per_step: int = Field(1, ge=0)
    """Groups per step written to samples.jsonl."""
