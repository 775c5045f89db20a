"""docs/howto/several-machines.md and vllm.md: what they tell each machine to have and to start is what is needed."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.cli import main
from actors.engines.vllm.compat import check_version, installed
from actors.engines.vllm.process import command
from actors.ops.preflight import preflight
from bus.keys import load
from schemas.config import RunConfig, check_tree, load_config, warnings
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError
from tests.howto.pages import CODE, matches, page

MACHINES, VLLM = page("several-machines"), page("vllm")


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The page's file beside keys made by its command, and the variable that it exports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_ENGINE_API_KEY", "made-up")
    MACHINES.write_files(tmp_path)
    assert main(["keys", "new", "keys"]) == 0
    capsys.readouterr()
    return tmp_path / "run.yaml"


def test_each_machine_accepts_the_file_with_its_own_addresses(run_yaml: Path) -> None:
    """As both start their actors; the data and the ledger's folder are on disks that are not here."""
    starts = re.findall(r"actors (?:run \w+ --config|check) run\.yaml ((?:[\w.]+=\S+ ?)+)", MACHINES.text)
    assert len(starts) == 6
    for overrides in starts:
        config = load_config(run_yaml, overrides.split())
        told = [warning for warning in warnings(config) if not warning.startswith("inference.host")]
        assert told == []
        assert config.control_host == "10.0.0.5"
        assert config.bus.host in ("10.0.0.5", "10.0.0.6")
    assert warnings(load_config(run_yaml, ["bus.host=10.0.0.6", "inference.host=10.0.0.6"])) == []


def test_checks_find_keys_and_functions(run_yaml: Path) -> None:
    """With places that can be made here."""
    config = load_config(run_yaml, ["output_dir=out", "ledger.path=ledger.sqlite", "bus.host=10.0.0.5"])
    notes = preflight(config, starts=False)
    assert all("is not installed here" in note or "train.jsonl is not here" in note for note in notes)


def test_a_machine_without_the_packer_needs_the_three_files_that_are_copied(run_yaml: Path, tmp_path: Path) -> None:
    """The list of the `scp` line."""
    (line,) = re.findall(r"^scp (.+) \S+$", MACHINES.text, re.MULTILINE)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    for name in line.split():
        shutil.copy2(run_yaml.parent / name, other)
    keys = load(other)
    assert keys.client_secrets
    assert keys.server_publics
    assert not keys.server_secrets


def test_without_keys_the_address_is_refused(run_yaml: Path) -> None:
    """As the page says of a bus on tcp."""
    with pytest.raises(ValueError, match="is reachable from other machines and the bus is not encrypted"):
        load_config(run_yaml, ["bus.keys=''", "bus.host=10.0.0.5"])


def test_topology_prints_the_control_address(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who binds, who connects."""
    assert main(["topology", str(run_yaml), "bus.host=10.0.0.5"]) == 0
    assert "tcp://10.0.0.5:5555" in capsys.readouterr().out


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=16)], ids=["full", "lora"])
def test_a_server_that_is_attached_gets_the_switches_that_an_actor_gives_its_own(lora: LoraConfig | None) -> None:
    """What of them decides about weights and logprobs; ports, sizes and the door are the owner's."""
    blocks = [block.text for block in VLLM.blocks if "vllm serve" in block.text]
    (text,) = [block for block in blocks if ("--enable-lora" in block) == (lora is not None)]
    own = command(ModelConfig(path="m", lora=lora), VllmEngineConfig(), on_cpu=False, port=1)
    wanted = ["--enable-scale-out", "--logprobs-mode", "--dtype"]
    wanted += ["--enable-lora", "--max-lora-rank", "--max-loras", "--max-cpu-loras"] if lora else []
    words = text.replace("\\\n", " ").split()
    for switch in wanted:
        given = own[own.index(switch) + 1]
        assert switch in words
        if not given.startswith("-"):
            assert words[words.index(switch) + 1] == given, switch
    assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in words) == (lora is not None)
    assert "VLLM_SERVER_DEV_MODE=1" in words


def with_vllm(max_tokens: int = 16, **engine: object) -> RunConfig:
    """A small run with these keys of the engine."""
    return check_tree(
        {
            "model": {"path": "a/model", "lora": {"rank": 16}}, "environments": [{"type": "reverse_text"}],
            "rollout": {"max_tokens": max_tokens}, "reward": {"functions": [{"path": "exact_match"}]},
            "trainer": {"max_steps": 1}, "inference": {"engine": {"type": "vllm", **engine}},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("start", "mistake"),
    [
        ("inference.engine.type:", lambda: preflight(with_vllm())),
        ("inference.engine.python:", lambda: installed(sys.executable)),
        ("inference.engine: …", lambda: check_version("0.31.0", "http://gpu-1:8100")),
        ("rollout.max_tokens:", lambda: with_vllm(64, max_model_len=64)),
        ("inference.engine.urls:", lambda: with_vllm(urls=["http://gpu-1:8100", "http://gpu-2:8100"])),
        ("inference.engine.extra_args:", lambda: with_vllm(extra_args=["--host", "0.0.0.0"])),
        ("inference.engine.max_lora_rank:", lambda: with_vllm(max_lora_rank=8)),
    ],
)
def test_the_words_of_the_page_are_those_of_the_mistake(start: str, mistake: Callable[[], object]) -> None:
    """Each row of the table, where no vLLM is installed."""
    rows = [CODE.findall(cell)[0] for cell, _ in VLLM.table("Words", "Change").rows]
    (words,) = [row for row in rows if row.startswith(start)]
    with pytest.raises(ConfigError) as told:
        mistake()
    assert [line for line in told.value.problems if matches(words, line)], told.value.problems


def test_every_row_of_that_table_is_tried() -> None:
    """A row more needs a mistake more."""
    assert len(VLLM.table("Words", "Change").rows) == 7
