"""Actors from a fork server: as if `actors up` had started each as a program of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from actors.ops.up import forked
from actors.ops.up.child import Child
from actors.ops.up.forked import ALL_KINDS, MAX_DEATHS, ForkedProcess, ForkServer, ForkServers, computing_modules
from schemas.config import RunConfig
from tests.marks import first_of
from tests.processes import children, has_ended, look_at
from tests.ring.harness import ring_config, wait_until

PATIENCE = 60.0
STAND_IN = "program_of_a_test"
"""Module that puts a program of the test in the place of `actors`: it runs the code that is its argument."""
SAYS = """
import json, os, random, sys
import numpy
print(json.dumps({
    "parent": os.getppid(), "session": os.getsid(0), "group": os.getpgid(0), "pid": os.getpid(),
    "given": os.environ.get("GIVEN"), "removed": os.environ.get("REMOVED"), "kept": os.environ.get("KEPT"),
    "drawn": [random.random(), float(numpy.random.rand())],
}))
print("on stderr", file=sys.stderr)
"""
FULL = Path("/dev/full")
"""A file on a full disk."""
SLEEPS = "import time; time.sleep(600)"

Fork = Callable[..., ForkedProcess]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Variables of fork servers: REMOVED, KEPT, and the place of STAND_IN."""
    folder = tmp_path_factory.mktemp("stand-in")
    code = "from actors import cli\ncli.main = lambda command: exec(command[0], {}) or 0\n"
    (folder / f"{STAND_IN}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("REMOVED", "of the server")
        patch.setenv("KEPT", "of the server")
        yield


def ready(server: ForkServer) -> ForkServer:
    """A server once it is ready."""
    wait_until(server.is_ready, "the fork server")
    return server


def ended(server: ForkServer) -> None:
    """End a server, and wait for it."""
    server.close()
    wait_until(lambda: server.process.poll() is not None, "the end of the fork server")


@pytest.fixture(scope="module")
def server(variables: None) -> Iterator[ForkServer]:
    """A fork server of all tests that leave it alive."""
    one = ready(ForkServer([STAND_IN]))
    yield one
    ended(one)


@pytest.fixture
def own_server(server: ForkServer) -> Iterator[ForkServer]:
    """A fork server of one test."""
    one = ready(ForkServer([STAND_IN], server))
    yield one
    ended(one)


@pytest.fixture(scope="module")
def with_torch(server: ForkServer) -> Iterator[ForkServer]:
    """A fork server with torch."""
    one = ready(ForkServer([STAND_IN, "torch"], server))
    yield one
    ended(one)


def run(server: ForkServer, code: str, log: Path, inherited: Sequence[int] = (), **variables: str) -> ForkedProcess:
    """Fork a process that runs code."""
    environment = {name: value for name, value in os.environ.items() if name != "REMOVED"} | variables
    with log.open("ab") as file:
        return server.fork([code], environment, file.fileno(), inherited)


def end_of(process: ForkedProcess) -> int | None:
    """Wait for the exit of a process; return its exit code."""
    wait_until(lambda: process.poll() is not None, "the end of a process", PATIENCE)
    return process.returncode


def test_a_forked_process_is_a_child_with_a_session_variables_and_log_of_its_own(
    server: ForkServer, tmp_path: Path
) -> None:
    """As a program that was started by itself: parent, session, environment, output."""
    log = tmp_path / "log"
    process = run(server, SAYS, log, GIVEN="to this one")
    assert end_of(process) == 0
    said, complaint = log.read_text().splitlines()
    told = json.loads(said)
    assert told["parent"] == os.getpid()
    assert told["pid"] == told["session"] == told["group"] == process.pid
    assert (told["given"], told["removed"], told["kept"]) == ("to this one", None, "of the server")
    assert complaint == "on stderr"


def test_processes_draw_different_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    """Neither Python's nor numpy's generator has the same state in two forks."""
    for name in ("one", "two"):
        assert end_of(run(server, SAYS, tmp_path / name)) == 0
    one, two = (json.loads((tmp_path / name).read_text().splitlines()[0])["drawn"] for name in ("one", "two"))
    assert one[0] != two[0]
    assert one[1] != two[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os; os._exit(75)", 75),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import signal, os; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import sys; sys.exit('words')", 1),
        ("raise RuntimeError('of the code')", 1),
    ],
)
def test_an_exit_is_told_as_the_code_or_the_signal(
    server: ForkServer, tmp_path: Path, code: str, exit_code: int
) -> None:
    """As subprocess tells it; a text or a traceback is in the log."""
    assert end_of(run(server, code, tmp_path / "log")) == exit_code
    said = (tmp_path / "log").read_text()
    if "words" in code:
        assert said == "words\n"
    if "raise" in code:
        assert said.endswith("RuntimeError: of the code\n")


