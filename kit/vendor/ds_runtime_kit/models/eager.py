"""transformers as an engine that takes turns with this one, as `bench compare` has it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ds_runtime.errors import ConfigError


class Eager:
    """transformers' `generate`, eager attention and its own cache."""

    def __init__(self, settings: Mapping[str, Any], rows: int, context: int) -> None:
        if find_spec("transformers") is None:
            raise ConfigError("--engine transformers: is not installed; pip install transformers")
        from transformers import AutoModelForCausalLM

        if settings.get("threads"):
            torch.set_num_threads(settings["threads"])
        start = time.perf_counter()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype="auto", attn_implementation="eager"
        )
        self._model = loaded.eval()
        self._loaded_in = time.perf_counter() - start
        self.vocab = int(loaded.config.vocab_size)

    def about(self) -> dict[str, Any]:
        return {"dtype": str(self._model.dtype), "load_s": self._loaded_in}

    def limits(self, steps: Sequence[tuple[int, int]]) -> dict[str, Any]:
        return {}

    def read_rate(self) -> float:
        return 0.0

    def seconds(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            start = time.perf_counter()
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
            spent = time.perf_counter() - start
        assert out.shape == (len(prompts), ids.shape[1] + tokens), out.shape
        return spent
