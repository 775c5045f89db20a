"""`actors keys`: create, show and rotate the keys of the bus. No secret is ever printed."""

from pathlib import Path

from bus.keys import KINDS, SECRET_VARIABLES, fingerprint_of, finish, load, make, public_of, rotate
from schemas.errors import ConfigError

WHOSE = {"server": "the packer's control socket", "client": "every other actor"}


def keys(action: str, folder: Path, finishes: bool = False) -> str:
    """Create, rotate or show keys. Return a text with the keys and with the next step.

    Args:
        action: `new`, `rotate` or `show`.
        folder: folder of the keys.
        finishes: True to finish a rotation.

    Raises:
        ConfigError: the action fails, for example since files are missing.
    """
    if finishes and action != "rotate":  # argparse has one set of options for all three actions
        raise ConfigError(f"actors keys {action}: --finish belongs to rotate")
    if action == "new":
        make(folder)
        next_step = (
            f"bus.keys: {folder.absolute()} in run.yaml encrypts the bus of a run on tcp. Other machines\n"
            "need a folder with client.secret, client.public and server.public; server.secret stays where the packer\n"
            f"runs. {SECRET_VARIABLES['client']} and {SECRET_VARIABLES['server']} can replace the files of the secrets."
        )
    elif action == "rotate" and not finishes:
        rotate(folder)
        next_step = (
            "Old and new keys both work now, and the run goes on. Copy the changed files to the other machines, the\n"
            f".public ones first. Then finish with `actors keys rotate {folder} --finish`, and copy the files again."
        )
    elif action == "rotate":
        finish(folder)
        # the packer binds its socket again, which closes all connections; data sockets are not bound again
        next_step = (
            "The old keys no longer open new connections, and the packer replaces its connections within seconds. "
            "Older data\nconnections end with their processes; if a secret has leaked, restart the actors, one by one."
        )
    else:
        return show(folder)
    return f"{show(folder)}\n\n{next_step}"


def show(folder: Path) -> str:
    """Return a table of the public keys, newest first per kind, and whether each one's secret is in the folder."""
    found = load(folder)
    lines = [f"{'kind':<8}{'fingerprint':<18}{'secret':<8}public key"]
    for kind in KINDS:
        # by public key, since a folder may have several secrets during a rotation
        held = {public_of(secret) for secret in getattr(found, f"{kind}_secrets")}
        for public in getattr(found, f"{kind}_publics"):
            where = "here" if public in held else "-"
            lines.append(f"{kind:<8}{fingerprint_of(public):<18}{where:<8}{public.hex()}")
    return "\n".join([*lines, *(f"{kind}: {whose}" for kind, whose in WHOSE.items())])
