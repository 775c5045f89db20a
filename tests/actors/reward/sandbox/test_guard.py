"""Programs of hostile answers: each ends, with a reason, and leaves nothing. Each attack is bounded in itself too."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.reward.sandbox import client
from actors.reward.sandbox.client import Box, End, Program, SandboxError, run_programs
from actors.reward.sandbox.confine import landlock_version
from actors.reward.sandbox.guard import empty, same_text, usage
from actors.reward.sandbox.places import readable_places

WAIT = 120.0
ENDLESS = "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)"
BOX = Box(seconds=1.0)
PATIENT = Box(seconds=60.0)
"""For programs that another limit ends, on a busy machine too."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all answers, which is empty after each test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert [*tmp_path.iterdir()] == []
    assert [place for place in cwds() if str(tmp_path) in place] == []


def cwds() -> list[str]:
    """The working directories of all processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append(str((process / "cwd").readlink()))
        except OSError:
            continue
    return found


def run(source: str, stdin: str = "", expected: str | None = None, box: Box = PATIENT) -> End:
    """The end of one program."""
    (end,) = run_programs([Program(source, "", stdin, expected)], box, stop_at_first=True)
    return end


def test_a_program_reads_its_input_and_its_output_is_compared() -> None:
    """Blanks at the ends of lines do not count; other text does."""
    assert run("print(input()[::-1])", "abc\n", "cba  \n\n").matches is True
    wrong = run("print('abc')", "", "cba")
    assert (wrong.outcome, wrong.code, wrong.matches) == ("ended", 0, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("while True: pass", "time"),
        ("import time\ntime.sleep(1000)", "time"),
        (ENDLESS, ("time", "signal 11", "MemoryError")),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("x = bytearray(10 * 2**30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(10**6))", "MemoryError"),
        ("while True: print('x' * 1000)", "output"),
        ("f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)", "OSError: [Errno 27] File too large"),
        ("i = 0\nwhile True:\n  i += 1\n  open(f'f{i}', 'w').close()", "disk"),
        ("import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\nwhile True: pass", "disk"),
        ("import os\nos.umask(0o777)\nos.mkdir('d')", ""),
        ("import os\nos.fork()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import subprocess\nsubprocess.run(['sleep', '1'])", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os\nos.posix_spawn('/bin/sleep', ['sleep', '1'], {})", "PermissionError: [Errno 1]"),
        ("import socket\nsocket.socket()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os\nos.kill(os.getppid(), 0)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os\nos.kill(-1, 0)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(1), 0)", "PermissionError: [Errno 1]"),
        ("import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU)", "PermissionError: [Errno 1]"),
        ("import os\nos.setuid(1)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os\nos.abort()", "signal 6"),
        ("import os\nos._exit(3)", "exit code 3"),
        ("raise SystemExit(4)", "exit code 4"),
        ("print(", "SyntaxError: '(' was never closed"),
        ("\ud800", "SyntaxError"),
    ],
)  # fmt: skip
def test_a_hostile_program_ends_with_a_reason(source: str, words: str | tuple[str, ...]) -> None:
    """The kernel refuses, or the guard kills; the reason is that of the limit, or the program's last words."""
    end = run(source, box=BOX if "time" in words else PATIENT)
    assert end.words.startswith(words), end
    assert words == "" or end.outcome != "ended" or end.code != 0


def test_a_limit_that_a_read_has_found_is_not_forgotten_by_the_next_look(folder: Path) -> None:
    """A guard that looks at folder and clock after each read: the program waits for a reader that has left."""
    (folder / "answer").mkdir()
    program = {"source": "while True: print('x' * 1000)", "program": "", "stdin": "", "expected": None}
    job = {
        "parent": os.getpid(), "folder": str(folder / "answer"), "seconds": PATIENT.seconds,
        "limits": {"memory_bytes": 1 << 30, "file_bytes": 16 << 20, "cpu_seconds": 60}, "output_bytes": 1 << 20,
        "disk_bytes": 64 << 20, "stop_at_first": True, "runs": [program],
    }  # fmt: skip
    code = "from actors.reward.sandbox import guard; guard.LOOK_SECONDS = 0.0; guard.main()"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, input=json.dumps(job), capture_output=True, text=True, timeout=WAIT, check=True)
    assert json.loads(done.stdout)["runs"][0]["outcome"] == "output"
    (folder / "answer").rmdir()


