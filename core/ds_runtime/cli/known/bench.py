"""Flags of other engines' benchmarks: only `ds-runtime bench` takes them."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import Spelling

BATCH: Mapping[str, str | Spelling] = {
    **ignored("a server's /start_profile writes traces", "--profile"),
    **ignored("a record has its command", "--run-name X"),
    **ends("is --json here, which prints the record", "--result-filename X"),
}
SERVING: Mapping[str, str | Spelling] = {
    **ignored("every server is asked in OpenAI's words: --endpoint", "--backend X"),
    **ends("is --num-warmups here", "--warmup-requests N"),
    **ends("is --dataset-name here", "--dataset X"),
}
