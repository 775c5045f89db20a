"""Images at URLs: downloaded when a data set is opened, once for a run, so that no row waits for the network.

Files are kept with the run, named by their URL: an image that changes later does not change the run.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from actors.datasets.images import ImageSource, file_name
from actors.datasets.prepared import Prepared, digest_of
from actors.process.tasks import Task, task
from schemas.config.images import ImagesConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import ClientSession

CONNECTIONS = 8
"""Images that are downloaded at the same time."""
SECONDS = 60.0
"""Time limit of one try, from the connection to the last byte."""
TRIES = 5
"""Tries for one image, if its failures may pass."""
PAUSE_SECONDS = 1.0
"""Seconds before the second try; doubled before each further one."""
REDIRECTS = 5
"""Greatest number of redirects of one image."""
MOST_PROBLEMS = 5
"""Failed images after which no further ones are asked for."""
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "grpo-actors"}


class _PassingError(Exception):
    """Answer that may be another one soon."""


def downloads_folder(prepared: Prepared | None, keys: ImagesConfig) -> Path | None:
    """Return the folder of downloaded images; None without origins, or without a run."""
    return prepared.folder / "images" if prepared is not None and keys.origins else None


def download(source: ImageSource, identity: Any, urls: Iterable[tuple[str, str]]) -> None:
    """Download the images of a data set that are at URLs, unless the run has them.

    Args:
        source: origins, limits and folder of the images, which must be known.
        identity: plain value that another data set, or another choice of rows, has not.
        urls: place of the row, for errors, and URL of each image; read only if the run has not downloaded them.

    Raises:
        ConfigError: an origin is not allowed, or an image can't be downloaded or used. The text names row and URL.
    """
    folder, content = source.downloads, [identity, source.keys.origins]
    assert folder is not None
    # a list that is there says that its images are; other processes wait for it
    name = f"{digest_of(json.dumps(content).encode())}.urls"
    Prepared(folder).made(name, lambda target: _download(source, folder, urls, target))


def _download(source: ImageSource, folder: Path, urls: Iterable[tuple[str, str]], target: Path) -> None:
    wanted = dict[str, str]()
    with task("look for images at URLs", unit="images") as looking:
        for where, url in urls:
            if url not in wanted:
                try:
                    source.check_origin(url)
                except ValueError as error:
                    raise ConfigError(f"{where}: an image {error}") from None
                wanted[url] = where
            looking.advance()
    missing = {url: where for url, where in wanted.items() if not (folder / file_name(url)).exists()}
    if missing:
        with task("download images", len(missing), "images") as downloading:
            if problems := asyncio.run(_keep_all(source, folder, missing, downloading)):
                raise ConfigError(*problems)
    target.write_text("".join(f"{file_name(url)} {url}\n" for url in wanted), encoding="utf-8")


async def _keep_all(source: ImageSource, folder: Path, missing: Mapping[str, str], downloading: Task) -> list[str]:
    """Download images into files; return the problems."""
    # imported here: data without URLs needs no client
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar

    problems = list[str]()

    async def work(session: "ClientSession", left: Iterator[tuple[str, str]]) -> None:
        for url, where in left:
            words = f"{where}: the image at {url[:200]!r}"
            try:
                data = await _tried(session, url, source)
                # a file that no row can use is not kept
                source.load(data, words)
                staging = folder / f".{file_name(url)}.tmp"
                staging.write_bytes(data)
                staging.replace(folder / file_name(url))
                downloading.advance()
            except ConfigError as error:
                problems.extend(error.problems)
            except ValueError as error:
                problems.append(f"{words} {error}")
            if len(problems) >= MOST_PROBLEMS:
                return

    async with ClientSession(
        cookie_jar=DummyCookieJar(), timeout=ClientTimeout(total=SECONDS), headers=HEADERS, auto_decompress=False
    ) as session:
        left = iter(missing.items())
        await asyncio.gather(*(work(session, left) for _ in range(CONNECTIONS)))
    return problems


async def _tried(session: "ClientSession", url: str, source: ImageSource) -> bytes:
    """Return the bytes at a URL; failures that may pass are tried again.

    Raises:
        ValueError: the image can't be downloaded; the text follows its name.
    """
    from aiohttp import ClientError

    why = ""
    for number in range(TRIES):
        if number:
            await asyncio.sleep(PAUSE_SECONDS * 2 ** (number - 1))
        try:
            return await _fetched(session, url, source)
        except TimeoutError:
            why = f"has not come within {SECONDS:g} seconds"
        except _PassingError as error:
            why = str(error)
        except ClientError as error:
            why = f"can't be downloaded: {error}"
    raise ValueError(f"{why}, in {TRIES} tries")


async def _fetched(session: "ClientSession", url: str, source: ImageSource) -> bytes:
    # imported here, as aiohttp
    from yarl import URL

    for _ in range(REDIRECTS + 1):
        # encoded: a signed URL must arrive as it is written
        request = session.get(URL(url, encoded=True), allow_redirects=False, proxy=_proxy_of(url))
        async with request as response:
            if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                url = urljoin(url, response.headers["Location"])
                try:
                    source.check_origin(url)
                except ValueError as error:
                    raise ValueError(f"is redirected: it {error}") from None
                continue
            answer = f"is answered {response.status} {response.reason or ''}".rstrip()
            if response.status in (408, 429) or response.status >= 500:
                raise _PassingError(answer)
            if response.status != 200:
                raise ValueError(f"{answer}; correct the URL, or leave out the row")
            data = bytearray()
            async for chunk in response.content.iter_any():
                data += chunk
                source.check_length(len(data))
            return bytes(data)
    raise ValueError(f"is redirected more than {REDIRECTS} times")


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL of another machine."""
    parts = urlsplit(url)
    if parts.scheme != "https" or proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get("https")
