"""The batch script; tests/system/test_slurm.py runs it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from actors.launch import slurm
from actors.launch.job import Job, restarting
from schemas.errors import ConfigError


def job(folder: Path, overrides: list[str] | None = None, **launch: object) -> Job:
    """The job of a small run with keys."""
    tree = {
        "output_dir": str(folder / "out"),
        "model": {"path": "fake"},
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 1},
        "inference": {"engine": {"type": "fake"}},
        "bus": {"keys": str(folder / "keys")},
        "up": {"rollout": 200},
        "launch": launch,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return Job.of(path, overrides or [])


@pytest.mark.parametrize("number", [1, 8, 100])
def test_a_script_is_one_of_bash_and_names_each_node(tmp_path: Path, number: int) -> None:
    """Its places stand in comments; overrides and paths with blanks are quoted."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    text = slurm.script(job(folder, ["model.path=it's fake"], nodes=number, commands=["module load 'x y'"]))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)
    assert f"#SBATCH --nodes={number}\n" in text
    assert len(re.findall(r"^#  +\d+  node-\d+", text, re.MULTILINE)) == number
    assert "a folder/run.yaml" in text
    assert f'#SBATCH --output="{folder}/out/logs/slurm-%j.log"\n' in text


def test_options_come_from_the_keys(tmp_path: Path) -> None:
    """GPUs, cores, memory, the time to stop; further ones as they stand, and `false` is none."""
    wanted = {"nodes": 2, "gpus_per_node": 4, "cpus_per_node": 32, "memory_per_node": "64Gi", "stop_timeout": 90}
    text = slurm.script(job(tmp_path, **wanted, sbatch={"account": "me", "exclusive": True, "spread-job": False}))
    options = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert {"nodes=2", "gpus-per-node=4", "cpus-per-task=32", "mem=64G", "signal=B:USR1@90"} <= set(options)
    assert {"account=me", "exclusive", "requeue", "open-mode=append", "ntasks-per-node=1"} <= set(options)
    assert not any("spread-job" in option for option in options)


def test_nodes_of_a_run_share_keys_and_have_work(tmp_path: Path) -> None:
    """Both are refused before anything is submitted."""
    with pytest.raises(ConfigError, match=r"bus\.keys: is required with launch\.nodes above 1"):
        job(tmp_path, ["bus.keys=''"], nodes=2)
    with pytest.raises(ConfigError, match=r"launch\.nodes: no process is left for node 4, 5"):
        job(tmp_path, ["up.rollout=1", "launch.place={trainer: [1], reward: [2], rollout: [3]}"], nodes=6)
    job(tmp_path, ["bus.keys=''"], nodes=1)


def test_an_image_and_own_options_are_refused(tmp_path: Path) -> None:
    """With what to change."""
    with pytest.raises(ConfigError, match=r"launch\.image: is not used by --on slurm"):
        slurm.script(job(tmp_path, image="a/b:c"))
    with pytest.raises(ConfigError, match=r"nodes is set by `actors launch`; remove it \(launch\.nodes\)"):
        job(tmp_path, sbatch={"nodes": 3})


def test_without_sbatch_it_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is no login node."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch can't be started: No such file or directory; run this on a login"):
        slurm.submit(job(tmp_path, nodes=1))


def test_sbatch_gets_the_script_and_its_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in keeps its input; the folder of the log is there before the job starts."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\n/bin/cat > "${0%/*}/got"\necho "17;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = job(tmp_path, nodes=2)
    assert slurm.submit(found) == slurm.how_to(found.config.output, "17")
    assert (tmp_path / "got").read_text() == slurm.script(found)
    assert (found.config.output / "logs").is_dir()
    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"sbatch refuses the job: invalid partition \(launch\.sbatch has"):
        slurm.submit(found)


@pytest.mark.parametrize(
    ("codes", "last"), [([0], 0), ([75], 0), ([143], 0), ([137, 139, 0], 0), ([137, 2], 2), ([1], 1), ([137] * 10, 137)]
)
def test_a_killed_node_is_started_again_and_a_failed_one_is_not(tmp_path: Path, codes: list[int], last: int) -> None:
    """Ten times at most; orderly ends are 0 for the batch system."""
    bash = shutil.which("bash")
    assert bash is not None
    count = tmp_path / "count"
    script = f"echo x >> {count}; codes=({' '.join(map(str, codes))}); exit ${{codes[$(wc -l < {count}) - 1]}}"
    command = f"{bash} -c '{script}'"
    text = restarting(command).replace("sleep 1", "true")
    done = subprocess.run([bash, "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == last, done.stderr
    assert len(count.read_text().splitlines()) == len(codes)