def test_the_program_writes_in_its_folder_alone(folder: Path) -> None:
    """Another file, readable or not, is neither written, nor cut, nor removed, nor given other rights."""
    outside = folder / "outside"
    outside.write_text("kept")
    for attack in ("open({!r}, 'w')", "import os; os.truncate({!r}, 0)", "import os; os.remove({!r})",
                   "import os; os.chmod({!r}, 0)", "import os; os.rename({!r}, 'mine')"):  # fmt: skip
        end = run(attack.format(str(outside)))
        assert end.code == 1
        assert "Error" in end.words
    assert outside.read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o644
    assert run("open('own', 'w').write('a')\nprint(open('own').read())", "", "a").matches is True
    outside.unlink()


SECRET = "kept-from-programs"
HAS_LANDLOCK = landlock_version() >= 1
needs_landlock = pytest.mark.skipif(not HAS_LANDLOCK, reason="this kernel has no Landlock")


@pytest.fixture
def user_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a user outside of all folders of answers: a key, and the metrics of a run."""
    home = tmp_path_factory.mktemp("home")
    for name in (".ssh/id_ed25519", "outputs/run/metrics.jsonl"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(SECRET)
    return home


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize(
    "attack",
    [
        "open({file!r}).read()",
        "import os; os.open({file!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.listdir({folder!r})",
        "import glob; print(glob.glob({folder!r} + '/*')[0])",
        "import os; os.symlink({file!r}, 'mine'); open('mine').read()",
        "import os; os.link({file!r}, 'mine')",
        "open('/proc/self/root' + {file!r}).read()",
        "open('/proc/self/cwd/../../..' + {file!r}).read()",
        "import os; os.chdir({folder!r}); open('id_ed25519').read()",
        "import os; here = os.open({folder!r}, os.O_PATH); os.open('id_ed25519', os.O_RDONLY, dir_fd=here)",
        "import os; here = os.open({file!r}, os.O_PATH); open(f'/proc/self/fd/{{here}}').read()",
        "import shutil; shutil.copy({file!r}, 'mine')",
        "import os; os.execv('/bin/cat', ['cat', {file!r}])",
        "import ctypes; f = ctypes.CDLL(None).fopen({file!r}.encode(), b'r'); raise SystemExit(f == 0)",
    ],
)
def test_the_program_reads_no_file_of_the_user(user_files: Path, attack: str) -> None:
    """By no way, and it does not empty a file by the way of reading."""
    for file in (user_files / ".ssh/id_ed25519", user_files / "outputs/run/metrics.jsonl"):
        end = run(attack.format(file=str(file), folder=str(user_files / ".ssh")))
        assert (end.outcome, end.code) == ("ended", 1), end
        assert SECRET not in end.stderr
        assert file.read_text() == SECRET


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize("name", ["environ", "cmdline", "maps", "cwd/pyproject.toml", "fd/0", "root/etc/hostname"])
def test_the_program_reads_nothing_of_another_process(name: str) -> None:
    """Neither of the actor that has the keys of services, nor of its guard, nor of any other."""
    source = "import os, sys\nopen(f'/proc/{sys.stdin.read().strip() or os.getppid()}/NAME').read()"
    for process in ("", str(os.getpid()), "1"):
        end = run(source.replace("NAME", name), process)
        assert (end.outcome, end.code) == ("ended", 1), (process, end)
        assert "PermissionError" in end.words, (process, end)


@pytest.mark.slow
@needs_landlock
def test_the_program_reads_nothing_of_a_program_that_runs_at_the_same_time(folder: Path) -> None:
    """Another answer of the group may have found the solution."""
    victim = "import time\nopen('solution', 'w').write('42')\nwhile True: time.sleep(1)"
    other = threading.Thread(target=run, args=(victim,), kwargs={"box": Box(seconds=5.0)})
    other.start()
    wait_for(lambda: bool([*folder.glob("*/0/solution")]))
    [solution] = folder.glob("*/0/solution")
    assert solution.read_text() == "42"
    for attack in ("open({!r}).read()", "import os; os.listdir(os.path.dirname({!r}))",
                   "import os; os.listdir('../..')", "import os; os.remove({!r})"):  # fmt: skip
        end = run(attack.format(str(solution)))
        assert "PermissionError" in end.words, (attack, end)
    other.join(WAIT)


@needs_landlock
@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/etc/ssh", "/root", "/home", "/tmp", "/var", "/dev/shm", "/proc", "/sys"]
)
def test_places_with_data_of_the_machine_are_closed(path: str) -> None:
    """As root too, for whom rights of files are no limit."""
    if not Path(path).exists():
        pytest.skip(f"this machine has no {path}")
    end = run(f"import os\nopen({path!r}).read() if os.path.isfile({path!r}) else os.listdir({path!r})")
    assert "PermissionError: [Errno 13]" in end.words, end


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "import json, math, re, collections, itertools, functools, heapq, bisect, random, decimal, dataclasses",
        "import asyncio, unittest, logging, sqlite3, ssl, hashlib, ctypes, zlib, bz2, lzma, csv, xml.etree.ElementTree",
        "import asyncio\nasync def f(): return 1\nassert asyncio.run(f()) == 1",
        "import datetime, zoneinfo, locale\nlocale.setlocale(locale.LC_ALL, '')\nprint(datetime.datetime.now())",
        "import getpass, pwd, os\npwd.getpwuid(os.getuid())\nassert os.cpu_count()",
        "import tempfile\nwith tempfile.NamedTemporaryFile() as f: f.write(b'a')",
        "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/x', 'w').write('a')",
        "open('x', 'w').write('abc')\nopen('x', 'w').write('d')\nassert open('x').read() == 'd'",
        "open('x', 'w').write('abc')\nopen('x', 'r+').truncate(1)\nassert open('x').read() == 'a'",
        "import os\nos.mkdir('d')\nos.rename('d', 'e')\nassert os.listdir('.') and os.getcwd() == os.environ['HOME']",
        "open('/dev/null', 'w').write('x')\nopen('/dev/urandom', 'rb').read(3)\nopen('/dev/zero', 'rb').read(3)",
        "assert 'answer.py' in open('/proc/self/cmdline').read()\nassert 'HOME' in open('/proc/self/environ').read()",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-c', 'import json'])",
        "import numpy as np\nassert (np.ones((9, 9)) @ np.ones((9, 9)))[0, 0] == 9",
        "import sympy\nassert sympy.solve(sympy.Symbol('x') - 1) == [1]",
    ],
)
def test_what_programs_need_works(source: str) -> None:
    """Python, packages that are installed, and the program's own folder."""
    assert (run(source).outcome, run(source).words) == ("ended", "")


