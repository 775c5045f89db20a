"""The pods of an overlay as processes of this machine, each with an address of its own."""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.system.manifests import KINDS, KUBECTL, ROOT, Tree, container_of, load_all, of_kind
from tests.system.tools import tool


def secrets_of(keys: Path) -> list[Tree]:
    """What secrets.sh prints for a new set of keys, made in a folder that is not there yet."""
    tool("kubectl", KUBECTL)
    new = [sys.executable, "-m", "actors", "keys", "new", keys]
    subprocess.run(new, check=True, capture_output=True, timeout=60)
    printed = subprocess.run([ROOT / "secrets.sh", keys], capture_output=True, text=True, check=True, timeout=60)
    return load_all(printed.stdout)


class Cluster:
    """The pods of cpu-demo as processes: each with the address, the variables and the files that its manifest gives it.

    What a cluster does and this does not: names (the packer's is replaced by its address), policies, restarts.
    """

    def __init__(self, objects: list[Tree], secrets: list[Tree], folder: Path) -> None:
        self.folder = folder
        self._objects, self._data = objects, {(o["kind"], o["metadata"]["name"]): o.get("data", {}) for o in secrets}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "keys").mkdir()
        for name, text in self._data["ConfigMap", "bus-public"].items():
            (folder / "keys" / name).write_text(text)
        (run,) = of_kind(objects, "ConfigMap")
        self.places = {
            "/var/lib/grpo-actors": str(folder),
            "/etc/grpo-actors/keys": str(folder / "keys"),
            "packer-0.packer": address_of("packer", 0),
        }
        self.config_path = folder / "run.yaml"
        self.config_path.write_text(self._placed(run["data"]["run.yaml"]))

    def start(self) -> None:
        """All replicas of all actors."""
        for one in of_kind(self._objects, "StatefulSet", "Deployment"):
            for number in range(one["spec"]["replicas"]):
                kind, stateful = one["metadata"]["name"], one["kind"] == "StatefulSet"
                name = f"{kind}-{number}" if stateful else f"{kind}-5d4f{number}-x7k2{number}"
                self._start(one["spec"]["template"]["spec"], name, address_of(kind, number))

    def _start(self, pod: Tree, name: str, address: str) -> None:
        container = container_of(pod)
        own = {"POD_NAME": name, "POD_IP": address}
        environment = {one["name"]: self._value(one, own) for one in container["env"]}
        arguments = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], text) for text in container["args"]]
        arguments[2] = f"--config={self.config_path}"
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "actors", *arguments],
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], **environment},
            )

    def _value(self, one: Tree, own: dict[str, str]) -> str:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            return own[{"metadata.name": "POD_NAME", "status.podIP": "POD_IP"}[source["fieldRef"]["fieldPath"]]]
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            return base64.b64decode(self._data["Secret", reference["name"]][reference["key"]]).decode()
        return self._placed(one["value"])

    def _placed(self, text: str) -> str:
        for there, here in self.places.items():
            text = text.replace(there, here)
        return text

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait(10.0)


def address_of(kind: str, number: int) -> str:
    """Of loopback: all of 127.0.0.0/8 is."""
    return f"127.9.{KINDS.index(kind)}.{number + 1}"
