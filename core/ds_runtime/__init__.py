"""ds-runtime: serves DeepSeek models on any accelerator that a plugin brings.

Public: `LLM`, `SamplingParams`, `OutputRules`, `RequestOutput` (offline API) and `hookimpl`
(plugins; the rest of the plugin surface is `ds_runtime.api`). Importing this module does not import
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_runtime._version import __version__
from ds_runtime.common.hookimpl import hookimpl

if TYPE_CHECKING:
    from ds_runtime.offline.llm import LLM, RequestOutput
    from ds_runtime.output_rules import OutputRules
    from ds_runtime.sampling_params import SamplingParams

__all__ = ["LLM", "OutputRules", "RequestOutput", "SamplingParams", "__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "RequestOutput"):
        from ds_runtime.offline import llm

        return getattr(llm, name)
    if name == "OutputRules":
        from ds_runtime.output_rules import OutputRules

        return OutputRules
    if name == "SamplingParams":
        from ds_runtime.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'ds_runtime' has no attribute {name!r}")