WITHOUT_LANDLOCK = """
import os, sys
from actors.reward.sandbox import confine
confine.LANDLOCK_CREATE_RULESET = 10_000  # a call that no kernel has
print(confine.apply(confine.Limits(memory_bytes=4 << 30), None, []), open(sys.argv[1]).read())
try:
    os.open(sys.argv[1], os.O_RDONLY | os.O_TRUNC)
except PermissionError as error:
    print(error.errno)
"""


def test_a_kernel_without_landlock_says_so_and_lets_no_program_empty_what_it_reads(user_files: Path) -> None:
    """Files can be read there; the pages say it."""
    file = user_files / ".ssh/id_ed25519"
    command = [sys.executable, "-c", WITHOUT_LANDLOCK, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, env=client.environment(), check=True)
    assert done.stdout.splitlines() == [f"False {SECRET}", "1"]
    assert file.read_text() == SECRET


@needs_landlock
def test_a_rule_that_the_kernel_refuses_ends_the_process(tmp_path: Path) -> None:
    """A program would run with fewer rules otherwise."""
    code = (
        "from actors.reward.sandbox import confine\n"
        "confine.LANDLOCK_OF_FILES |= confine.LANDLOCK_READ_DIR  # no right of a file\n"
        f"confine.apply(confine.Limits(memory_bytes=4 << 30), None, [{sys.executable!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, env=client.environment()
    )
    assert done.returncode == 1
    assert f"NotConfinedError: Landlock refuses {sys.executable}: EINVAL" in done.stderr


def test_places_have_no_folder_of_the_project_or_of_a_user() -> None:
    """Whatever sys.path has: the checkout may have the outputs of runs below it."""
    places = [Path(place) for place in readable_places()]
    for private in (
        client.ROOT,
        client.ROOT / "outputs",
        Path.home(),
        Path("/"),
        Path("/etc"),
        Path("/proc"),
        Path.cwd(),
    ):
        assert not [place for place in places if private == place or private.is_relative_to(place)], private


def test_the_program_knows_no_variables_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of services are in the environment of a reward actor."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert run("import os\nprint('JUDGE_KEY' in os.environ)", "", "False").matches is True


def test_threads_are_allowed() -> None:
    """The filter tells threads from processes."""
    source = "import threading\nt = threading.Thread(target=lambda: print(input()))\nt.start()\nt.join()"
    assert run(source, "abc\n", "abc").matches is True


def test_the_first_failure_ends_the_list_only_if_told() -> None:
    """Three programs, the first of which prints the wrong text."""
    programs = [Program("print(1)", "", "", "2"), Program("print(2)", "", "", "2"), Program("print(3)", "", "", "3")]
    assert [end.matches for end in run_programs(programs, BOX, stop_at_first=True)] == [False]
    assert [end.matches for end in run_programs(programs, BOX, stop_at_first=False)] == [False, True, True]


