"""`actors keys`, and what `actors check` says of keys."""

import json
from pathlib import Path

import pytest

from actors.cli import main
from bus import keys
from schemas.config import dump_config
from tests.ring.harness import ring_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """New keys, made by the command."""
    assert main(["keys", "new", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def secrets_in(folder: Path) -> list[str]:
    """All there are, as hex digits."""
    found = keys.load(folder)
    return [secret.hex() for secret in (*found.server_secrets, *found.client_secrets)]


def test_no_command_prints_a_secret(folder, capsys):
    """new, show, rotate and rotate --finish print every public key with its fingerprint, and no secret."""
    shown, seen = capsys.readouterr().out, secrets_in(folder)
    for words in (["show"], ["rotate"], ["show"], ["rotate", "--finish"], ["show"]):
        assert main(["keys", words[0], str(folder), *words[1:]]) == 0
        out = capsys.readouterr().out
        found = keys.load(folder)
        for public in (*found.server_publics, *found.client_publics):
            assert f"{keys.fingerprint_of(public)}  here    {public.hex()}" in out
        shown, seen = shown + out, seen + secrets_in(folder)
    assert len(set(seen)) == 4
    assert not [secret for secret in seen if secret in shown]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["new"], "has keys already"),
        (["rotate", "--finish"], "no rotation is under way"),
        (["show", "--finish"], "--finish belongs to rotate"),
    ],
)
def test_what_can_not_be_done_exits_2_in_words(folder, capsys, words, told):
    """Nothing is overwritten by a slip."""
    before = secrets_in(folder)
    assert main(["keys", words[0], str(folder), *words[1:]]) == 2
    assert told in capsys.readouterr().err
    assert secrets_in(folder) == before


def test_check_looks_at_the_keys(folder, tmp_path, capsys):
    """A folder beside the configuration is found and good; an open secret and a folder that is not there are told."""
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(ring_config(tmp_path, "tcp")))
    assert main(["check", str(path), "bus.keys=keys"]) == 0
    (folder / "client.secret").chmod(0o644)
    assert main(["check", str(path), "bus.keys=keys"]) == 2
    assert f"bus.keys: {folder / 'client.secret'} is open to others (mode 0644)" in capsys.readouterr().err
    assert main(["check", str(path), "bus.keys=nowhere"]) == 2
    assert f"bus.keys: there is no folder {tmp_path / 'nowhere'}; `actors keys new" in capsys.readouterr().err


def test_check_refuses_plaintext_beyond_loopback(tmp_path, capsys):
    """By name, for the packer's address, the data sockets' and the one that others are told; keys mend it."""
    path, folder = tmp_path / "run.yaml", tmp_path / "keys"
    path.write_text(dump_config(ring_config(tmp_path, "tcp")))
    opened = ["bus.control=tcp://10.0.0.5:5555", "bus.host=10.0.0.5", "bus.advertise_host=box.local"]
    assert main(["check", str(path), *opened]) == 2
    keys_named = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert keys_named == ["bus.control", "bus.host", "bus.advertise_host"]
    keys.make(folder)
    assert main(["check", str(path), *opened, f"bus.keys={folder}"]) == 0
    assert main(["check", str(path), *opened, "bus.allow_plaintext=true"]) == 0


def test_check_asks_for_the_engines_key(tmp_path, capsys, monkeypatch):
    """A variable that is not set is named; the schema knows the keys."""
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(ring_config(tmp_path)))
    assert main(["check", str(path), "inference.api_key_env=ENGINE_KEY"]) == 2
    assert "inference.api_key_env: the environment variable ENGINE_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("ENGINE_KEY", "k")
    assert main(["check", str(path), "inference.api_key_env=ENGINE_KEY"]) == 0
    capsys.readouterr()
    assert main(["schema"]) == 0
    assert {"keys", "allow_plaintext"} <= json.loads(capsys.readouterr().out)["$defs"]["BusConfig"]["properties"].keys()


def test_metrics_and_completions_stay_on_loopback_by_default(tmp_path):
    """Nothing that speaks HTTP is reached from other machines unless it is told so; nor is a bus on tcp."""
    config = ring_config(tmp_path, "tcp")
    assert config.telemetry.metrics_host == config.inference.host == config.bus.host == "127.0.0.1"
    assert config.bus.keys == ""
    assert not config.bus.allow_plaintext
