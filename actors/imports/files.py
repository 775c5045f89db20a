"""Reading of input files. Faults are errors that name the file."""

from pathlib import Path
from typing import Any

import yaml

from schemas.config.load import parse
from schemas.errors import ConfigError


def map_of(path: Path) -> dict[str, Any]:
    """Return the map in a YAML file.

    Raises:
        ConfigError: the file can't be read, is not YAML, or has no map.
    """
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it in that encoding") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: must be a map of keys")
    return content
