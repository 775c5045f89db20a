"""Rules and configuration as promtool judges them."""

import subprocess

import pytest

from tests.prometheus import DEPLOY
from tests.system.tools import tool

pytestmark = pytest.mark.system

INSTALL = "apt-get install prometheus"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules/alerts.yml", "rules/recording.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "tests/alerts.yml"),
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(arguments):
    """Rules are well-formed; each alert fires alone in its case, and is silent in the one close to it."""
    command = [tool("promtool", INSTALL), *arguments]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
