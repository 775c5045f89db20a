"""What an example is and what gives them."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Protocol

from schemas.messages import Prompt


@dataclass(frozen=True)
class Example:
    """A prompt (text or messages) and the columns that reward functions receive."""

    prompt: Prompt
    columns: dict[str, Any]

    def key(self, environment: str) -> str:
        """Identity by content: sha256 over the environment's name and the prompt, 16 hex digits."""
        return hashlib.sha256(json.dumps([environment, self.prompt], sort_keys=True).encode()).hexdigest()[:16]


class Environment(Protocol):
    """Examples by number. `num_examples` is None where they never end."""

    num_examples: int | None

    def example(self, index: int) -> Example:
        """Example `index` ≥ 0; the same in every process."""
        ...
