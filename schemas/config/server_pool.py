"""Keys of `inference.pool`, and the URL of a server."""

from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.config.base import Section
from schemas.config.resume_classes import Free

ServerUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$")]
"""URL of a server, http://host:port or https://host:port, without a path."""


class ServerPoolConfig(Section):
    """Pool of vLLM or SGLang servers that join and leave during the run, each with its own inference actor."""

    urls: Free[list[ServerUrl]] = Field(min_length=1)
    """Servers (http://host:port). With http a host name stands for all addresses it currently resolves to, e.g. of a
    headless Kubernetes service; with https for a single server."""
    sync_interval: Free[float] = Field(10.0, gt=0)
    """Seconds between two checks of the servers in `urls`."""
