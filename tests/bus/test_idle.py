"""A process without messages costs next to nothing: no thread of the bus turns round and round."""

import subprocess
import sys
from pathlib import Path

import pytest

from bus import keys
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
IDLE = """
import sys, time
from pathlib import Path
from bus.control import ControlServer
from bus.data import Inbox
from bus.topology import Addresses
from tests.ring.harness import ring_config
control, keys = sys.argv[1], sys.argv[2]
config = ring_config(Path("/nowhere"), bus={"control": control} | ({"keys": keys} if keys else {}))
inbox = Inbox("scored", Addresses(config), config.bus, "packer", "b")
server = ControlServer(control, lambda identity, heartbeat: None, bus=config.bus)
server.start()

def share():
    began, used = time.monotonic(), time.process_time()
    time.sleep(1.5)
    return (time.process_time() - used) / (time.monotonic() - began)

time.sleep(0.5)
bound = share()
inbox.close()
server.close()
time.sleep(0.5)
print(bound, share())
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_keys", [True, False], ids=["keys", "plaintext"])
def test_idle_sockets_and_closed_ones_leave_the_cores_alone(with_keys: bool, tmp_path: Path) -> None:
    """Bound tcp sockets without a message, and the process after they were closed, take a tenth of a core at most."""
    folder = ""
    if with_keys:
        keys.make(tmp_path / "keys")
        folder = str(tmp_path / "keys")
    arguments = [f"tcp://127.0.0.1:{free_port()}", folder]
    done = subprocess.run(
        [sys.executable, "-c", IDLE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    bound, closed = map(float, done.stdout.split())
    assert bound < 0.1, f"{bound:.2f} of a core while sockets are bound"
    assert closed < 0.1, f"{closed:.2f} of a core after they were closed"
