"""How long a context may be and how many KV pages one rank gets. Pure arithmetic; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ds_runtime.assemble import Assembly
from ds_runtime.errors import ConfigError
from ds_runtime.model.estimate import activation_bytes, sparse_bytes
from ds_runtime.progress import amount

FULL_CONTEXTS = 8


def context_length(assembly: Assembly) -> int:
    """The longest prompt + output: the flag, else the model's own limit."""
    limit = assembly.model.max_positions
    wanted = assembly.config.context_length
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"--context-length {wanted}: the model's positions end at {limit} "
            f"(max_position_embeddings); give at most that"
        )
    return limit if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What one rank can hold. page_bytes: one page over all layers."""

    pages: int
    page_bytes: int
    free: int
    share: float | None  # of the free memory; None: the user's --kv-memory or fraction
    page_size: int
    step_tokens: int = 0  # whose activations leave less than the platform's share; 0: they do not

    @property
    def total(self) -> int:
        """Bytes of the whole KV cache."""
        return self.pages * self.page_bytes

    def too_small(self, pages: int, context: int) -> ConfigError:
        """The error for a cache that does not hold one full context."""
        needed = amount(-(-context // self.page_size) * self.page_bytes)
        have = amount(pages * self.page_bytes)
        fits = pages * self.page_size
        given = self.share is None
        what = "your setting gives" if given else f"{self.share:.0%} of free memory is"
        lower = f"lower --context-length, e.g. to {fits}, or " if fits else ""
        if self.step_tokens:
            lower = f"lower --max-step-tokens (now {self.step_tokens}), {lower}"
        return ConfigError(
            f"KV cache: one context of {context} tokens needs {needed}, but {what} {have}, "
            f"{fits} tokens; {amount(self.free)} are free: {lower}raise --kv-memory "
            "or --mem-fraction-static"
        )


def kv_memory(assembly: Assembly, free: int, total: int, context: int) -> KvMemory:
    """Pages for the KV cache of one rank that has `total` bytes of memory, `free` of them left
    after loading."""
    config = assembly.config
    facts = assembly.binding.base
    per_token = assembly.binding.layout.bytes_per_token(facts) * assembly.cached_layers
    if (index := assembly.binding.index_layout) is not None:
        per_token += index.bytes_per_token(facts) * assembly.indexers
    page_bytes = per_token * config.page_size
    one = -(-context // config.page_size)
    share, step_tokens = None, 0
    if config.kv_memory is not None:
        if config.kv_memory > free:
            raise ConfigError(
                f"--kv-memory {amount(config.kv_memory)}: only {amount(free)} are free after "
                "loading the weights; give less"
            )
        pages = config.kv_memory // page_bytes
    elif config.mem_fraction_static is not None:
        rest = int(total * (1.0 - config.mem_fraction_static))  # what is to stay free
        if rest >= free:
            raise ConfigError(
                f"--mem-fraction-static {config.mem_fraction_static:g}: of {amount(total)}, the "
                f"weights leave {amount(free)} free, and {amount(rest)} are to stay so: nothing "
                "is left for the KV cache; raise it"
            )
        pages = (free - rest) // page_bytes
    else:
        share = assembly.platform.kv_share
        left = max(0, free - sparse_bytes(assembly))
        beside = max(0, left - activation_bytes(assembly))
        most = int(left * share)
        if beside < most:
            most, share, step_tokens = beside, beside / free, config.max_step_tokens
        pages = min(FULL_CONTEXTS * one, most // page_bytes)
    return KvMemory(pages, page_bytes, free, share, config.page_size, step_tokens)
