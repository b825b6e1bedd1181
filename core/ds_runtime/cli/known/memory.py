"""Memory: the KV cache, and tiers of memory around it."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import GIVEN, Spelling

_UTILIZATION = Spelling(
    "includes what steps need besides weights and KV cache; here it is --memory-utilization",
    {"memory_utilization": GIVEN},
    takes="one",
)
_DEVICE = "weights stay on the device"
_TIERS = "is --enable-hierarchical-cache here, with --disk-cache DIR for the disk"

TIERS: Mapping[str, str | Spelling] = {
    "--enable-hicache": "enable_hierarchical_cache",
    **ends("is --disk-cache DIR here", "--hicache-storage-backend none|X"),
    **ends("is a folder here: --disk-cache DIR", "--hicache-storage-backend-extra-config X"),
    **ignored(
        "a request waits for all its pages",
        """
        --hicache-storage-prefetch-policy X  --hicache-storage-prefetch-retry-max-attempts N
        --hicache-storage-prefetch-retry-poll-interval N
        """,
    ),
    **ignored("the platform copies as it can best", "--hicache-io-backend X"),
    **ignored("host memory has one layout here, by layers", "--hicache-mem-layout X"),
    **ends(
        "host memory is a tier of its own here: leave it out",
        """
        --hicache-host-memory-mode cache|X
        """,
    ),
    **ends("is --hicache-ratio or --hicache-size here", "--hicache-host-memory-fraction N"),
    **ends(
        "pages used least recently leave first, and no other order is built yet: leave it out",
        "--radix-eviction-policy lru|X --radix-eviction-policy-config X",
    ),
    **ends(
        "is --enable-hierarchical-cache with --hicache-size N here, in GB of each rank",
        "--kv-offloading-size N",
    ),
    **ignored("host memory is the engine's own", "--kv-offloading-backend X"),
    **ends(
        _TIERS,
        """
        --enable-lmcache  --lmcache-config-file X  --enable-flexkv  --flexkv-config-file X
        --radix-cache-backend X  --enable-unified-cache-external-linker
        --unified-cache-external-linker-backend X  --unified-cache-external-linker-config X
        --enable-linker-mla-dedup
        """,
    ),
    **ends(
        "sparse attention reads the device's cache alone: leave it out",
        """
        --enable-hisparse  --hisparse-config X  --hierarchical-sparse-attention-extra-config X
        """,
    ),
}
CACHE: Mapping[str, str | Spelling] = {
    "--gpu-memory-utilization": _UTILIZATION,
    "--device-memory-utilization": _UTILIZATION,
    "--block-size": "page_size",
    "--no-enable-prefix-caching": Spelling(
        "is --disable-radix-cache here", {"disable_radix_cache": "True"}
    ),
    "--disable-prefix-caching": Spelling(
        "is --disable-radix-cache here", {"disable_radix_cache": "True"}
    ),
    "--enable-prefix-caching": Spelling(
        "is so here unless --disable-radix-cache follows", {"disable_radix_cache": "False"}
    ),
    "--kv-cache-memory-bytes": "kv_memory",
    **ends("--kv-memory sizes the KV cache", "--num-gpu-blocks-override N --max-total-tokens N"),
    **ends(
        f"{_DEVICE}: leave it out",
        """
        --enable|disable-sleep-mode  --enable-memory-saver  --cpu-offload-gb 0|N
        --offload-group-size 0|-1|N
        """,
    ),
    **ignored(
        _DEVICE,
        """
        --offload-num-in-group N  --offload-prefetch-step N  --offload-mode X
        --enable-weights-cpu-backup  --enable-draft-weights-cpu-backup
        --offload-backend X  --offload-params X...  --cpu-offload-params X...
        --sleep-mode-backend X  --sleep-mode-offload-cudagraph
        --sleep-preserve-parameter-names X...
        """,
    ),
    **ignored("not needed: a request that is preempted is computed again", "--swap-space N"),
    **ignored(
        "each group of the cache has the layout that its kernels read",
        """
        --enable-page-major-kv-layout  --enable-unified-memory  --disable-hybrid-swa-memory
        --swa-full-tokens-ratio N  --swa-prefix-tails N  --disable|enable-hybrid-kv-cache-manager
        """,
    ),
    **ignored(
        "a prompt that finds its beginning loads kept states: --state-snapshots",
        """
        --enable-encoder-swa-bounded-replay  --[no-]enable-decoder-swa-bounded-replay
        --[no-]swa-bounded-replay  --prefix-cache-retention-interval N
        """,
    ),
    **ignored("a prompt finds whole pages: --page-size", "--prefix-match-unit N"),
    **ignored("pages are found by SHA-256 of their tokens", "--prefix-caching-hash-algo X"),
    **ends("all layers' keys have one dtype: leave it out", "--kv-cache-dtype-skip-layers X..."),
    **ends("sessions are not kept: leave it out", "--enable-streaming-session"),
    **ignored("sessions are not kept", "--enable-session-radix-cache"),
}
