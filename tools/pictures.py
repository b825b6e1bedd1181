"""The pictures of README.md: the dashboard of a server under load, and the plan of a device.

python tools/pictures.py [FOLDER]    # docs/ if left out

It needs Chromium on the PATH (Debian: apt-get install chromium). The server, its requests and
the browser run on this machine, and end with the script.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from subprocess import PIPE, STDOUT
from urllib.request import Request, urlopen

import chromium

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMAND = (sys.executable, "-m", "ds_runtime")
LARGEST = 200_000  # bytes of a picture
SECONDS = 40  # of traffic: the page draws a point every second
SIZE = (1184, 1320)  # pixels of the page
COLUMNS = 132  # of the terminal; longer lines are cut
PLAN = ("plan", "--device", "h200")
QUESTIONS = ("What is 123 + 456?", "What is 700 - 58?")


def terminal(command: str, lines: list[str]) -> str:
    """A picture of a terminal as SVG: a command and the lines that it printed."""
    shown = [f"$ {command}", *(x if len(x) <= COLUMNS else f"{x[: COLUMNS - 1]}…" for x in lines)]
    width, height = 24 + 7.25 * COLUMNS, 24 + 17 * len(shown)
    kinds = ["command", *["output"] * len(lines)]
    texts = [
        f'<text x="12" y="{27 + 17 * i}" class="{kind}">{escape(line)}</text>'
        for i, (kind, line) in enumerate(zip(kinds, shown, strict=True))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">',
            "<style>text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
            "fill:#d7dde5;white-space:pre}.command{fill:#7ee0a3}</style>",
            f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#161b22"/>',
            *texts,
            "</svg>",
            "",
        ]
    )


def picture_of_the_plan() -> str:
    """What `plan` prints, as SVG. Exits with its error if it fails."""
    done = subprocess.run([*COMMAND, *PLAN], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ds-runtime {' '.join(PLAN)} ended with {done.returncode}: {done.stderr}")
    return terminal(f"ds-runtime {' '.join(PLAN)}", done.stdout.splitlines())


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server of the demo model: yields its address. Exits with what it said if it ends early."""
    command = [*COMMAND, "serve", "--model", "demo", "--port", "0", "--no-access-log"]
    with subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True) as process:
        assert process.stdout is not None
        seen = []
        try:
            for line in process.stdout:
                seen.append(line)
                if found := re.search(r"serving .* at (http://\S+) ", line):
                    break
            else:
                sys.exit("".join(["the server ended:\n", *seen]))
            threading.Thread(target=process.stdout.read, daemon=True).start()  # or the pipe is full
            yield found[1]
        finally:
            process.terminate()


def traffic(url: str, number: int, end: threading.Event) -> None:
    """Asks one sum after the other, with a pause in between, until the end is set."""
    for i in itertools.count():
        asked = {"role": "user", "content": f"What is {number * 97 + i * 31} + {i * 53 + 211}?"}
        body = json.dumps({"model": "demo", "messages": [asked]}).encode()
        sent = Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urlopen(sent, timeout=60) as answer:
            answer.read()
        if end.wait(0.3 * number):
            return


def picture_of_the_dashboard() -> bytes:
    """The page of a server of the demo model under load, as PNG."""
    with serving() as url, chromium.browser() as page, ThreadPoolExecutor(4) as pool:
        end = threading.Event()
        asking = [pool.submit(traffic, url, number, end) for number in range(1, 5)]
        try:
            page.open(url, *SIZE)
            page.run("document.querySelector('#temperature').value = '0'")
            for question in QUESTIONS:
                page.type("#message", question)
                page.press("Enter")
                page.until(f"document.querySelector('#log').innerText.includes({question!r})")
                page.until("!document.querySelector('#send').disabled", 60)
            time.sleep(SECONDS)
            page.run("document.activeElement.blur()")
            page.run("document.documentElement.style.scrollbarWidth = 'none'")
            shot = page.screenshot()
        finally:
            end.set()
        for each in asking:
            each.result()
    return shot


def written(path: Path, content: bytes) -> None:
    """Writes a picture. Exits if it is larger than a page should load."""
    if len(content) > LARGEST:
        sys.exit(f"{path}: {len(content)} bytes, the limit is {LARGEST}: show less")
    path.write_bytes(content)
    print(f"wrote {path}: {len(content)} bytes")


def main(argv: list[str]) -> int:
    """Both pictures, into the folder that the arguments name."""
    folder = Path(argv[0]) if argv else DOCS
    written(folder / "plan.svg", picture_of_the_plan().encode())
    written(folder / "dashboard.png", picture_of_the_dashboard())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
