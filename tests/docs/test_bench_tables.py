"""The table of comparisons says what the records say."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.cli import build_parser

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # scripts there import each other
AGENTS = runpy.run_path(str(BENCHMARKS / "agent_hits.py"))
FORMATS = runpy.run_path(str(BENCHMARKS / "demo_formats.py"))
OPERATING = runpy.run_path(str(BENCHMARKS / "operating_tables.py"))
README = runpy.run_path(str(BENCHMARKS / "readme_tables.py"))
TABLES = runpy.run_path(str(BENCHMARKS / "tables.py"))


@given(
    st.lists(st.sampled_from(["a", "ab", "a.b"]), unique=True), st.text("<!-\n|a.b\\1", max_size=9)
)
def test_tables_lie_between_their_marks(names, table):
    """What is around them stays, and so does a table that is put there again."""
    from marked import put

    def page(made):
        marks = "text\n".join(f"<!-- {name} -->\n{made}<!-- /{name} -->" for name in names)
        return f"before {marks} after"

    assert put(page("old\n"), dict.fromkeys(names, table)) == page(table)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("<!-- x -->\na<!-- /x -->" * 2, 2), ("<!-- x -->\n<!-- /x -->" * 3, 3)],
)
def test_a_page_has_one_place_for_a_table(text, count):
    from marked import put

    with pytest.raises(ValueError, match=f"<!-- x -->: the page has {count} places"):
        put(text, {"x": "table"})


def test_the_page_is_made_from_the_records():
    lines = (BENCHMARKS / "results/compare.jsonl").read_text().splitlines()
    made = TABLES["page"](TABLES["rows_of"](lines))
    assert (BENCHMARKS / "results/compare.md").read_text() == made


def test_the_demos_table_of_formats_is_made_from_the_records():
    lines = (BENCHMARKS / "results/accuracy.jsonl").read_text().splitlines()
    text = (BENCHMARKS.parent / "docs/demo.md").read_text()
    assert FORMATS["page"](text, lines) == text
    rows = FORMATS["rows_of"](lines)
    assert set(rows) == set(FORMATS["TARGETS"]) and text.count("| `mxfp8` | 13.2 MB |") == 1
    for name, row in rows.items():
        lost = 100 * (FORMATS["share"](rows["bf16"]) - FORMATS["share"](row))
        assert lost <= (0.5 if name in ("fp8", "int8", "mxfp8") else 3), name


def test_the_readmes_tables_are_made_from_the_records():
    text = (BENCHMARKS.parent / "README.md").read_text()
    assert README["page"](text) == text
    altered = text.replace("| 24.3 |", "| 99.9 |").replace("| 1.142 |", "| 0.001 |")
    altered = altered.replace("| 1.32 |", "| 9.99 |").replace(" 1.14 and ", " 0.14 and ")
    altered = altered.replace("| 84.4 tokens/s", "| 99.4 tokens/s")
    assert all(n not in altered for n in ("| 24.3 |", "| 1.142 |", "| 1.32 |", " 1.14 and "))
    assert "84.4" not in altered
    assert altered != text and README["page"](altered) == text


def test_the_tables_of_tiers_are_made_from_the_records():
    text = (BENCHMARKS.parent / "docs/operating.md").read_text()
    assert OPERATING["page"](text) == text
    assert OPERATING["tiers"]([], []) == "", "nothing is said of what nobody measured"


def test_the_tables_of_tiers_have_the_last_record_of_each_command():
    host = {"device": "NVIDIA H200", "checkpoint": "v2", "sessions": 64, "held": 16}
    host |= {"tokens": 8000, "more": 256, "out": 128, "commit": "0123456789ab"}
    host |= {"new_ms": 80.2, "back_ms": 10.4, "share": 0.13, "gain": 2.5}
    host |= {"plain_rate": 1000.0, "host_rate": 2500.0}
    older, other = {**host, "gain": 9.0}, {**host, "held": 8, "gain": 3.0}
    _, head, _, *made, end = OPERATING["tiers"]([older, other, host], []).splitlines()
    said = "| H200, v2, commit 0123456 | 64 of 8,000 tokens, {} | 256, 128 | 80 ms | 10 ms | 0.13 "
    said += "| 1,000 | 2,500 | {} |"
    assert [*made, end] == [said.format(16, "2.50"), said.format(8, "3.00")]
    assert head.count("|") == said.count("|")
    disk = {"machine": {"cores": 2, "processor": "EPYC"}, "checkpoint": "lite-8", "settings": []}
    disk |= {"tokens": 50000, "more": 16, "pages": "random", "commit": None, "median_seconds": 2.55}
    disk |= {"page_us": {"computed": 30000, "loaded": 100, "read": 400}}
    disk["returned"] = [{"others": 0.5}, {"others": None}, {"others": 0.7}]
    *_, row = OPERATING["tiers"]([], [disk]).splitlines()
    assert row == (
        "| 2 cores of an EPYC, lite-8, commit unknown | 50,000, 16 | 2.5 s | 60% "
        "| 30.0 ms | 0.5 ms |"
    )


def test_the_table_of_agents_is_made_from_the_records():
    lines = (BENCHMARKS / "results/agent_hits.jsonl").read_text().splitlines()
    text = (BENCHMARKS / "serving.md").read_text()
    assert AGENTS["page"](text, lines) == text
    for (_, halved), row in AGENTS["rows_of"](lines).items():
        assert row["failed"] == 0 and row["completed"] == 20 * row["sessions"]
        assert row["cached_tokens"] <= row["bound_tokens"]
        assert halved or row["kv_tokens"] > row["held_tokens"]
        assert halved or row["share_of_bound"] >= 0.98


def test_our_commands_beside_other_engines_are_commands():
    text = (BENCHMARKS / "serving.md").read_text()
    parser, _ = build_parser()
    lines = re.findall(r"^ds-runtime (.*)$", text, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        parser.parse_args(shlex.split(line))


def test_the_last_record_of_a_run_counts():
    def record(ours, **settings):
        return json.dumps(
            {
                "model": "m",
                "settings": settings,
                "engine": "peer",
                "engines": {"peer": {"model": "m.gguf"}, "ds-runtime": {"arch": "x"}},
                "machine": {"processor": "P", "cores": 2},
                "versions": {"torch": "2"},
                "ceilings": [{"bandwidth": 10e9}, {"bandwidth": 20e9}],
                "neighbours": [0.01, None, 0.2],
                "results": [
                    {
                        "case": "batch 1",
                        "limits": [20.0, 10.0 * ours, 1.0],
                        "rounds": {"ds-runtime": [ours, ours + 1, 99.0], "peer": [4.0, 4.0, 1.0]},
                    }
                ],
            }
        )

    lines = [record(6.0), record(8.0, quantize="int8"), record(10.0)]
    page = TABLES["page"](TABLES["rows_of"](lines))
    assert "| m | m.gguf | batch 1 | 10.5 | 4.0 | 2.62 | 15.00 | 30% of 60.0 | 2 of 3 |" in page
    assert "Memory read 10.0 to 20.0 GB/s." in page
    assert "| m as int8 | m.gguf | batch 1 | 8.5 |" in page
    assert "| 6.5 |" not in page and "## P, 2 cores, x, torch 2" in page


def test_rounds_at_one_speed_of_memory_have_rows_of_their_own():
    row = {
        "neighbours": [0.0, 0.5, 0.01, None, 0.0, 0.0],
        "reads": [[60e9, 58e9, 59e9]] * 3 + [[60e9, 30e9, 58e9]] + [[57e9] * 3, [30e9] * 3],
    }
    quiet = ("", [0, 2, 3, 4, 5])
    assert TABLES["_rounds"](row, {}) == [quiet, (", memory at 58 GB/s", [0, 2, 4])]
    own = {"reads": [[30e9] * 3] * 6}  # of a case, which count before those of a round
    assert TABLES["_rounds"](row, own) == [quiet, (", memory at 30 GB/s", quiet[1])]
    row["reads"] += [[30e9] * 3, [31e9] * 3]
    row["neighbours"] += [0.0, 0.0]
    case = {"case": "batch 1", "limits": [10.0] * 8}
    case["rounds"] = {"ds-runtime": [8.0] * 5 + [3.0] * 3, "peer": [4.0] * 8}
    row |= {"results": [case], "model": "m", "settings": {}, "engine": "peer"}
    row["engines"] = {"peer": {"model": "f"}}
    whole, slow, fast = TABLES["table"]([row]).splitlines()[2:]
    assert whole == "| m | f | batch 1 | 8.0 | 4.0 | 2.00 | 2.50 | 80% of 10.0 | 7 of 8 |"
    said = "|  |  | batch 1, memory at {} GB/s | {} | 4.0 | {} | 2.50 | {}% of 10.0 | 3 of 8 |"
    assert slow == said.format(30, 3.0, "0.75", 30)
    assert fast == said.format(58, 8.0, "2.00", 80)
    row["reads"], row["neighbours"] = row["reads"][:6], row["neighbours"][:6]
    row["reads"][4] = [30e9] * 3
    assert TABLES["_rounds"](row, case) == [quiet]
