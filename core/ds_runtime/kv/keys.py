"""Names of pages that mean the same in every engine: a sha256 chain over tokens.

Two engines may exchange pages only if all that their bytes depend on is the same. That is the root
of the chain; what follows are tokens, page by page. The prefix cache of one engine compares tokens
themselves: what it keeps never meets another origin, but by way of these keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from struct import pack

from ds_runtime.assembly.result import Assembly
from ds_runtime.kv.digest import config_digest, weights_digest
from ds_runtime.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Origin:
    """What the bytes of a page depend on besides its tokens. weights, adapter: digests of files;
    layouts: tags by the names of cache groups; dtypes: of the caches; salt: a client's own; shard:
    which part of the heads, of how many, where an entry has keys and values of heads; computed:
    where rows have bits of their own, what these hang on: device, ranks, software and kernels.
    """

    weights: str
    layouts: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...]
    page_size: int
    adapter: str = ""
    salt: str = ""
    shard: tuple[int, int] = (0, 1)
    computed: tuple[str, ...] = ()

    @staticmethod
    def of(assembly: Assembly, rank: int = 0) -> Origin:
        """That of the pages of one rank, of the model itself and without a salt. Reads parts of all
        weights, once: seconds, where they are many. Raises CheckpointError, also where files have
        changed since they were loaded."""
        config, model = assembly.config, assembly.folder
        folders = [model, *([] if assembly.nextn is None else [assembly.nextn.folder])]
        made = [config.load_format, config.quantize, config.speculative_draft_quantize]
        if config.load_format != "dummy":  # those follow from config.json
            made += [weights_digest(one, assembly.stamps) for one in dict.fromkeys(folders)]
        else:
            made += [config_digest(folder, assembly.stamps) for folder in folders]
        laid, heads = assembly.caches, Mesh.of(config).attn_tp if config.disable_mla else 1
        return Origin(
            weights=" ".join(made),
            layouts=tuple(
                (one.group.name, f"{one.layout.tag} {one.page_bytes} {[*one.group.layers]}")
                for one in laid
            ),
            dtypes=tuple(
                f"{f.dtype} {f.kv_dtype} {f.index_dtype}" for f in (x.facts for x in laid)
            ),
            page_size=config.page_size,
            shard=(rank % heads, heads),
            computed=tuple(_computed(assembly)) if config.batch_invariant else (),
        )

    def root(self) -> bytes:
        """The key in front of all pages: 32 bytes. Different origins have different ones."""
        pairs = [word for pair in self.layouts for word in pair]
        fields = (
            [self.weights],
            pairs,
            self.dtypes,
            [str(self.page_size)],
            [self.adapter, self.salt],
            [str(number) for number in self.shard],
            self.computed,
        )
        found = sha256()
        for words in fields:
            found.update(pack("<I", len(words)))
            for word in words:
                held = word.encode()
                found.update(pack("<I", len(held)) + held)
        return found.digest()


def _computed(assembly: Assembly) -> Iterator[str]:
    """What a row's bits hang on with --batch-invariant, beside tokens and weights: the layout that
    docs/batch-invariant.md names."""
    device, facts = assembly.device, assembly.facts
    yield f"{device.name} {device.arch} {device.cores}"
    yield from (f"{axis} {size}" for axis, size in sorted(facts.ranks.items()))
    yield from (f"{name} {version}" for name, version in assembly.plan.versions)
    for made in assembly.binding.decisions:
        yield f"{made.op} {made.site.path} {made.kernel} {made.converts} {made.note}"
