"""The quickstart on hosts with a bad network between them.

Delay, loss, packets out of order, narrow wires, IPv6 alone, NAT, and addresses that change while the run goes on. Hosts
are network namespaces; switch.py delays, loses and reorders their packets in place of tc's netem, which many kernels
lack. At level 0 with the deterministic engine a run has the same bits whatever the network does, so each short run is
compared with one that nothing disturbs.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from schemas.config import RunConfig, load_config
from schemas.config.services import bracketed
from tests.ring.harness import check_promise, steps_recorded, wait_until
from tests.system.namespaces import Host, Network, behind, network
from tests.system.quickstart import quickstart

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
PORT = 5555
DATA_PORTS = range(41000, 41004)
STEPS, GROUPS = 9, 3
PATIENCE_SECONDS = 400.0
START_OVER = 75
"""Exit code of an actor that wants to be started again by its supervisor."""
FAR = {"delay": 0.05, "loss": 0.01}
"""A round trip of 100 ms; of 100 packets one is lost, in each direction."""
OUT_OF_ORDER = {"delay": 0.02, "reorder": 0.25}
NARROW = {"delay": 0.01, "rate": 2e6}
"""16 Mbit/s: 1.6 s for the weights of the quickstart's model."""
SAME_BITS = [
    f"trainer.max_steps={STEPS}",
    "trainer.checkpoint.interval=3",
    f"packer.groups_per_step={GROUPS}",
    "packer.max_async_level=0",
    "rollout.group_size=4",
    "inference.engine.deterministic=true",
    "eval.num_prompts=0",
    "up.torch_threads.trainer=1",
    "up.torch_threads.inference=1",
]
HERE = ("packer-0", "trainer-0", "rollout-0")
THERE = ("inference-0", "reward-0")
"""With these on another host than those above, groups, scores, completions and weights cross."""


