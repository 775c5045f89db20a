"""Who may use an engine's HTTP: those with the key, and over TLS those who trust the certificate."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from actors.engines.fake import FakeEngine
from actors.engines.http.access import api_key, client_tls, server_tls
from actors.engines.http.client import CompletionClient, EngineError, RequestRefusedError
from actors.engines.http.server import CompletionServer
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.inference import InferenceConfig
from schemas.errors import ConfigError
from tests.actors.engines.engines import WAIT, policy
from tests.actors.engines.http.test_client import PROMPT, peer, ticket

KEY = "sesam"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Deterministic."""
    made = FakeEngine(FakeEngineConfig(vocab_size=30))
    yield made
    made.close()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[CompletionServer]:
    """Asks for the key."""
    made = CompletionServer(engine, "tiny", "boot1", "127.0.0.1", 0, WAIT, api_key=KEY)
    yield made
    made.close()


@pytest.mark.parametrize("header", [None, "Bearer wrong", "sesam", "bearer sesam", "Bearer ", "Bearer sésam"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")])
async def test_requests_without_the_key_get_401(
    server: CompletionServer, method: str, path: str, header: str | None
) -> None:
    """Whatever they ask for, in the shape of OpenAI's errors; /health answers without."""
    url = f"http://127.0.0.1:{server.port}"
    headers = {"Authorization": header} if header else {}
    async with aiohttp.ClientSession() as session:
        async with session.request(method, url + path, headers=headers) as answer:
            assert answer.status == 401
            assert (await answer.json())["error"]["code"] == 401
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200


async def test_rollouts_client_with_the_key_samples_and_without_it_is_refused_by_name(server: CompletionServer) -> None:
    """The refusal names the key of the configuration; it would not help to ask again."""
    friend, stranger = CompletionClient("tiny", WAIT, 4, KEY), CompletionClient("tiny", WAIT, 4)
    assert len(await friend.sample(peer(server.port), ticket(), PROMPT)) == 3
    with pytest.raises(RequestRefusedError, match=r"HTTP 401: .*inference\.api_key_env"):
        await stranger.sample(peer(server.port), ticket(), PROMPT)
    await friend.close()
    await stranger.close()


def test_the_official_client_sends_the_key_as_we_read_it(server: CompletionServer) -> None:
    """`openai.OpenAI(api_key=...)` lists the model; another key is an AuthenticationError."""
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as friend:
        assert [model.id for model in friend.models.list()] == ["tiny"]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its name is in the configuration."""
    assert api_key(InferenceConfig()) == ""
    monkeypatch.setenv("ENGINE_KEY", KEY)
    assert api_key(InferenceConfig(api_key_env="ENGINE_KEY")) == KEY
    monkeypatch.setenv("ENGINE_KEY", "")
    with pytest.raises(ConfigError, match=r"inference\.api_key_env: the environment variable ENGINE_KEY is not set"):
        api_key(InferenceConfig(api_key_env="ENGINE_KEY"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> InferenceConfig:
    """With a certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl, which makes the certificate, is not here")
    folder: Path = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=engine "
    command += "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return InferenceConfig(tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"))


async def test_over_tls_those_who_trust_the_certificate_sample(engine: FakeEngine, settings: InferenceConfig) -> None:
    """A client with the file samples; one without, one under another name and one in plain HTTP do not."""
    tls = client_tls(settings)
    assert isinstance(tls, ssl.SSLContext)
    server = CompletionServer(engine, "tiny", "boot1", "127.0.0.1", 0, WAIT, tls=server_tls(settings))
    try:
        for host, context, works in (
            ("https://127.0.0.1", tls, True),
            ("https://127.0.0.1", None, False),
            ("https://localhost", tls, False),
            ("http://127.0.0.1", tls, False),
        ):
            client = CompletionClient("tiny", WAIT, 4, tls=context)
            there = peer(server.port).model_copy(update={"url": f"{host}:{server.port}", "policy": policy(1)})
            if works:
                assert len(await client.sample(there, ticket(), PROMPT)) == 3
            else:
                with pytest.raises((EngineError, RequestRefusedError)):
                    await client.sample(there, ticket(), PROMPT)
            await client.close()
    finally:
        server.close()


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    """Neither there nor a certificate; and one of two is refused."""
    assert server_tls(InferenceConfig()) is client_tls(InferenceConfig()) is None
    (tmp_path / "cert.pem").write_text("nothing")
    for cert in ("nowhere.pem", "cert.pem"):
        settings = InferenceConfig(tls_cert=str(tmp_path / cert), tls_key=str(tmp_path / "key.pem"))
        with pytest.raises(ConfigError, match=r"inference\.tls_cert"):
            server_tls(settings)
        with pytest.raises(ConfigError, match=r"inference\.tls_cert"):
            client_tls(settings)
    with pytest.raises(ValueError, match="set both or none"):
        InferenceConfig(tls_cert="cert.pem")