def test_inherited_descriptors_have_their_numbers(server: ForkServer, tmp_path: Path) -> None:
    """Also two that would take each other's place."""
    reading, writing = os.pipe()
    # the lowest numbers, which the server itself uses
    high = os.dup(writing)
    code = f"import os; os.write({writing}, b'one '); os.write({high}, b'two')"
    process = run(server, code, tmp_path / "log", (writing, high))
    os.close(writing)
    os.close(high)
    assert end_of(process) == 0
    with os.fdopen(reading, "rb") as pipe:
        # the end of the pipe comes: neither the server nor a process keeps a copy
        assert pipe.read() == b"one two"


def test_ps_shows_the_command(server: ForkServer, tmp_path: Path) -> None:
    """And not that of the fork server."""
    process = run(server, SLEEPS, tmp_path / "log")
    shown = f"{sys.executable} -P -m actors {SLEEPS}"
    wait_until(lambda: (found := look_at(process.pid)) and " ".join(found.command) == shown, "the title")
    process.send_signal(signal.SIGKILL)
    assert end_of(process) == -signal.SIGKILL


def test_signals_of_the_server_are_not_ignored_by_its_forks(server: ForkServer, tmp_path: Path) -> None:
    """The server ignores what ends a process; a fork of it does not."""
    process = run(server, f"print('on', flush=True); {SLEEPS}", tmp_path / "log")
    wait_until(lambda: (tmp_path / "log").read_text(), "the program")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        server.process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == -signal.SIGTERM
    assert end_of(run(server, "pass", tmp_path / "log")) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_just_after_the_start_is_not_lost(server: ForkServer, tmp_path: Path, number: signal.Signals) -> None:
    """Though the process has not begun yet."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("not run: these tests were started in the background, by a shell that has them ignore it")
    for _ in range(10):
        process = run(server, SLEEPS, tmp_path / "log")
        process.send_signal(number)
        # Python turns SIGINT into an exception
        assert end_of(process) in (-number, 1)


@pytest.mark.parametrize("code", ["raise RuntimeError", "raise SystemExit('words')", "print('words')"])
def test_on_a_full_disk_a_process_ends_all_the_same(own_server: ForkServer, code: str) -> None:
    """It is a fork, and would go on with the code of the server, or of `actors up`."""
    with FULL.open("ab") as full:
        process = own_server.fork([code], dict(os.environ), full.fileno())
    assert end_of(process) in (0, 1)
    assert own_server.is_ready()


def test_a_server_that_fails_on_a_full_disk_ends(server: ForkServer) -> None:
    """Its import fails, and its words can't be written."""
    with FULL.open("ab") as full:
        broken = ForkServer(["there_is_no_such_module"], server, full.fileno())
    wait_until(lambda: broken.process.poll() is not None, "its end")
    assert not broken.is_ready()


