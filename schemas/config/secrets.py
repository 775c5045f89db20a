"""Detection of values that look like secrets.

A configuration is written to `config.resolved.yaml` and the ledger and is visible in the list of processes (overrides),
so `actors check` refuses such values and asks for an environment variable instead.
"""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

NAME = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret_?key|password|passwd|passphrase|pwd|credentials?|authorization|cookie"
    r"|(api|auth|access|bearer|hf|hub|wandb|github)_?token)$|_secret$",
    re.IGNORECASE,
)
"""Pattern of keys that hold a secret whatever the value looks like."""
AMBIGUOUS_NAME = re.compile(r"(^|_)(secret|token|key)$", re.IGNORECASE)
"""Pattern of keys that hold a secret only if the value looks random.

`secret: apple` may be a riddle's answer, `token: </s>` an end of text.
"""
RANDOM_VALUE = re.compile(
    # OpenAI's, Hugging Face's, GitHub's and Slack's prefixes | 20 characters of mixed kinds | 32 hexadecimal digits
    r"(sk-|hf_|gh[opsu]_|github_pat_|xox[abps]-)[\w-]{8,}|(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w+=.-]{20,}|[0-9a-f]{32,}",
    re.ASCII,
)
"""Pattern of random values: with the prefix of a provider, long and mixed, or hexadecimal."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|\$\{?[A-Z][A-Z0-9_]*\}?", re.ASCII)
"""Pattern of names of environment variables. Such a name is no secret."""
FREE = ("kwargs", "extra_args")
"""Keys with free content. Only values below such a key are tested: all other keys are ours and hold no secret, but for
a URL with one."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.ASCII | re.IGNORECASE)


def found_in(tree: Any, path: str = "", *, free: bool = False) -> Iterator[str]:
    """Yield the dotted paths of values that look like secrets below the keys FREE, and of URLs with secrets anywhere.

    Args:
        tree: plain values of a configuration.
        path: dotted path of the tree.
        free: the tree is below a key of FREE.
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            where = f"{path}.{key}" if path else str(key)
            if free and isinstance(value, str) and looks_like_a_secret(str(key), value):
                yield where
            else:
                yield from found_in(value, where, free=free or key in FREE)
    elif isinstance(tree, str):
        if has_credentials(tree):
            yield path
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            where = f"{path}.{number}"
            if not (free and isinstance(value, str)):
                yield from found_in(value, where, free=free)
                continue
            if has_credentials(value) or has_credentials(value.partition("=")[2]):
                yield where
                continue
            # arguments of a command line: `--api-key=VALUE`, or `--api-key` and VALUE as the next item
            name, equals, given = value.partition("=")
            rest = tree[number + 1 :]
            if not equals and rest and not str(rest[0]).startswith("--"):
                given = str(rest[0])
            if name.startswith("--") and looks_like_a_secret(name, given):
                yield where


def has_credentials(value: str) -> bool:
    """Return whether a value is a URL with a password, a token in the user's place, or a secret in its query."""
    if not URL.fullmatch(value):
        return False
    try:
        parts = urlsplit(value)
    except ValueError:  # no URL, which its key may refuse
        return False
    password, user = parts.password or "", parts.username or ""
    return (
        bool(password and not VARIABLE.fullmatch(password))
        or bool(RANDOM_VALUE.fullmatch(user))
        or any(looks_like_a_secret(name, given) for name, given in parse_qsl(parts.query))
    )


def looks_like_a_secret(key: str, value: str) -> bool:
    """Return whether a value under this key looks like a secret. The name of a variable (`api_key_env`) does not."""
    # `--api-key` of an argument reads like `api_key`
    name = key.replace("-", "_").strip("_")
    if not value or VARIABLE.fullmatch(value):
        return False
    return bool(NAME.search(name) or (AMBIGUOUS_NAME.search(name) and RANDOM_VALUE.fullmatch(value)))
