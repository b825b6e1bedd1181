"""The generations of models, as far as text goes: prompts, tools text, parsers.

A checkpoint's own template always wins. What it lacks (a template at all, words about tools, which
the templates of V3 to V3.1 leave to the server) comes from here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_runtime.checkpoint.base import base_of
from ds_runtime.checkpoint.files import read_settings
from ds_runtime.text.formats.dsml import DsmlEncoding
from ds_runtime.text.formats.dsml_v4 import V4Encoding

Tools = Sequence[Mapping[str, Any]]
_CALLS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
_END = "{additional_tool_calls}<｜tool▁calls▁end｜>"


def _functions(tools: Tools) -> str:
    out = ""
    for tool in tools:
        function = tool.get("function", tool)
        parameters = json.dumps(function.get("parameters", {}), ensure_ascii=False)
        out += f"\n### {function.get('name', '')}\n"
        out += f"Description: {function.get('description') or ''}\n\nParameters: {parameters}\n"
    return out


def _tools_text(call: str, chaining: str) -> Callable[[Tools], str]:
    def text(tools: Tools) -> str:
        return (
            f"## Tools\nYou have access to the following tools:\n{_functions(tools)}\n"
            "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
            f"{_CALLS.format(call)}{_END}\n\nWhere:\n"
            "- `tool_call_name` must be an exact match to one of the available tools\n"
            "- `tool_call_arguments` must be valid JSON that strictly follows the tool's "
            f"Parameters Schema\n- For multiple tool calls, {chaining}"
        )

    return text


@dataclass(frozen=True, slots=True)
class Family:
    """One generation. `template`: a file in templates/, an encoding that is no template, or ""
    where only the checkpoint has one.
    """

    template: str | type[DsmlEncoding] | type[V4Encoding]
    reasoning: str | None = None
    tool_calls: str | None = None
    tools_text: Callable[[Tools], str] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)


_V3_TOOLS = _tools_text(
    "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```",
    "put a line break between them",
)
_V31_TOOLS = _tools_text(
    "tool_call_name<｜tool▁sep｜>tool_call_arguments",
    "chain them directly without separators or spaces",
)
V2 = Family("v2.jinja")
V3 = Family("v3.jinja", "deepseek-v3", "deepseekv3", _V3_TOOLS)
V3_0324 = Family("v3.jinja", "deepseek-v3", "deepseekv3", _V3_TOOLS, {"opens_early": True})
R1 = Family("v3.jinja", "deepseek-r1", "deepseekv3", _V3_TOOLS, {"reasons": True})
V31 = Family("v31.jinja", "deepseek-v3", "deepseekv31", _V31_TOOLS)
V32 = Family(DsmlEncoding, "deepseek-v3", "deepseekv32")
V4 = Family(V4Encoding, "deepseek-v4", "deepseekv4")
GLM = Family("", "glm45", "glm47")  # 4.7 and 5

# GLM-4.5 and 4.6 put arguments on lines of their own, 4.7 and 5 do not.
_GLM_LINES = re.compile(r"</arg_key>(\n|\\n)")

_R1_NAME = re.compile(r"(?<![a-z0-9])r1(?![0-9a-z])")


def find_family(folder: str | Path, model: str = "") -> Family | None:
    """The family of a checkpoint, from config.json and its name; None if it is none of these.
    One with a base speaks as the base does.

    `model`: the hub id or path that the user gave.
    """
    config = read_settings((base_of(Path(folder)) or Path(folder)) / "config.json")
    name = Path(model or folder).name.lower()
    kind = str(config.get("model_type", "")).replace("-", "_")
    if kind == "deepseek_v2":
        return V3 if "v2.5" in name else V2
    if kind == "glm_moe_dsa":
        return GLM
    if kind == "deepseek_v32":
        return V31 if "exp" in name or "math" in name else V32
    if kind == "deepseek_v4":
        return V4
    if kind != "deepseek_v3":
        return None
    if _R1_NAME.search(name):
        return R1
    if "0324" in name:
        return V3_0324
    quantization = config.get("quantization_config")
    is_v31 = isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0"
    return V31 if is_v31 or "v3.1" in name or "terminus" in name else V3


def tool_format(sources: Sequence[str], family: Family | None) -> str | None:
    """The tool-call parser for what the templates write; the family's if they write no calls."""
    text = "".join(sources)
    if "DSML" in text:
        return "deepseekv4" if "DSML｜tool_calls" in text else "deepseekv32"
    if "<｜tool▁sep｜>" in text:
        return "deepseekv3" if "```json" in text else "deepseekv31"
    if "<arg_key>" in text:
        return "glm45" if _GLM_LINES.search(text) else "glm47"
    return None if family is None else family.tool_calls
