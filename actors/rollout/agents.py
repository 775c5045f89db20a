"""Agents of a rollout actor: the server of their sessions, and a session for each trajectory.

`Agents` is an asynchronous context; its server starts with it where an environment is an agent. `Agents.opener` gives
`actors.rollout.episode.play` a session for its trajectory. An external agent has no worker: `Taken` offers its session
to services and waits for the end of it.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from actors.datasets.images import why_not_taken
from actors.engines.http.access import secret, server_tls
from actors.rollout.episode import OpenSession, Rewards, Sessions, Trajectory
from actors.rollout.sessions.server import Count, SessionServer
from actors.rollout.sessions.session import Session
from actors.rollout.sessions.table import SessionTable
from actors.rollout.turn_images import share_bytes
from actors.trajectories.chat import Chat
from actors.trajectories.images import MessageImages
from schemas.config import RunConfig
from schemas.config.environments import AgentConfig, EnvironmentBase
from schemas.errors import ConfigError

Json = dict[str, Any]


class Agents:
    """Sessions of the agents of a run.

    Args:
        config: configuration of the run.
        chats: language of the model by label of the environment.
        sequence_len: tokens of the longest sample.
        count: told of each call, with environment and outcome.
    """

    def __init__(self, config: RunConfig, chats: Mapping[str, Chat], sequence_len: int, count: Count) -> None:
        self._config, self._keys = config, config.rollout.sessions
        self._chats, self._sequence_len, self._count = chats, sequence_len, count
        self.table = SessionTable()
        self._server: SessionServer | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start the server, if an environment is an agent.

        Raises:
            ConfigError: the address can't be bound, the certificate can't be used, or the key of services is missing.
        """
        agents = [one for one in self._config.environments_by_label.values() if isinstance(one, AgentConfig)]
        if not agents:
            return self
        keys = self._keys
        admin = secret(keys.admin_key_env, "rollout.sessions.admin_key_env")
        server = SessionServer(
            self.table,
            self._chats,
            self._config.model.path,
            self._sequence_len,
            host=keys.host,
            port=keys.port,
            advertised=keys.advertise,
            admin_key=admin,
            tls=server_tls(keys, "rollout.sessions"),
            count=self._count,
            image_bytes=self._image_bytes(agents),
        )
        try:
            self._server = await self._stack.enter_async_context(server)
        except OSError as error:
            raise ConfigError(f"rollout.sessions.port: {keys.host}:{keys.port} can't be bound: {error}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _image_bytes(self, agents: Sequence[AgentConfig]) -> int:
        """Return the bytes of the images that a conversation may show; 0 if the run takes none."""
        if why_not_taken(self._config):
            return 0
        share = share_bytes(self._config.packer.groups_per_step, self._config.rollout.group_size)
        return max(one.images.max_images * min(one.images.max_bytes, share) for one in agents)

    def opener(self, environment: EnvironmentBase, chat: Chat) -> OpenSession | None:
        """Return what opens the session of a trajectory; None for environments that are no agents."""
        if not isinstance(environment, AgentConfig):
            return None
        label = environment.label

        @contextlib.asynccontextmanager
        async def opened(ask: Any, data: Json, images: MessageImages) -> AsyncIterator[Sessions]:
            session = Session(label, ask, chat, data, images)
            assert self._server is not None
            async with self.table.opened(session):
                yield _Recorded(session, self._server.access(session))

        return opened


class _Recorded:
    """A session as its episode sees it."""

    def __init__(self, session: Session, access: Json) -> None:
        self._session, self.access = session, access

    def split(self, rewards: Rewards) -> Rewards:
        """Take rewards of calls out of the agent's rewards; return the others."""
        return self._session.split(rewards)

    def write(self, trajectory: Trajectory) -> None:
        """Write rewards of calls, answers that nobody took, and parameters that were not obeyed."""
        trajectory.turn_rewards = self._session.turn_rewards
        trajectory.info |= self._session.info
        for turn in self._session.untaken:
            trajectory.tree.leave_out(turn)


class Taken:
    """Episode of an external agent: a service takes its session, calls the model, and ends it."""

    is_driving = True
    is_abandoned = False

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self.columns: Json = {}
        self.turn_rewards: list[tuple[int, float]] = []
        """None: rewards of calls are in the session."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reset(self, row: Json, seed: int) -> Json:
        """Never called: a service drives."""
        raise NotImplementedError

    step: Any = reset
    score: Any = reset

    async def run(self, row: Json, seed: int, answer: Any, session: Json | None = None) -> Rewards:
        """Offer the session, and wait until a service has ended it. The trajectory's time limits the wait."""
        assert session is not None
        offered = self._table.find(session["api_key"])
        self._table.offer(offered)
        await offered.ended.wait()
        return {}
