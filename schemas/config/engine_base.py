"""Capabilities of engines, told by their configuration classes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from schemas.config.base import Section

if TYPE_CHECKING:
    from schemas.config.run import RunConfig

WeightChannel = Literal["filesystem", "rendezvous", "device"]


class EngineBase(Section):
    """Base of the configuration of every engine, with what the engine can.

    Other code asks for a capability and never for the type, so that a new engine changes no code but its own.
    """

    loads_model: ClassVar[bool] = True
    """True if completions come from the model of `model.path`. False: the engine makes tokens up, and no actor of the
    run loads a model or a tokenizer."""
    has_server: ClassVar[bool] = False
    """True if a server holds the model. False: the inference actor itself does."""
    channels: ClassVar[frozenset[WeightChannel]] = frozenset({"filesystem", "rendezvous", "device"})
    """Values of `weights.channel` with which the engine works."""
    supports_noise: ClassVar[bool] = False
    """True if the engine puts `inference.noise` on the policy."""
    takes_images: ClassVar[bool] = False
    """True if the engine takes prompts with images."""
    takes_trained_vision: ClassVar[bool] = False
    """True if the engine takes new weights of vision tower and projector, and forgets the features of older ones."""
    gives_memory_back: ClassVar[bool] = False
    """True if an engine that an inference actor starts gives the memory of its cache back while the trainer works."""
    takes_any_adapter: ClassVar[bool] = True
    """True if the engine takes adapters with more than two matrices for each adapted matrix (DoRA, whole modules)."""

    @property
    def tells_experts(self) -> bool:
        """True if the engine can tell which experts its routers chose (`trainer.router_replay`)."""
        return False

    @property
    def maps_base(self) -> bool:
        """True if an engine that an inference actor starts can use the trainer's memory for the frozen base."""
        return False

    @property
    def server_urls(self) -> list[str]:
        """Existing servers, the first for inference-0 and so on."""
        return []

    @property
    def attached(self) -> bool:
        """True if the engine uses an existing server; False if the inference actor starts what it needs."""
        return False

    @property
    def own_vocab_size(self) -> int:
        """Number of token ids of an engine that loads no model; 0 for the size of the model's vocabulary."""
        return 0

    @property
    def num_slots(self) -> int | None:
        """Number of completions sampled at once; None if only the server knows."""
        return None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs over which one engine, started by its actor, spreads; 0 if it computes elsewhere."""
        return int(self.loads_model and not self.attached)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens with keys and values in the memory of the inference actor."""
        return 0

    def max_tokens_per_sequence(self) -> dict[str, int]:
        """Return the limits of prompt and completion together, by configuration key; empty if only the model limits."""
        return {}

    def packages(self) -> Iterator[tuple[str, str]]:
        """Yield name and installation advice of each package, beyond the usual installation, to start the engine."""
        yield from ()

    def problems(self, config: "RunConfig") -> Iterator[str]:
        """Yield an error, beginning with a key, for each key of this engine that contradicts another section."""
        yield from ()

    def warnings(self, config: "RunConfig") -> Iterator[str]:
        """Yield a warning, beginning with a key, for each allowed but doubtful key of this engine."""
        yield from ()
