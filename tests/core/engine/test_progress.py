"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from ds_runtime.common.progress import Progress, amount


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_one_plain_line_at_the_end():
    out = io.StringIO()
    with Progress("loading", 3_000_000, stream=out) as progress:
        for _ in range(3):
            progress.advance(1_000_000)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("loading: 3.0 MB of 3.0 MB, ") and line.endswith("B/s")


def test_a_terminal_gets_a_bar_on_one_line():
    out = Terminal()
    with Progress("packing", 10, unit="tensors", stream=out) as progress:
        progress.advance(10)
    text = out.getvalue()
    assert text.count("\n") == 1 and "\r" in text
    assert "10 tensors of 10 tensors" in text and "█" * 24 in text


def test_an_error_inside_passes_through_and_claims_no_end():
    out = io.StringIO()
    with pytest.raises(ValueError, match="cut"), Progress("loading", 2, stream=out) as progress:
        progress.advance(1)
        raise ValueError("cut")
    assert out.getvalue() == ""


def test_disabled_counts_in_silence():
    out = Terminal()
    with Progress("loading", 2, enabled=False, stream=out) as progress:
        progress.advance(2)
    assert progress.done == 2 and out.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")],
)
def test_amounts(value, text):
    assert amount(value) == text
