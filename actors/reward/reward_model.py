"""Reward model: a sequence classifier of transformers with one label, in a worker process of the reward actor.

As in TRL, the tokenizer of the reward model writes the text of a chat with its own template; prompt and completion of a
text prompt are joined. No special tokens are added. The reward is the classifier's only logit.
"""

import threading
from typing import Any

from actors.reward.library.completions import Completion


class RewardModel:
    """Classifier, loaded. Loading happens in the constructor, so that a worker is ready once the model is.

    Args:
        model: folder, or name on the Hugging Face hub.
        revision: revision on the hub; empty for the newest.
        device: device of torch, or `auto`: the first GPU, or the CPU without one.
        dtype: type of the weights, or `auto` for that of the files.
        batch_size: most completions of a forward pass.
        max_length: most tokens of prompt and completion; a longer text loses tokens at its start. 0: the limit of the
            model's configuration.

    Raises:
        ValueError: the files are no classifier with one label.
    """

    def __init__(self, model: str, revision: str, device: str, dtype: str, batch_size: int, max_length: int) -> None:
        # a worker that loads no model imports no torch
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch = torch
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        source = {"revision": revision} if revision else {}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, truncation_side="left", **source)
        loaded, info = AutoModelForSequenceClassification.from_pretrained(
            model, dtype=dtype, output_loading_info=True, **source
        )
        # transformers would give random weights to a classifier's head that the files do not have
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"{model} is no sequence classifier: its files have no {', '.join(missing[:3])}")
        if loaded.config.num_labels != 1:
            raise ValueError(f"{model} has {loaded.config.num_labels} labels; a reward model has one")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        loaded.config.pad_token_id = self._tokenizer.pad_token_id
        self._model: Any = loaded.to(self._device).eval()
        self._batch_size = batch_size
        limit = getattr(loaded.config, "max_position_embeddings", 0)
        self._max_length: int | None = max_length or limit or None
        # calls come in threads; one at a time, or their batches would need memory together
        self._lock = threading.Lock()

    def __call__(self, prompts: list[Any], completions: list[Completion], **_: Any) -> list[float]:
        """Return the logit of each completion."""
        texts = [self.text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        logits: list[float] = []
        with self._lock, self._torch.inference_mode():
            for start in range(0, len(texts), self._batch_size):
                inputs = self._tokenizer(
                    texts[start : start + self._batch_size],
                    return_tensors="pt",
                    padding=True,
                    padding_side="right",
                    add_special_tokens=False,
                    truncation=self._max_length is not None,
                    max_length=self._max_length,
                ).to(self._device)
                logits += self._model(**inputs).logits[:, 0].float().tolist()
        return logits

    def text(self, prompt: Any, completion: Completion) -> str:
        """Return the text that is scored: the chat in the model's own template, or prompt and completion joined.

        Raises:
            ValueError: the tokenizer of the reward model has no chat template.
        """
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        if self._tokenizer.chat_template is None:
            raise ValueError("the reward model's tokenizer has no chat_template, and the prompts are chats")
        return str(self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))
