"""A real run, scraped by a real Prometheus: what panels and rules name is there; alerts are silent, and fire.

Rules are those of deploy/prometheus, with all their windows and `for` divided by QUICKER, so that an hour is a minute;
expressions and thresholds are the same. Real weights, so that the trainer has work: several updates a step.
"""

import contextlib
import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.pages import PAGES
from grafana.promql import selectors
from schemas.config import RunConfig
from tests.model_hub import ModelHub, model_hub
from tests.models import build
from tests.ports import free_port
from tests.prometheus import ALERT_FILE, DEPLOY, RECORDING_FILE, SPECIAL, rules_of
from tests.ring.harness import PATIENCE_SECONDS, Processes, processes, ring_config, wait_until
from tests.system.tools import tool

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

QUICKER = 60
LONGEST_SECONDS = PATIENCE_SECONDS
"""Until something shows in Prometheus, on a machine that has other things to do."""
ACTORS = (
    *("packer-0", "trainer-0", "inference-0", "reward-0", "rollout-0", "rollout-1"),
    *("callbacks-0", "uploader-0", "tracker-0"),
)
REWARD = '''
from pathlib import Path

def score(prompts, completions, gate, **columns):
    """Of some prompts it can't say anything while the file `gate` is there."""
    if Path(gate).exists() and sum(map(ord, str(prompts[0]))) % 2:
        raise RuntimeError("the judge is out of order")
    return [len(set(str(text))) / 10 for text in completions]
'''
WORLD = '''
from pathlib import Path

class Letters:
    """Two turns. It is broken while the file `gate` is there."""

    def __init__(self, gate):
        self.gate = Path(gate)

    def reset(self, seed, **row):
        if self.gate.exists():
            raise RuntimeError("the board is broken")
        self.turns = 0
        return "abcd"[seed % 4]

    def step(self, answer):
        self.turns += 1
        return "c", len(set(answer)) / 10, self.turns == 2
'''
CALLBACK = '''
from pathlib import Path

class Watcher:
    """It raises while the file `gate` is there."""

    def __init__(self, gate):
        self.gate = Path(gate)

    def on_log(self, args, state, control, **values):
        if self.gate.exists():
            raise RuntimeError("the dashboard is out of order")
'''
TEMPLATE = "{% for one in messages %}{{ one.content }}<eos>{% endfor %}{% if add_generation_prompt %}={% endif %}"


def seconds_of(duration: str) -> float:
    """`15m` as Prometheus reads it."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[-1]]


def quicker(text: str, factor: int = QUICKER) -> str:
    """A rule file with every window, offset and `for` shorter by a factor."""

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{int(1000 * seconds_of(found[2]) / factor)}ms{found[3]}"

    for pattern in (r"(\[)(\d+[smhd])(\])", r"(offset )(\d+[smhd])()", r"(for: )(\d+[smhd])()"):
        text = re.sub(pattern, shorter, text)
    return text


def test_quicker_rules_are_the_same_but_for_their_times():
    """15 minutes are 15 seconds, in windows, offsets and `for`; names and thresholds stay."""
    rule = "expr: a:avg10m[15m] > 0.6 and (b offset 6h)\nfor: 5m\n"
    assert quicker(rule) == "expr: a:avg10m[15000ms] > 0.6 and (b offset 360000ms)\nfor: 5000ms\n"


class Prometheus:
    """The server's HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer; an expression that it refuses fails the test with its words."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(address, timeout=10.0) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant vector, or the one number of a scalar."""
        return self.get("query", query=expr)["result"]  # type: ignore[no-any-return]

    def firing(self, name: str) -> list[dict[str, Any]]:
        """Alerts of a name that fire now."""
        alerts = self.get("alerts")["alerts"]
        return [alert for alert in alerts if alert["state"] == "firing" and alert["labels"]["alertname"] == name]

    def is_ready(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.url}/-/ready", timeout=2.0).status == 200
        return False


