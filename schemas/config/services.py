"""Keys of the services under the actors: ledger, bus, weight transfer, telemetry."""

import re
from typing import Literal

from pydantic import Field, field_validator

from schemas.config.base import Section
from schemas.config.engine_base import WeightChannel
from schemas.config.resume_classes import Free
from schemas.config.trackers import MetricNames, TrackerConfig

UpdateMode = Literal["drain", "interrupt", "inflight"]


class LedgerConfig(Section):
    """The packer's SQLite ledger: the record of every group of the run."""

    path: Free[str] = ""
    """File of the ledger. Empty: `output_dir/ledger.sqlite`. The file must be on a local disk, since SQLite's WAL does
    not work on NFS or Lustre. An existing file of another kind is refused."""
    sync: Free[Literal["process", "node"]] = "process"
    """Faults that commits survive. `process`: kill -9 of the packer; a power loss may cost the newest commits. `node`:
    also a power loss, by an fsync at each commit."""
    keep_steps: Free[int] = Field(0, ge=0)
    """Number of newest steps whose groups are kept for `actors replay`. Groups since the oldest kept checkpoint are
    always kept."""
    commit_timeout: Free[float] = Field(60.0, gt=0)
    """Seconds of retries while a commit fails (disk full, file locked). After that the run fails."""


class BusConfig(Section):
    """Addresses, timeouts and keys of the ZeroMQ sockets between actors."""

    control: Free[str] = "ipc"
    """The packer's control address: `ipc` (one machine) or `tcp://host:port`. No other address needs to be configured:
    peers learn all others from the packer (protocol rule P0)."""
    host: Free[str] = "127.0.0.1"
    """Address that data sockets bind to if `control` is tcp: IPv4, IPv6, or `0.0.0.0` or `::` with `advertise_host`.
    With these two the packer binds the port of `control` on all addresses too: for a machine behind NAT, or one whose
    address may change."""
    advertise_host: Free[str | None] = None
    """Name or address under which other machines reach this one. A name is resolved again at each connection, to IPv6
    where the other machine's own `host` is IPv6, else to IPv4. Empty: `host`."""
    data_ports: Free[str] = ""
    """Port range of data sockets if `control` is tcp, for firewalls, e.g. `40000-40100`. Empty: any free ports."""
    high_water_mark: Free[int] = Field(64, ge=1)
    """Maximum number of messages queued at each end of a data connection. This limits memory only; `packer` limits how
    old groups may be."""
    socket_buffer_bytes: Free[int | None] = Field(None, ge=1)
    """Bytes of each kernel buffer (send, receive) of a data socket. Empty: the system's default."""
    beat_interval: Free[float] = Field(1.0, gt=0)
    """Seconds between two heartbeats of an actor, its reports to the packer. Changes are reported at once, in at most
    10 heartbeats per second."""
    lease: Free[float] = Field(3.0, gt=0)
    """Seconds without a heartbeat until a peer counts as gone and its work is given to others; at least 2 ×
    `beat_interval`."""
    resend_after: Free[float] = Field(30.0, gt=0)
    """Seconds until a sampled group is sent again if no live reward actor has reported it. The time doubles with each
    resend (protocol rule P13)."""
    peer_timeout: Free[float] = Field(1800.0, gt=0)
    """Seconds without an answer of the packer until an actor gives up and exits."""
    keys: Free[str] = ""
    """Directory of CURVE keys that encrypt every tcp socket and shut out peers without a listed key. `actors keys new
    DIR` creates one (docs/reference/security.md). Empty: no encryption, and tcp only on loopback."""
    allow_plaintext: Free[bool] = False
    """Permission for unencrypted tcp beyond loopback, for a network without other users."""

    @field_validator("host", "advertise_host")
    @classmethod
    def _is_bare(cls, host: str | None) -> str | None:
        return host if host is None else without_brackets(host)

    @field_validator("data_ports")
    @classmethod
    def _is_range(cls, ports: str) -> str:
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", ports)
        if ports and not (found and 0 < int(found[1]) <= int(found[2]) < 65536):
            raise ValueError("must be two ports, as 40000-40100")
        return ports

    @field_validator("control")
    @classmethod
    def _is_address(cls, control: str) -> str:
        bare = re.fullmatch(r"tcp://([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*):(\d{1,5})", control)
        # Kubernetes gives a pod its IPv6 address without brackets
        if bare:
            control = f"tcp://[{bare[1]}]:{bare[2]}"
        port = re.fullmatch(r"tcp://(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", control)
        # `inproc` connects threads of one process; tests use it, so the message below does not offer it
        if control not in ("ipc", "inproc") and not (port and 0 < int(port[1]) < 65536):
            raise ValueError("must be 'ipc' or 'tcp://host:port'")
        try:
            # name resolution encodes the host in the same way, and would fail in a thread long after the check
            control.removeprefix("tcp://").rpartition(":")[0].encode("idna")
        except UnicodeError:
            raise ValueError("must have a host whose parts between dots have 1 to 63 characters") from None
        return control


