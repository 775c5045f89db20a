"""What a peer says of its metrics, before Prometheus is told to ask there."""

import pytest

from actors.telemetry.targets import is_target


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://127.0.0.1:9000/metrics", True),
        ("https://node-7.cluster.local:9000/metrics", True),
        ("http://[fd00::7]:9000/metrics", True),
        ("", False),
        ("file:///etc/passwd", False),
        ("gopher://a:1/metrics", False),
        ("http://a:9000/admin", False),
        ("http://a:9000/metrics?x=1", False),
        ("http://user:word@a:9000/metrics", False),
        ("http://a/metrics", False),
        ("http://a:99999/metrics", False),
        ("http://a b:9000/metrics", False),
        ("http://169.254.169.254:80/metrics", False),
        ("http://0.0.0.0:80/metrics", False),
        ("http://[fe80::1]:80/metrics", False),
    ],
)
def test_only_plain_addresses_of_metrics_are_passed_on(url: str, good: bool) -> None:
    """A peer could have Prometheus ask any address, such as the one at which clouds tell secrets."""
    assert is_target(url) is good