@dataclass
class Run:
    """A run whose actors are on several hosts; the packer's comes first."""

    folder: Path
    hosts: list[Host]
    overrides: Sequence[str]
    control: str
    """Name or address in `bus.control`."""
    started: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _start: dict[str, Callable[[], "subprocess.Popen[bytes]"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = self.folder / "keys"
        subprocess.run([sys.executable, "-m", "actors", "keys", "new", keys], check=True, capture_output=True)
        bus = {"control": f"tcp://{bracketed(self.control)}:{PORT}", "keys": str(keys), "resend_after": 5.0}
        self.path = quickstart(self.folder, bus=bus, weights={"channel": "rendezvous"})
        self.config: RunConfig = load_config(self.path, self.overrides)

    def start(self, host: Host, names: Sequence[str], *own: str) -> None:
        """`actors run` for each actor of a host, with overrides; by default the host's address."""
        own = own or (f"bus.host={host.address}", f"inference.host={host.address}")
        for name in names:
            words = ("-m", "actors", "run", name.partition("-")[0], "--config", self.path, "--name", name)
            log = self.folder / f"{name}.log"
            self._start[name] = partial(host.spawn, name, log, *words, *self.overrides, *own)
            self.started[name] = self._start[name]()

    def ended(self) -> dict[str, int]:
        """Exit codes of the actors that have ended; those that want to start over are started again."""
        codes = {name: process.poll() for name, process in self.started.items()}
        for name in [name for name, code in codes.items() if code == START_OVER]:
            self.started[name] = self._start[name]()
        return {name: code for name, code in codes.items() if code is not None and code != START_OVER}

    def reach(self, step: int) -> None:
        """Wait until a step is recorded."""

        def reached() -> bool:
            failed = [name for name, code in self.ended().items() if code]
            assert not failed, "".join(f"{name}: {self.log(name)[-3000:]}" for name in failed)
            return steps_recorded(self.config) >= step

        wait_until(reached, f"step {step}", PATIENCE_SECONDS)

    def log(self, name: str) -> str:
        """What an actor has written."""
        return (self.folder / f"{name}.log").read_text()

    def failed_updates(self) -> list[str]:
        """What trainer and engine have written about updates of the weights that were given up before the end."""
        lines = [*self.log("trainer-0").splitlines(), *self.log("inference-0").splitlines()]
        words = ("weights not sent", "weight update given up", "weights not loaded")
        return [line for line in lines if any(word in line for word in words) and "this engine leaves" not in line]

    def finish(self) -> None:
        """Wait until every actor has ended by itself with 0; then nothing is lost, dropped or trained twice."""
        wait_until(lambda: len(self.ended()) == len(self.started), "the end of all actors", PATIENCE_SECONDS)
        for name, code in self.ended().items():
            assert code == 0, f"{name}: {self.log(name)[-3000:]}"
        said = check_promise(self.config)
        assert said.dropped == {}
        assert said.trained == list(range(len(said.trained)))


def digest_of(config: RunConfig) -> str:
    """SHA-256 of the model at the end."""
    model = config.output / "checkpoints" / f"step_{config.trainer.max_steps}" / "model.safetensors"
    return hashlib.sha256(model.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the model after a run on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path, more = quickstart(folder), ["weights.channel=rendezvous", *SAME_BITS]
    command = [sys.executable, "-m", "actors", "up", path, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return digest_of(load_config(path, more))


def test_far_reordered_and_narrow_wires_change_no_bit(tmp_path: Path, undisturbed: str) -> None:
    """One run under three conditions, three steps each; no update of the weights is given up."""
    with network("10.77.0.1", "10.77.0.2") as made:
        here, there = made.hosts
        run = Run(tmp_path, made.hosts, SAME_BITS, here.address)
        made.become(**FAR)
        run.start(here, HERE)
        run.start(there, THERE)
        for step, condition in ((3, OUT_OF_ORDER), (6, NARROW)):
            run.reach(step)
            made.become(**condition)
        run.finish()
    assert digest_of(run.config) == undisturbed
    assert run.failed_updates() == []


def test_ipv6_alone_with_a_name_of_two_addresses(tmp_path: Path, undisturbed: str) -> None:
    """The packer's name stands for an address that no machine has, and for the packer's."""
    with network("fd77::1", "fd77::2") as made:
        here, there = made.hosts
        for host in made.hosts:
            host.know(["fd77::9 packer-host", f"{here.address} packer-host"])
        run = Run(tmp_path, made.hosts, SAME_BITS, "packer-host")
        run.start(here, HERE)
        run.start(there, THERE)
        run.finish()
    assert digest_of(run.config) == undisturbed


def test_rollouts_and_rewards_behind_nat(tmp_path: Path, undisturbed: str) -> None:
    """A rollout actor that nothing can connect to, and a reward actor that is reached through ports of its gateway."""
    with network("10.77.0.1", "10.77.0.2", "10.77.0.3") as made:
        here, one, other = made.hosts
        with behind(one, "10.78.1.2") as first, behind(other, "10.78.2.2", DATA_PORTS) as second:
            run = Run(tmp_path, made.hosts, SAME_BITS, here.address)
            run.start(here, ("packer-0", "trainer-0", "inference-0"))
            run.start(first, ("rollout-0",), f"bus.host={first.address}")
            ports = f"bus.data_ports={DATA_PORTS.start}-{DATA_PORTS[-1]}"
            run.start(second, ("reward-0",), "bus.host=0.0.0.0", f"bus.advertise_host={other.address}", ports)
            run.finish()
    assert digest_of(run.config) == undisturbed


def start_by_name(run: Run, made: Network) -> None:
    """Start the actors as on machines whose addresses may change: they listen everywhere, and are found by name."""
    know(made)
    for host, own, names in zip(made.hosts, ("packer-host", "worker-host"), (HERE, THERE), strict=True):
        listen = ("bus.host=0.0.0.0", f"bus.advertise_host={own}")
        run.start(host, names, *listen, "inference.host=0.0.0.0", f"inference.advertise_host={own}")


def know(made: Network) -> None:
    """Tell all hosts the current addresses, as a name server does."""
    names = ("packer-host", "worker-host")
    for host in made.hosts:
        host.know([f"{other.address} {name}" for other, name in zip(made.hosts, names, strict=True)])


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 1], ids=["packer", "workers"])
def test_the_address_of_a_host_changes_during_the_run(tmp_path: Path, undisturbed: str, place: int) -> None:
    """After step 3, with all that was on its way: its actors are found by name, and go on with the work they have.

    A trainer whose lease has ended meanwhile starts over from the checkpoint.
    """
    with network("10.77.0.1", "10.77.0.2") as made:
        run = Run(tmp_path, made.hosts, SAME_BITS, "packer-host")
        start_by_name(run, made)
        run.reach(3)
        made.move(made.hosts[place], "10.77.0.7")
        know(made)
        run.finish()
    assert digest_of(run.config) == undisturbed