def test_where_orphans_can_not_be_adopted_a_program_is_started(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox may refuse it."""
    monkeypatch.setattr(forked, "_adopt", lambda adopts: None)
    monkeypatch.setattr("actors.ops.up.child.PROGRAM", (sys.executable, "-c"))
    child = Child("reward", "reward-0", dict(os.environ), tmp_path / "log")
    child.start(["print('here')"], (), server)
    assert isinstance(child.process, subprocess.Popen)
    assert child.process.wait(PATIENCE) == 0
    assert (tmp_path / "log").read_text() == "here\n"


def test_a_request_that_is_too_long_is_refused_and_the_server_lives(server: ForkServer, tmp_path: Path) -> None:
    """`Child.start` then starts a program, which has other limits."""
    with pytest.raises(OSError, match=r"a request of \d+ bytes for a fork server, 65535 at most"):
        run(server, "pass", tmp_path / "log", LONG="x" * (1 << 16))
    assert end_of(run(server, "pass", tmp_path / "log", LONG="x" * 50_000)) == 0


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose modules are on a disk that does not answer."""
    monkeypatch.setattr(forked, "READY_SECONDS", 0.2)
    servers = ForkServers(ring_config(tmp_path), ["packer"])
    server = servers._servers[forked.FIRST]
    server.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: servers.is_ready("packer"), "the way without")
    assert servers.of("packer") is None
    assert server.why_dead == "its modules were not imported within 0.2 s"
    wait_until(lambda: has_ended(server.process.pid), "its end")


def test_processes_live_on_without_their_server(own_server: ForkServer, tmp_path: Path) -> None:
    """Their exit code is told all the same."""
    process = run(own_server, "import time; time.sleep(2); raise SystemExit(5)", tmp_path / "log")
    own_server.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not own_server.is_ready(), "the news")
    assert own_server.dead
    assert end_of(process) == 5


def test_a_second_server_outlives_the_first(own_server: ForkServer, tmp_path: Path) -> None:
    """It has more modules, and is a child of this process."""
    second = ready(ForkServer([STAND_IN, "wave"], own_server))
    ended(own_server)
    process = run(second, "import sys; print('wave' in sys.modules)", tmp_path / "log")
    assert end_of(process) == 0
    assert (tmp_path / "log").read_text() == "True\n"
    found = look_at(second.process.pid)
    assert found is not None
    assert found.parent == os.getpid()
    ended(second)


@pytest.mark.slow
@pytest.mark.parametrize("threads", first_of(["2", "1", "3"]))
def test_torch_has_the_threads_of_the_variable(with_torch: ForkServer, tmp_path: Path, threads: str) -> None:
    """As in a program of its own, though it has read another value when it was imported."""
    code = "import torch; print(torch.get_num_threads())"
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    alone = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    process = run(with_torch, code, tmp_path / "log", OMP_NUM_THREADS=threads)
    assert end_of(process) == 0
    assert (tmp_path / "log").read_text() == alone.stdout


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sigchld", ["SIG_DFL", "SIG_IGN"])
def test_a_program_forks_its_servers_from_itself_while_it_has_one_thread(
    tmp_path: Path, threads: int, sigchld: str
) -> None:
    """With another thread it starts a program. Either way, it imports nothing from the working directory.

    What a fork prints goes to its log, also where the program has put a file in the place of stdout.
    """
    (tmp_path / "tabnanny.py").write_text("print('that of the working directory')")
    code = f"""
import os, signal, sys, threading
from actors.ops.up.forked import ForkServer
from tests.processes import look_at
signal.signal(signal.SIGCHLD, signal.{sigchld})
go_on = threading.Event()
for _ in range({threads - 1}):
    threading.Thread(target=go_on.wait, daemon=True).start()
with open("elsewhere", "w") as sys.stdout:
    server = ForkServer(["tabnanny"], stderr=2)
sys.stdout = sys.__stdout__
while not server.is_ready():
    assert not server.dead
with open("log", "ab") as log:
    process = server.fork(["--version"], dict(os.environ), log.fileno())
while process.poll() is None:
    pass
print(process.returncode, look_at(server.process.pid).command[-1] == "tabnanny")
server.close()
"""
    root = Path(__file__).parents[4]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.stderr) == (f"0 {threads > 1}\n", "")
    assert (tmp_path / "log").read_text().startswith("grpo-actors ")