def without_brackets(host: str) -> str:
    """Return a host as sockets bind to it: `::1` for the IPv6 address `[::1]`."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def bracketed(host: str) -> str:
    """Return a host as an address with a port needs it: `[::1]` for the IPv6 address `::1`."""
    return f"[{without_brackets(host)}]" if ":" in host else host


def is_wildcard(host: str) -> bool:
    """Return whether a host means all addresses of a machine. A socket can bind to such a host; no peer can connect."""
    return without_brackets(host) in ("", "*", "0.0.0.0", "::")  # noqa: S104


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable from this machine only. Names other than localhost count as reachable."""
    return host in ("localhost", "[::1]", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


class WeightsConfig(Section):
    """Transfer of new weights from trainer to engines."""

    channel: Free[WeightChannel] = "filesystem"
    """Transport of the weights. `filesystem`: one directory per version, published atomically. `rendezvous`: the
    trainer broadcasts to all engines at once and writes no files (gloo, through host memory, where each engine keeps a
    copy). `device`: the same without the way through host memory; engines on the trainer's GPU copy from its memory
    (CUDA IPC), others receive by NCCL (on CPUs: shared memory, and gloo). Trainer and engines keep their copies on
    their GPUs. `rendezvous` and `device` not with engine `sglang`."""
    directory: Free[str] = ""
    """Parent of the run's weights folder `grpo-actors-UID-TAG`, which holds versions and the files that engines write
    for their servers. Several runs may share the parent; other files in it are left alone. Empty: /dev/shm on one
    machine, else `output_dir/weights`; files for a server started by its engine are always in /dev/shm."""
    keep: Free[int] = Field(3, ge=2)
    """Number of newest versions kept, in the weights folder (`filesystem`), in the trainer's memory (`rendezvous`), or
    on its device (`device`)."""
    bucket_bytes: Free[int] = Field(8 << 20, ge=1)
    """Bytes of one broadcast in channels `rendezvous` and `device`. Engines check one bucket while the next ones are on
    the wire."""
    update_mode: Free[UpdateMode] = "interrupt"
    """Treatment of running completions at an update. `drain`: finished under the old weights first. `interrupt`:
    continued under the new weights with a recomputed KV cache. `inflight`: continued under the new weights with the old
    KV cache."""
    timeout: Free[float] = Field(120.0, gt=0)
    """Time limit in seconds for each part of an update: until all members have connected, until the next bucket
    arrives, and until an engine has switched. The trainer also retries for this long to write a version to a full
    disk."""


class TelemetryConfig(Section):
    """Logs, metrics, samples of completions."""

    log_level: Free[Literal["debug", "info", "warning", "error"]] = "info"
    """Lowest level of log lines written."""
    log_format: Free[Literal["auto", "console", "json"]] = "auto"
    """Format of log lines. `auto`: console on a terminal, JSON elsewhere."""
    metrics_host: Free[str] = "127.0.0.1"
    """Address that the HTTP server of /metrics (Prometheus) binds to, in each actor."""
    metrics_port: Free[int] = Field(0, ge=0, le=65535)
    """Port of /metrics. `actors up` gives it to the first actor and the next ports to the others, in the order packer,
    trainer, inference, reward, rollout; under `actors run` each actor takes exactly this port. 0: any free port, listed
    in `output_dir/metrics_targets.json`."""
    sample_groups_per_step: Free[int] = Field(1, ge=0)
    """Groups per step written to `output_dir/samples.jsonl`. 0: none, also of evaluations."""
    sample_images_bytes: Free[int] = Field(256 << 20, ge=0)
    """Bytes of the images of these groups kept in `output_dir/sample_images`, for pages and reports. Images for which
    there is no room are left out and counted. 0: none are kept."""
    token_details: Free[int] = Field(0, ge=0)
    """Groups per step whose values per token (logprobs of engine and trainer, ratio, advantage, entropy, loss, rules
    that mask or clip) the trainer writes to `output_dir/tokens`: the first ones of the step, as in samples.jsonl. 0:
    none."""
    events_bytes: Free[int] = Field(16 << 20, ge=0)
    """Bytes of the newest events of each actor kept in `output_dir/events`, from which `actors trace` makes a timeline.
    0: none are recorded."""
    trackers: Free[list[TrackerConfig]] = []
    """Trackers that get the run's metrics, each by its name or with keys of its own, from a process of its own
    (`tracker`). Training waits for none of them."""
    names: Free[MetricNames] = "ours"
    """Names of metrics in trackers: those of metrics.jsonl, or the names that users of another system look for. Metrics
    without a name there keep ours."""
