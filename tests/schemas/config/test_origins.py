"""Origins of URLs: their normal form, and what is no origin."""

import pytest
from pydantic import ValidationError

from schemas.config.data import JsonlConfig
from schemas.config.environments import PythonConfig
from schemas.config.images import ImagesConfig
from schemas.config.origins import origin_of


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://example.com", "https://example.com"),
        ("https://example.com/a/b.png?x=1#y", "https://example.com"),
        ("HTTPS://Example.COM:443/", "https://example.com"),
        ("https://example.com:8443/a", "https://example.com:8443"),
        ("http://localhost/a", "http://localhost"),
        ("http://127.0.0.1:80", "http://127.0.0.1"),
        ("http://127.0.0.1:8000/a", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/a", "http://[::1]:8000"),
        ("https://[2001:DB8::1]/a", "https://[2001:db8::1]"),
        ("https://example.com./a", "https://example.com."),
    ],
)
def test_an_origin_has_one_form(url: str, origin: str) -> None:
    """Scheme, host and port in small letters, without the default port; the form of the form is itself."""
    assert origin_of(url) == origin == origin_of(origin)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.com/a.png", "must begin with https://"),
        ("http://127.0.0.1.example.com/a.png", "must begin with https://"),
        ("http://localhost.example.com/a.png", "must begin with https://"),
        ("ftp://example.com/a.png", "must begin with https://"),
        ("file:///etc/passwd", "names no host"),
        ("example.com/a.png", "names no host"),
        ("https:///a.png", "names no host"),
        ("https://*.example.com", "names no host"),
        ("https://example.com\\.evil.com/a", "names no host"),
        ("https://example.com@evil.com/a", "a user or a password"),
        ("https://user:secret@example.com/a", "a user or a password"),
        ("https://example.com\\@evil.com/a", "a user or a password"),
        ("https://example.com:99999/a", "is malformed"),
        ("https://example.com:x/a", "is malformed"),
        ("https://[::1/a", "is malformed"),
        ("https://exa\tmple.com/a", "percent-encoded"),
        ("https://example.com/a b.png", "percent-encoded"),
        ("https://example.com/\r\nCookie:x", "percent-encoded"),
        ("https://exämple.com/a", "percent-encoded"),
        ("", "percent-encoded"),
    ],
)
def test_what_is_no_origin_is_refused_in_words(url: str, words: str) -> None:
    """However the host of another machine is written."""
    with pytest.raises(ValueError, match=words):
        origin_of(url)


def test_the_configuration_has_origins_in_their_normal_form() -> None:
    """So they can be compared as texts."""
    given = ["HTTPS://Example.com:443/", "http://localhost:8000"]
    assert ImagesConfig(origins=given).origins == ["https://example.com", "http://localhost:8000"]
    assert ImagesConfig().origins == []


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ("https://example.com/images", "is more than an origin; write https://example.com"),
        ("https://example.com/?x", "is more than an origin"),
        ("http://example.com", "must begin with https://"),
        ("example.com", "names no host"),
        ("*", "names no host"),
    ],
)
def test_an_origin_of_the_configuration_is_no_more_than_an_origin(origin: str, words: str) -> None:
    """Paths would look like a limit, and are none."""
    with pytest.raises(ValidationError, match=words):
        JsonlConfig.model_validate({"path": "a.jsonl", "images": {"origins": [origin]}})


def test_environments_with_turns_have_no_origins() -> None:
    """Their images come as bytes, at times that no download could come before."""
    with pytest.raises(ValidationError, match="origins"):
        PythonConfig.model_validate({"path": "a.py:A", "images": {"origins": ["https://example.com"]}})
