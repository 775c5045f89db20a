"""docs/howto/cluster.md: the places, the commands and the texts that the page shows are those of its run.yaml."""

from pathlib import Path

import pytest
import yaml

from actors.cli import main
from actors.launch import slurm
from actors.launch.node import hosts_of, share_of
from actors.launch.placement import control_port
from schemas.config import load_config
from tests.howto.pages import page

CLUSTER = page("cluster")


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    """The page's file."""
    CLUSTER.write_files(tmp_path)
    return tmp_path / "run.yaml"


def texts() -> list[str]:
    """The blocks of output."""
    return [block.text for block in CLUSTER.blocks if block.language == "text"]


def test_the_dry_run_prints_the_places_of_the_page(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr; the script is on stdout, with the page's options of sbatch."""
    assert main(["launch", "--on", "slurm", "--dry-run", str(run_yaml)]) == 0
    printed = capsys.readouterr()
    assert printed.err == texts()[0]
    # `actors check` wants the keys; packages that this machine lacks are only warnings
    places = run_yaml.with_name("here.yaml")
    places.write_text(run_yaml.read_text().replace("/shared", str(run_yaml.parent)))
    assert main(["keys", "new", str(run_yaml.parent / "keys")]) == 0
    capsys.readouterr()
    assert main(["check", str(places)]) == 0
    assert texts()[0] in capsys.readouterr().out
    for option in ("nodes=2", "gpus-per-node=8", "partition=gpu", "time=8:00:00", "signal=B:USR1@240", "requeue"):
        assert f"#SBATCH --{option}\n" in printed.out
    assert "\nsource /shared/venv/bin/activate\n" in printed.out
    assert f'actors node --rank "$SLURM_NODEID" --nodes "$nodes" {run_yaml}' in printed.out


def test_the_run_for_kubernetes_has_its_engines_in_a_leader_worker_set(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other file of the page, as its commands render it; the ledger's claim is one pod's."""
    assert main(["launch", "--on", "kubernetes", "--dry-run", str(run_yaml.with_name("pods.yaml"))]) == 0
    objects = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
    assert set(objects) == {"ConfigMap", "JobSet", "LeaderWorkerSet"}
    assert objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"] == 2
    claims = yaml.safe_dump(objects["JobSet"]["spec"]).count("claimName: ledger")
    assert claims == 1


@pytest.mark.parametrize("on", ["ray", "dstack"])
def test_the_same_run_is_printed_for_the_others(run_yaml: Path, capsys: pytest.CaptureFixture[str], on: str) -> None:
    """Two nodes of eight GPUs; SkyPilot also wants their name."""
    assert main(["launch", "--on", on, "--dry-run", str(run_yaml)]) == 0
    assert "actors node --rank" in capsys.readouterr().out
    assert main(["launch", "--on", "skypilot", "--dry-run", str(run_yaml), "launch.gpu_type=H100"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["resources"]["accelerators"] == "H100:8"


def test_a_submitted_job_tells_what_the_page_shows(run_yaml: Path) -> None:
    """How to watch, stop and resume."""
    assert slurm.how_to(load_config(run_yaml).output, "4711") + "\n" == texts()[1]


def test_any_two_machines_take_the_share_of_their_rank(run_yaml: Path) -> None:
    """The command of the page; the addresses follow from its list."""
    (command,) = [block.text for block in CLUSTER.blocks if "actors node" in block.text and block.language == "sh"]
    hosts = hosts_of(command.split("--nodes ")[1].split()[0])
    first, share = share_of(run_yaml, [], 0, hosts)
    assert share.has_packer
    assert (first.bus.control, first.bus.host) == (f"tcp://10.0.0.5:{control_port(first)}", "10.0.0.5")
    second, share = share_of(run_yaml, ["bus.control=tcp://10.0.0.5:7000"], 1, hosts)
    assert not share.has_packer
    assert (second.bus.control, second.inference.host) == ("tcp://10.0.0.5:7000", "10.0.0.6")
