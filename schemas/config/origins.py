"""Origins of URLs, by which downloads are allowed."""

import re
from urllib.parse import urlsplit

from schemas.config.services import is_loopback

DEFAULT_PORTS = {"https": 443, "http": 80}
_PRINTABLE = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9_.-]+|[0-9a-f:.]+")


def origin_of(url: str) -> str:
    """Return the origin of a URL in its normal form: `https://host`, with a port unless it is the default one.

    Raises:
        ValueError: the URL is not https (http on a loopback host), or is malformed; the text follows the URL's name.
    """
    # Python's parser drops line breaks and tabs without a word
    if not _PRINTABLE.fullmatch(url):
        raise ValueError("has blanks or characters beyond ASCII; write them percent-encoded")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"is malformed: {error}") from None
    if "@" in parts.netloc:
        raise ValueError("has a user or a password; leave them out")
    if not _HOST.fullmatch(host):
        raise ValueError("names no host")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise ValueError("must begin with https://, or with http:// and a loopback host")
    written = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{written}" + (f":{port}" if port not in (None, DEFAULT_PORTS[parts.scheme]) else "")
