"""`actors keys`: the keys of the bus for people. No secret is ever printed."""

from pathlib import Path

from bus.keys import KINDS, SECRET_VARIABLES, fingerprint_of, finish, load, make, public_of, rotate
from schemas.errors import ConfigError

WHOSE = {"server": "the packer's control socket", "client": "whoever connects"}


def keys(action: str, folder: Path, finishes: bool = False) -> str:
    """Do what is asked, and say what to do next.

    Raises:
        ConfigError: it can't be done, in words.
    """
    if finishes and action != "rotate":
        raise ConfigError(f"actors keys {action}: --finish belongs to rotate")
    if action == "new":
        make(folder)
        return f"{show(folder)}\n\n{_where_to_put(folder)}"
    if action == "rotate":
        (finish if finishes else rotate)(folder)
        return f"{show(folder)}\n\n{_FINISHED if finishes else _rotating(folder)}"
    return show(folder)


def show(folder: Path) -> str:
    """A table of the public keys, the newest of each kind first, with who has the secret of which."""
    found = load(folder)
    lines = [f"{'kind':<8}{'fingerprint':<18}{'secret':<8}public key"]
    for kind in KINDS:
        held = {public_of(secret) for secret in getattr(found, f"{kind}_secrets")}
        for public in getattr(found, f"{kind}_publics"):
            where = "here" if public in held else "-"
            lines.append(f"{kind:<8}{fingerprint_of(public):<18}{where:<8}{public.hex()}")
    return "\n".join([*lines, *(f"{kind}: {whose}" for kind, whose in WHOSE.items())])


def _where_to_put(folder: Path) -> str:
    return (
        f"bus.keys: {folder.absolute()} in run.yaml encrypts the bus of a run on tcp. Other machines\n"
        "need such a folder with client.secret, client.public and server.public; server.secret stays where the packer\n"
        f"runs. {SECRET_VARIABLES['client']} and {SECRET_VARIABLES['server']} may stand in for the secrets."
    )


def _rotating(folder: Path) -> str:
    return (
        "Old and new keys are good now, and the run goes on. Copy to other machines what they have of these files,\n"
        f"the .public ones first; then end it with `actors keys rotate {folder} --finish`, and copy them again."
    )


_FINISHED = (
    "The older keys are good no more: not for new connections, and the packer's are made anew within seconds. Data\n"
    "connections of before end with their processes; where a secret has leaked, restart the actors, one by one."
)
