"""Which rank holds which routed expert. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ds_runtime.config import EngineConfig
from ds_runtime.description.config import ModelConfig
from ds_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """Global expert → where it is. ranks: its number along the axis `ep`; slots: its number among
    the experts there. Both have an entry for each expert of a layer.
    """

    ranks: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def even(cls, experts: int, ep: int) -> Placement:
        """Consecutive experts on each of `ep` ranks. Raises ConfigError where that is uneven."""
        if experts % ep:
            raise ConfigError(
                f"--ep {ep}: the {experts} routed experts of this model do not divide into {ep} "
                "parts: give a divisor of both that number and --tp"
            )
        each = max(1, experts // ep)
        every = range(experts)
        return cls(tuple(e // each for e in every), tuple(e % each for e in every))

    def held(self, rank: int) -> range:
        """The experts of one rank."""
        own = [expert for expert, there in enumerate(self.ranks) if there == rank]
        return range(own[0], own[-1] + 1) if own else range(0)

    def local(self, rank: int) -> list[int]:
        """Of each expert: its slot on this rank, −1 where another one has it."""
        pairs = zip(self.ranks, self.slots, strict=True)
        return [slot if there == rank else -1 for there, slot in pairs]


def check_experts(model: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError where the experts of a model do not divide into --ep parts."""
    if (ep := config.expert_parts) > 1 and not model.experts:
        raise ConfigError(f"--ep {ep}: this model has no routed experts: leave it out")
    Placement.even(model.experts, ep)