@contextlib.contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[Prometheus]:
    """A server that scrapes every half second what the file names, with quicker rules; ends with the block."""
    program, port = tool("prometheus", "apt-get install prometheus"), free_port()
    (folder / "rules").mkdir()
    for path in (ALERT_FILE, RECORDING_FILE):
        (folder / "rules" / path.name).write_text(quicker(path.read_text(encoding="utf-8")), encoding="utf-8")
    tree = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    tree["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
    discovery = tree["scrape_configs"][0]["file_sd_configs"][0]
    discovery |= {"files": [str(targets)], "refresh_interval": "1s"}
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        wait_until(server.is_ready, f"Prometheus answers ({folder / 'prometheus.log'})", LONGEST_SECONDS)
        yield server
    finally:
        process.kill()
        process.wait(10.0)


def run_config(folder: Path) -> RunConfig:
    """A run without end whose trainer has more to do than its engine; one group in four is of an environment."""
    build(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "own.py").write_text(REWARD, encoding="utf-8")
    (folder / "world.py").write_text(WORLD, encoding="utf-8")
    (folder / "watcher.py").write_text(CALLBACK, encoding="utf-8")
    return ring_config(
        folder,
        model={"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        environments=[
            {"type": "reverse_text", "weight": 3.0},
            {
                "type": "python",
                "name": "letters",
                "path": f"{folder / 'world.py'}:Letters",
                "options": {"gate": str(folder / "broken")},
                "weight": 1.0,
            },
        ],
        rollout={"group_size": 4, "max_tokens": 8, "max_concurrent_groups": 8},
        reward={"functions": [{"path": f"{folder / 'own.py'}:score", "kwargs": {"gate": str(folder / "gate")}}]},
        packer={"groups_per_step": 4, "max_async_level": 2},
        trainer={
            "max_steps": 100_000,
            "num_iterations": 24,
            "learning_rate": 1e-6,
            "checkpoint": {"interval": 5},
        },
        inference={"engine": {"type": "embedded", "max_sequence_len": 64}},
        callbacks=[{"path": f"{folder / 'watcher.py'}:Watcher", "kwargs": {"gate": str(folder / "raises")}}],
        push_to_hub={"hub_model_id": "org/model"},
        telemetry={"trackers": ["tensorboard"]},
        bus={"control": "ipc", "beat_interval": 0.5, "lease": 5.0},
    )


@dataclass
class Live:
    """A run under way, and what watches it."""

    config: RunConfig
    started: Processes
    server: Prometheus
    gate: Path
    hub: ModelHub

    def wait_for_alert(self, alert: str, **labels: str) -> dict[str, str]:
        """Its annotations, once it fires with these labels."""

        def firing() -> list[dict[str, Any]]:
            return [a for a in self.server.firing(alert) if labels.items() <= a["labels"].items()]

        annotations: dict[str, str] = self.wait_for(firing, f"{alert} fires")[0]["annotations"]
        assert "<" not in annotations["summary"], "a template that has found no value says so"
        return annotations

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The condition's first true value; Prometheus has new ones twice a second."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {LONGEST_SECONDS:g} s: {what}"
            time.sleep(0.25)
        return value


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Each actor a process that nobody starts again, and a Prometheus that scrapes all; a checkpoint is saved."""
    tool("prometheus", "apt-get install prometheus")
    folder = tmp_path_factory.mktemp("live")
    config = run_config(folder)
    with model_hub(folder / "hub") as hub, processes(config, folder) as started, pytest.MonkeyPatch.context() as patch:
        for name, value in hub.variables().items():
            patch.setenv(name, value)
        for name in ACTORS:
            started.run(name)
        wait_until((config.output / "metrics_targets.json").is_file, "the packer names targets", LONGEST_SECONDS)
        with prometheus(folder, config.output / "metrics_targets.json") as server:
            made = Live(config, started, server, folder / "gate", hub)
            made.wait_for(lambda: server.query("run:grpo_packer_step:max > 10"), "ten steps and two checkpoints")
            made.wait_for(lambda: len(server.query("up == 1")) == len(ACTORS), "all are scraped")
            yield made


def filled_in(expr: str, run: str = "ring") -> str:
    """A panel's expression as Grafana sends it, all actors chosen."""
    for name, value in (("run", run), ("actor", ".+"), ("name", ".+"), ("__rate_interval", "10s")):
        expr = expr.replace(f"${name}", value)
    return re.sub(r"\$gpus_per_\w+", "1", expr)


def everything() -> dict[str, str]:
    """All expressions of panels and rules, by where they stand."""
    found = {
        f"{page.uid}: {panel.title} {i}": filled_in(query.expr)
        for page in PAGES
        for panel in page.panels
        for i, query in enumerate(panel.queries)
    }
    rules = rules_of(RECORDING_FILE) + rules_of(ALERT_FILE)
    return found | {rule.get("alert") or rule["record"]: quicker(rule["expr"]) for rule in rules}


def is_special(expr: str) -> bool:
    """Whether it reads what only special configurations have."""
    return any(name in SPECIAL for name, _ in selectors(expr))


def test_every_selector_of_panels_and_rules_matches_series_of_a_live_run(live):
    """Metric and labels, as they stand in the expression; those that can't be here are listed, and are not."""
    found = {selector for expr in everything().values() for selector in selectors(expr)}
    empty = {(name, matchers) for name, matchers in found if not live.server.query(f"count({name}{{{matchers}}})")}
    assert {name for name, _ in empty} == set(SPECIAL)


def test_every_panel_has_values_and_no_expression_is_refused(live):
    """Also what two metrics of different actors are made into has series; an alert's expression has none."""
    alerts = {rule["alert"] for rule in rules_of(ALERT_FILE)}
    empty = {where for where, expr in everything().items() if not live.server.query(expr)}
    assert {where for where in empty if not is_special(everything()[where])} <= alerts
    rules = [rule for group in live.server.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(rules_of(ALERT_FILE) + rules_of(RECORDING_FILE))
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_no_alert_is_even_pending_on_a_healthy_run(live):
    """For ten seconds in a row, which are ten minutes."""
    quiet = "count_over_time(run:grpo_packer_step:max[10s]) > 8 unless on() count(count_over_time(ALERTS[10s]))"
    live.wait_for(lambda: live.server.query(quiet), "ten seconds without an alert")


def test_alerts_fire_when_what_they_tell_of_is_done_to_the_run(live):
    """Functions of the user and the hub fail; rollout and reward actor killed, trainer stopped, packer killed."""
    live.gate.touch()
    live.wait_for_alert("GrpoGroupsDropped", reason="poison", run="ring")
    live.gate.unlink()
    broken = live.gate.with_name("broken")
    broken.touch()
    live.wait_for_alert("GrpoEnvironmentFailing", run="ring")
    broken.unlink()

    raises = live.gate.with_name("raises")
    raises.touch()
    live.hub.forbidden = True
    live.wait_for_alert("GrpoCallbacksFailing", run="ring")
    live.wait_for_alert("GrpoUploadsFailing", run="ring")
    raises.unlink()
    live.hub.forbidden = False

    live.started.processes["rollout-1"].kill()
    live.wait_for_alert("GrpoActorDown", role="rollout")
    assert not live.server.firing("GrpoActorMissing"), "the other one is there"
    live.started.processes["reward-0"].kill()
    assert live.wait_for_alert("GrpoActorMissing", role="reward")["summary"] == "Run ring has no reward actor."
    live.wait_for_alert("GrpoNoStep")

    live.started.run("reward-0")
    live.wait_for(lambda: not live.server.firing("GrpoNoStep"), "steps again")
    live.started.processes["trainer-0"].send_signal(signal.SIGSTOP)
    live.wait_for_alert("GrpoActorMissing", role="trainer")
    live.wait_for_alert("GrpoNoStep")

    live.started.processes["packer-0"].kill()
    assert (
        live.wait_for_alert("GrpoPackerDown", name="packer-0")["runbook"]
        == "docs/reference/operations.md#grpopackerdown"
    )