def test_a_guard_that_fails_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is to blame for an interpreter that is missing, or for a guard that fails."""
    monkeypatch.setattr(client.sys, "executable", "/no/python")
    with pytest.raises(SandboxError, match="can't be started"):
        run("print(1)")
    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match=r"failed \(exit code 1\)"):
        run("print(1)")


def test_without_a_filter_of_calls_no_program_runs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """An unconfined program could end every process of the machine, so it is not started."""
    code = (
        "import platform, sys; platform.machine = lambda: 'vax'\n"
        "from actors.reward.sandbox import confine\n"
        "confine.apply(confine.Limits(memory_bytes=4 << 30), None, [])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, env=client.environment()
    )
    assert done.returncode == 1
    assert "NotConfinedError: this kernel" in done.stderr
    assert "vax" in done.stderr
    assert platform.machine() != "vax"


def test_a_program_ends_with_its_guard(folder: Path) -> None:
    """The kernel kills the program when the guard is killed, as with a reward actor that the machine ends."""
    source = "import time\nopen('up', 'w')\ntime.sleep(1000)"
    job = {
        "parent": os.getpid(), "folder": str(folder), "seconds": 1000, "limits": {}, "output_bytes": 1000,
        "disk_bytes": 100_000,
        "stop_at_first": True, "runs": [{"source": source, "program": "", "stdin": "", "expected": None}],
    }  # fmt: skip
    guard = subprocess.Popen(
        [sys.executable, "-P", "-m", "actors.reward.sandbox.guard"], stdin=subprocess.PIPE, env=client.environment()
    )
    assert guard.stdin is not None
    guard.stdin.write(json.dumps(job).encode())
    guard.stdin.close()
    wait_for(lambda: (folder / "0" / "up").exists())
    assert [place for place in cwds() if place == str(folder / "0")]
    guard.kill()
    guard.wait(WAIT)
    wait_for(lambda: not [place for place in cwds() if place == str(folder / "0")])
    empty(str(folder / "0"))


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + WAIT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_outputs_are_equal_up_to_blanks_at_the_ends() -> None:
    """Inside a line blanks count, and so do lines in between."""
    assert same_text("a \nb\n\n", "a\nb")
    assert not same_text("a  b", "a b")
    assert not same_text("a\n\nb", "a\nb")


def test_a_deep_folder_is_counted_and_removed(folder: Path) -> None:
    """1500 folders inside each other are beyond the longest path of the kernel."""
    start, top = Path.cwd(), folder / "top"
    top.mkdir()
    os.chdir(top)
    for _ in range(1500):
        Path("a-rather-long-name").mkdir()
        os.chdir("a-rather-long-name")
    os.chdir(start)
    assert usage(str(top), 100)[1] == 100
    empty(str(top))
    assert not top.exists()


ACTOR = """
import sys
from actors.reward.sandbox.client import Box, Program, run_programs
run_programs([Program(sys.argv[1])] * 3, Box(seconds=1000.0), stop_at_first=False)
"""


def test_nothing_outlives_a_reward_actor_that_is_killed(folder: Path) -> None:
    """Neither the program, whatever it has done, nor its guard, nor the folder."""
    source = (
        "import os, signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nos.mkdir('deep')\n"
        "open('started', 'w').close()\ntime.sleep(1000)"
    )
    command = [sys.executable, "-c", ACTOR, source]
    with subprocess.Popen(command, cwd=Path(__file__).parents[4], env=os.environ | {"TMPDIR": str(folder)}) as process:
        wait_for(lambda: bool([*folder.glob("*/0/started")]))
        process.kill()
    wait_for(lambda: not [*folder.iterdir()] and not [place for place in cwds() if str(folder) in place])


def test_a_guard_whose_parent_has_ended_before_its_first_line_runs_no_program(folder: Path) -> None:
    """A killed actor's guard may be just starting; the number of its own parent is then another one."""
    inner = folder / "grpo-answer"
    inner.mkdir()
    job = {
        "parent": os.getppid(), "folder": str(inner), "seconds": 1000.0, "output_bytes": 1000, "disk_bytes": 1 << 20,
        "limits": {"memory_bytes": 1 << 30, "file_bytes": 1 << 20, "cpu_seconds": 1000}, "stop_at_first": True,
        "runs": [{"source": "while True: pass", "program": "", "stdin": "", "expected": None}],
    }  # fmt: skip
    command = [sys.executable, "-m", "actors.reward.sandbox.guard"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 1
    assert "has ended" in done.stderr
