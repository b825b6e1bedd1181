"""What rows of a step cost on their way between ranks: bytes that cross, and bytes that are held.

Bytes that cross are bytes that one rank receives. Every group of ranks is taken to have as many
rows. Of n ranks a rank receives:

* in a sum, 2 (n - 1) / n of the bytes that are summed;
* in a gather of rows, or in a sum that is scattered, (n - 1) / n of the bytes of all rows;
* in a sum of few values in the order of the ranks, n - 1 times the bytes that are summed.

A backend may send more, for the sake of latency; that is not counted. Bytes held are those of the
largest group's step: all groups are padded to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_runtime.assembly.estimate import ITEM_BYTES
from ds_runtime.assembly.result import Assembly
from ds_runtime.description.tree import padded
from ds_runtime.ops.contract import Kernel
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.kinds import IN_ORDER, LIBRARY_ALONE, OVERLAPPED, SumSizes, received
from ds_runtime.parallel.sums.sizes import LINE, MANY, SCALED_BY


def takes_codes(assembly: Assembly) -> bool:
    """Whether rows go to experts of other ranks as FP8 codes: every kernel of these takes them."""
    chosen, shares = assembly.binding.choices, assembly.binding.shares
    kernels = list[Kernel]()
    for site, kernel in chosen:
        if kernel is not None and kernel.op.absent:
            both = shares.get((site.op, site.layer, site.module))
            kernels += (kernel,) if both is None else both.kernels
    return bool(kernels) and all(kernel.promises.takes_codes for kernel in kernels)


@dataclass(frozen=True, slots=True)
class Wire:
    """Of one step. collectives: how many; row: bytes that a rank receives for each row of the step
    (a token that is decoded is one).
    """

    collectives: int
    row: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """Of a mesh. width: bytes of a row's hidden state; logits: of its logits, in the compute dtype,
    those that fill up the last rank's included; item: bytes of a value; in_order: sums add the
    ranks in their order (`parallel/sums/in_order.py`); at_once: few values by one kernel, in
    float32; sums: else, which kind serves a size.
    routed: layers whose experts are divided by number, where weights and ids of experts cross with
    each row; choices: bytes of these, and of what fills up the row; coded: bytes that a row's
    hidden state is less there, as FP8 codes with their scales.
    """

    mesh: Mesh
    width: int
    logits: int
    item: int = 4
    in_order: bool = False
    sums: SumSizes = LIBRARY_ALONE
    at_once: bool = False
    choices: int = 0
    routed: int = 0
    coded: int = 0

    @staticmethod
    def of(assembly: Assembly) -> Crossing:
        """That of a model's ranks."""
        mesh, item = assembly.mesh, ITEM_BYTES[assembly.config.dtype]
        vocab = padded(assembly.model.vocab_size, mesh.tp) * mesh.tp
        width, model = assembly.facts.dims["hidden"] * item, assembly.model
        routed = coded = 0
        if mesh.ep > 1 and mesh.attn_dp > 1:
            routed = sum(map(model.is_moe, range(model.layers)))
            if takes_codes(assembly):
                coded = width - width // item - 4 * (width // item // SCALED_BY)
        choices, in_order = 8 * assembly.facts.dims.get("top_k", 0), assembly.config.batch_invariant
        choices += -(width - coded + choices) % LINE
        return Crossing(
            mesh,
            width,
            vocab * item,
            item,
            in_order=in_order,
            sums=assembly.sums.sizes,
            at_once=assembly.sums.at_once,
            choices=choices,
            routed=routed,
            coded=coded,
        )

    def wire(self, layers: int, rows: int = 1) -> Wire:
        """Traffic of a decode step without drafts, of this many rows of every group."""
        groups, ranks = self.mesh.attn_dp, self.mesh.tp
        few = self._few(rows)
        inside = self._share(rows) / groups * self.width  # a sum, of a group's own rows
        across = (groups - 1) / groups * self.width  # a gather over groups, or a scatter of the sum
        logits = (ranks - 1) / ranks * self.logits
        attention, entered, left = inside, across, across + inside
        row = layers * (attention + entered + left)  # each layer: attention, then its FFN's rows
        row += left  # the embedding's sum
        row += entered  # rows go to the head
        row += logits  # and every rank's part of their logits comes back
        # Rows for experts of other groups: with their choices, and as codes where these serve.
        row += self.routed * (groups - 1) / groups * (self.choices - self.coded)
        each = 2 if self.in_order and not few else 1  # of shares, and of their sums
        moves = int(groups > 1)
        count = each * self._sums(layers) + moves * (2 * layers + 3)
        return Wire(count + int(ranks > 1), row)

    def _few(self, rows: int) -> bool:
        return self.in_order and rows * self.width < MANY * self.item

    def _share(self, rows: int) -> float:
        """Bytes that a rank receives for each byte that ranks which divide heads sum."""
        heads = self.mesh.attn_tp
        if self._few(rows):
            return (heads - 1) * (4 / self.item if self.at_once else 1)
        return received(self.sum_kind(rows), heads)

    def _sums(self, layers: int) -> int:
        """Of a step: behind the embedding, every attention and every FFN."""
        return 2 * layers + 1 if self.mesh.attn_tp > 1 else 0

    def sum_kind(self, rows: int) -> str:
        """Which kind of all-reduce sums this many rows of a group of attention."""
        return IN_ORDER if self.in_order else self.sums.kind(rows * self.width)

    def summed(self, rows: int, layers: int) -> tuple[str, int, float]:
        """The all-reduces of a step in which the largest group of attention has `rows` rows: their
        kind, their number, and the bytes that a rank receives in them."""
        count = self._sums(layers)
        return self.sum_kind(rows), count, count * self._share(rows) * rows * self.width

    def overlapped(self, halves: Sequence[int], layers: int) -> Iterator[tuple[str, int, float]]:
        """The same by kinds, of a divided step. halves: the rows of each. The sum of an embedding
        is waited for at once."""
        for rows in halves:
            yield self.sum_kind(rows), 1, self._share(rows) * rows * self.width
            count = self._sums(layers) - 1
            share = received(OVERLAPPED, self.mesh.attn_tp)
            yield OVERLAPPED, count, count * share * rows * self.width

    def received(
        self, rows: Sequence[int], wanted: int, layers: int, halves: Sequence[int] = ()
    ) -> float:
        """Bytes that a rank receives in a step of this many rows in each group, of which `wanted`
        go through the head. halves: rows of each, where the step is divided. Groups are filled up
        to the one with the most. Rows that fill up captured steps, and those of drafts, are not
        counted.
        """
        logits = (self.mesh.tp - 1) / self.mesh.tp * self.logits
        if halves:
            return sum(n for *_, n in self.overlapped(halves, layers)) + wanted * logits
        every = self.mesh.attn_dp * max(rows)
        return every * (self.wire(layers, max(rows)).row - logits) + wanted * logits

    def held(self, rows: int) -> int:
        """Bytes of the exchange at its widest, besides the rows that this rank gives and gets,
        if the largest group has `rows` and all groups together as many. They go in and come out.
        With groups, there is a place for each group in between.
        """
        if self.mesh.tp == 1:
            return 0
        every = self.mesh.attn_dp * rows if self.mesh.attn_dp > 1 else 0
        plain = (every + 2 * rows) * self.width + (every + rows) * self.choices * (self.routed > 0)
        return max(plain, *self._in_order(rows, every)) if self.in_order else plain

    def _in_order(self, rows: int, every: int) -> Iterator[int]:
        """The same where sums are in order: of a scatter of the sum, of many values, of few."""
        heads, item, values = self.mesh.attn_tp, self.item, rows * self.width // self.item
        summed = 4 if item == 4 else 8  # of a value: in float32, and what is being added so
        yield 2 * every * self.width + values * summed * (every > 0)
        if heads > 1:
            filled = values % heads > 0
            yield (2 + filled) * values * item + -(-values // heads) * summed
            yield min(values, MANY) * ((heads + 1) * item + summed)

    def gathered(self, rows: int) -> int:
        """Bytes of the logits of this many rows while those of all ranks come together: each
        rank's, and then one after the other."""
        return 2 * rows * self.logits if self.mesh.tp > 1 else 0