def test_a_server_that_stands_still_is_given_up_and_forks_nothing_later(
    own_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Child.start` then starts a program: one process in all, and not two of one name."""
    monkeypatch.setattr(forked, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr("actors.ops.up.child.PROGRAM", (sys.executable, "-c"))
    own_server.process.send_signal(signal.SIGSTOP)
    child = Child("reward", "reward-0", dict(os.environ), tmp_path / "log")
    began = time.monotonic()
    child.start([f"print('here', flush=True); {SLEEPS}"], (), own_server)
    assert time.monotonic() - began < 10.0
    assert isinstance(child.process, subprocess.Popen)
    assert own_server.why_dead == "it has not answered within 0.5 s"
    wait_until(lambda: (tmp_path / "log").read_text(), "the program")
    wait_until(lambda: has_ended(own_server.process.pid), "the end of the server")
    ours = [one.pid for one in children(os.getpid()) if SLEEPS in " ".join(one.command)]
    assert ours == [child.process.pid]
    child.signal(signal.SIGKILL)
    child.process.wait()
    assert (tmp_path / "log").read_text() == "here\n"


@pytest.mark.slow
def test_servers_are_started_again_until_they_have_died_too_often(tmp_path: Path) -> None:
    """Then actors are programs of their own."""
    servers = ForkServers(ring_config(tmp_path), ["packer", "trainer"])
    try:
        for _ in range(MAX_DEATHS):
            assert not servers.is_ready("trainer")
            wait_until(lambda: servers.is_ready("trainer"), "the fork servers")
            server = servers.of("trainer")
            assert server is not None
            assert server is not servers.of("packer")
            server.process.send_signal(signal.SIGKILL)
            wait_until(lambda: not servers.is_ready("trainer") or servers.of("trainer") is None, "the news")
        assert servers.is_ready("trainer")
        assert servers.of("trainer") is None
        assert servers.of("packer") is None
    finally:
        servers.close()


def test_a_server_whose_modules_fail_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The actors then say what is wrong themselves, as programs of their own."""
    monkeypatch.setattr(forked, "ALL_KINDS", ("actors.there_is_none",))
    servers = ForkServers(ring_config(tmp_path), ["packer"])
    wait_until(lambda: servers.is_ready("packer"), "the way without")
    assert servers.of("packer") is None
    assert "No module named 'actors.there_is_none'" in capfd.readouterr().err


def test_what_computes_on_a_gpu_is_a_program_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA allows no fork after its first use; what needs no GPU is forked all the same."""
    config = ring_config(tmp_path)
    assert computing_modules(config, ["packer", "trainer"])
    assert not computing_modules(config, ["packer", "rollout"])
    monkeypatch.setattr(forked, "has_gpu", lambda: True)
    assert not computing_modules(config, ["packer", "trainer"])
    servers = ForkServers(config, ["packer", "trainer"])
    assert servers.is_ready("trainer")
    assert servers.of("trainer") is None
    assert not servers.is_ready("packer")
    servers.close()


def test_fork_servers_can_be_switched_off(tmp_path: Path) -> None:
    """By `up.fork_server`."""
    servers = ForkServers(ring_config(tmp_path, up={"fork_server": False}), ["packer", "trainer"])
    for kind in ("packer", "trainer"):
        assert servers.is_ready(kind)
        assert servers.of(kind) is None


def _model_config(folder: Path, **model: object) -> RunConfig:
    inference = {"engine": {"type": "embedded"}}
    return ring_config(folder, model={"path": str(folder), **model}, inference=inference)


@pytest.mark.slow
def test_modules_start_no_thread_and_those_of_all_kinds_do_not_load_torch(tmp_path: Path) -> None:
    """A fork has no copy of another thread, whose locks would stay locked."""
    for modules, has_torch in (
        (ALL_KINDS, False),
        ((*ALL_KINDS, *computing_modules(_model_config(tmp_path, lora={}), ["trainer", "inference"])), True),
    ):
        imports = "; ".join(f"import {module}" for module in modules)
        code = f"{imports}; import os, sys; print(len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=True
        )
        assert found.stdout.split() == ["1", str(has_torch)]
