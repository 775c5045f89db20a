"""The objects for KEDA in deploy/kubernetes/scaling, against the metric, the Deployments, and the keys of `scale`."""

import re

import pytest

from actors.packer.gauges import SCALED_ROLES
from actors.telemetry.metrics import SPECS
from schemas.config import load_config
from tests.system.manifests import OVERLAYS, ROOT, Tree, listed_text, load_all, of_kind

QUERY = re.compile(r'max\((\w+)\{run="([\w-]+)", role="(\w+)"\}\)')
SPEC_KEYS = {"scaleTargetRef", "pollingInterval", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}
"""Fields of keda.sh/v1alpha1 that are used, compared by hand with KEDA's types."""


@pytest.fixture
def objects() -> list[Tree]:
    """All objects of the folder."""
    return load_all(listed_text(ROOT / "scaling"))


def test_each_object_asks_for_the_metric_of_its_role(objects: list[Tree]) -> None:
    """The name and the label's value are exported; with threshold 1 the value is the number of replicas."""
    deployments = {one["metadata"]["name"] for one in of_kind(load_all(listed_text(ROOT / "base")), "Deployment")}
    namespaces = {load_config(ROOT / overlay / "run.yaml").name for overlay in OVERLAYS}
    spec = next(one for one in SPECS if one.name == "grpo_packer_scale_wanted")
    assert dict(spec.labels) == {"role": SCALED_ROLES}
    assert {one["metadata"]["name"] for one in objects} == {"reward", "rollout"}
    for one in objects:
        assert (one["apiVersion"], one["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
        assert set(one["spec"]) == SPEC_KEYS
        name = one["metadata"]["name"]
        assert one["spec"]["scaleTargetRef"] == {"name": name}
        assert name in deployments
        (trigger,) = one["spec"]["triggers"]
        found = QUERY.fullmatch(trigger["metadata"]["query"])
        assert found is not None
        metric, namespace, role = found.groups()
        assert (metric, role) == (spec.name, name)
        assert namespace in namespaces
        assert trigger["type"] == "prometheus"
        assert trigger["metadata"]["threshold"] == "1"
        # the packer waits by itself, and a number without a value must not end everything
        behavior = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 0
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert 1 <= one["spec"]["minReplicaCount"] <= one["spec"]["maxReplicaCount"]
