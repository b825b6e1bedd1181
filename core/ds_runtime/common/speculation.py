"""What the user asked of speculation, settled. Torch-free.

Names and meanings are those that users know. `steps` is how often the draft layer runs after a step
of the model. `topk` is how many continuations of a token it follows. `tokens` is how many tokens of
a sequence the model verifies in one forward, the last one it drew included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ds_runtime.errors import ConfigError

DEFAULT_STEPS = 3
DRAFT_QUANTIZE = ("auto", "none", "fp8", "w4afp8")
MOST_TOKENS = TAIL = 64  # that one forward verifies of a sequence, and that a tree can hide


class SpeculativeSettings(Protocol):
    """The settings that speculation reads, named as in `EngineConfig`."""

    @property
    def speculative_algorithm(self) -> str | None: ...
    @property
    def speculative_num_steps(self) -> int | None: ...
    @property
    def speculative_eagle_topk(self) -> int | None: ...
    @property
    def speculative_num_draft_tokens(self) -> int | None: ...
    @property
    def speculative_draft_model_path(self) -> str | None: ...
    @property
    def speculative_draft_quantize(self) -> str: ...
    @property
    def speculative_adaptive(self) -> bool: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def max_step_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """topk 1 is a chain, and then tokens = steps + 1; more is a tree. adaptive: a step may draft
    less.
    """

    steps: int
    topk: int
    tokens: int
    adaptive: bool = False

    @property
    def drafts(self) -> int:
        """Drafted tokens that one forward verifies, per sequence."""
        return self.tokens - 1

    @property
    def choices(self) -> tuple[int, ...]:
        """How many tokens a step may draft, rising."""
        if not self.adaptive:
            return (self.drafts,)
        return (0, self.drafts) if self.topk > 1 else tuple(range(self.drafts + 1))

    @property
    def room(self) -> int:
        """Tokens after the last one whose keys the draft layer writes while it drafts."""
        return (self.steps - 1) * self.topk

    @staticmethod
    def whole(steps: int, topk: int) -> int:
        """Tokens of the whole tree: the root, its topk children, then topk of each of the topk
        best; of a chain with topk 1."""
        return 1 + topk + (steps - 1) * topk * topk

    @staticmethod
    def of(config: SpeculativeSettings) -> Speculation | None:
        """Of a config whose settings go together; None: no speculation."""
        if config.speculative_algorithm is None:
            return None
        topk = config.speculative_eagle_topk or 1
        tokens = config.speculative_num_draft_tokens
        steps = config.speculative_num_steps
        if steps is None:
            steps = DEFAULT_STEPS if tokens is None or topk > 1 else tokens - 1
        if tokens is None:
            tokens = steps + 1 if topk == 1 else min(MOST_TOKENS, Speculation.whole(steps, topk))
        return Speculation(steps, topk, tokens, config.speculative_adaptive)


def check(config: SpeculativeSettings) -> None:
    """ConfigError for speculative settings that do not go together."""
    given = {
        "--speculative-num-steps": config.speculative_num_steps,
        "--speculative-eagle-topk": config.speculative_eagle_topk,
        "--speculative-num-draft-tokens": config.speculative_num_draft_tokens,
        "--speculative-draft-model-path": config.speculative_draft_model_path,
    }
    found = Speculation.of(config)
    if found is None:
        given["--speculative-adaptive"] = config.speculative_adaptive or None
        rounds = config.speculative_draft_quantize
        given["--speculative-draft-quantize"] = None if rounds == "auto" else rounds
        for flag, value in given.items():
            if value is not None:
                said = flag if value is True else f"{flag} {value}"
                raise ConfigError(f"{said}: needs --speculative-algorithm NEXTN or EAGLE, too")
        return
    for flag, value in list(given.items())[:3]:
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{flag} {value}: must be at least 1")
    steps, topk, tokens = found.steps, found.topk, found.tokens
    flag, most = "--speculative-num-draft-tokens", MOST_TOKENS - 1
    for own, value in list(given.items())[:2]:
        if isinstance(value, int) and value > most:
            raise ConfigError(
                f"{own} {value}: must be at most {most}: a forward verifies {MOST_TOKENS} tokens"
            )
    if not 2 <= tokens <= MOST_TOKENS:
        raise ConfigError(
            f"{flag} {tokens}: must be 2 to {MOST_TOKENS}: the last token and the drafts after it "
            "(a chain verifies one more than --speculative-num-steps)"
        )
    if topk == 1 and tokens != steps + 1:
        raise ConfigError(
            f"{flag} {tokens}: with --speculative-eagle-topk 1 and --speculative-num-steps {steps} "
            f"it is {steps + 1}: a chain has one draft per step after the last token"
        )
    if tokens > (whole := Speculation.whole(steps, topk)):
        raise ConfigError(
            f"{flag} {tokens}: a tree of --speculative-num-steps {steps} and "
            f"--speculative-eagle-topk {topk} has {whole} tokens: give at most that"
        )
    if topk > 1 and config.batch_invariant:
        raise ConfigError(
            f"--speculative-eagle-topk {topk} with --batch-invariant: nodes of a tree have other "
            "places in the cache than tokens of an answer, and are added in another order: give 1"
        )
    if found.room > TAIL:
        raise ConfigError(
            f"--speculative-eagle-topk {topk} with --speculative-num-steps {steps}: the tree has "
            f"{found.room} tokens after its first level, and at most {TAIL} are possible: lower "
            "one of the two flags"
        )
    if config.max_step_tokens < tokens:
        raise ConfigError(
            f"--max-step-tokens {config.max_step_tokens}: one request verifies {tokens} tokens "
            f"({flag}): give at least that"
        )
