"""metrics_targets.json: where every live actor serves /metrics, in the form of Prometheus' file_sd_configs.

With `telemetry.metrics_port: 0` ports are not known before the start; Prometheus reads this file anew whenever it
changes.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

Target = tuple[str, str, str]
"""(actor, name, URL of its /metrics)."""


class TargetsFile:
    """Writes the file when the targets have changed, atomically: whoever reads it reads all of it."""

    def __init__(self, output: Path, run_name: str) -> None:
        self._path, self._run_name = output / "metrics_targets.json", run_name
        self._written: list[Target] | None = None

    def follow(self, targets: Iterable[Target]) -> None:
        """These and no others are live; those without a URL serve no metrics."""
        wanted = sorted(target for target in targets if target[2])
        if wanted == self._written:
            return
        staging = self._path.with_name(f".{self._path.name}")
        staging.write_text(json.dumps([self._entry(*target) for target in wanted], indent=1) + "\n", encoding="utf-8")
        staging.replace(self._path)
        self._written = wanted

    def _entry(self, actor: str, name: str, url: str) -> dict[str, object]:
        return {"targets": [urlsplit(url).netloc], "labels": {"run": self._run_name, "actor": actor, "name": name}}
