"""The page at `/`: its files and headers, its scripts in Node, and all of it in Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import fake_engine
import msgspec
import pytest
from server_harness import serving

import chromium
import ds_runtime.server
from ds_runtime.engine.messages import Stats
from ds_runtime.server.metrics import EngineView, Metrics
from ds_runtime.text.parsers.registry import Parsers

PAGES = Path(ds_runtime.server.__file__).parent / "pages"


def test_every_file_is_served_and_asks_nobody_else(bpe_folder):
    with serving(bpe_folder, api_key=("k",)) as served:
        page = served.http.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "http" not in policy and "*" not in policy
        for path in PAGES.iterdir():
            text = path.read_text()
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn|@import|url\(", text)
            if path.name != "index.html":
                reply = served.http.get(f"/dashboard/{path.name}")
                assert reply.text == text and reply.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<script>|<style|\son\w+=|style=", page.text)  # the policy's word
        for name in ("../metrics.py", "%2e%2e%2fmetrics.py", "index.html", "nothing.js"):
            reply = served.http.get(f"/dashboard/{name}", headers={"authorization": "Bearer k"})
            assert reply.status_code == 404
            assert served.http.get(f"/dashboard/{name}").status_code == 401


node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not there")


def run_node(script, *arguments):
    """What `script`, a module, logs as JSON. `pages` is where the page's own modules are."""
    code = f"const pages = {json.dumps(PAGES.as_uri())};\n{script}"
    command = ["node", "--input-type=module", "-e", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@node
def test_times_are_two_digits_without_an_exponent():
    """Over all decades: what Python rounds to two digits."""
    times = [digits * 10.0**power for power in range(-6, 6) for digits in (1.0, 1.26, 4.99, 9.96)]
    said = run_node(
        """
        const { seconds } = await import(`${pages}/metrics.js`);
        console.log(JSON.stringify([null, ...JSON.parse(process.argv[1])].map(seconds)));
        """,
        json.dumps(times),
    )
    assert said[0] == "–"
    for value, text in zip(times, said[1:], strict=True):
        number, unit = text.split()
        factor = {"ms": 1e-3, "s": 1.0}[unit]
        assert unit == ("ms" if value < 1 else "s") and "e" not in number
        assert float(number.replace(",", "")) * factor == pytest.approx(value, rel=0.05)


@node
def test_the_page_reads_the_metrics_as_they_are():
    metrics = Metrics([EngineView(_stats, lambda: None, lambda: True)], 'a "quoted\\ name')
    before = metrics.text().decode()
    for i in range(100):
        metrics.first_token.observe(0.02 if i < 90 else 2.0)
    found = run_node(
        """
        const { parse, quantile, read, grown, mean } = await import(`${pages}/metrics.js`);
        const [before, now] = process.argv.slice(1).map(parse);
        const q = (p) => quantile(now, before, "time_to_first_token_seconds", p);
        console.log(JSON.stringify({
          half: q(0.5), most: q(0.99), none: quantile(now, now, "time_to_first_token_seconds", 0.5),
          name: now.num_requests_running[0].labels.model_name,
          running: read(now, "num_requests_running"),
          grown: grown(now, before, "generation_tokens_total"),
          restarted: grown(parse("ds_runtime_a_total 5"), parse("ds_runtime_a_total 9"), "a_total"),
          each: grown(engines(5, 30), engines(9, 10), "a"),
          both: [read(engines(5, 30), "a"), mean(engines(5, 30), "a"), mean(now, "missing")],
        }));
        function engines(...values) {
          return parse(values.map((v, n) => `ds_runtime_a{engine="${n}"} ${v}`).join("\\n"));
        }
        """,
        before,
        metrics.text().decode(),
    )
    assert 0.01 < found["half"] <= 0.025 and 1 < found["most"] <= 2.5 and found["none"] is None
    assert found["name"] == 'a "quoted\\ name' and found["running"] == 3
    assert found["grown"] == 0 and found["restarted"] == 5
    assert found["each"] == 5 + 20, "one was restarted"
    assert found["both"] == [35, 17.5, 0]


@node
@pytest.mark.parametrize(("total", "said"), [(40, "9 / 21 / 6"), (0, "–")])
def test_the_page_tells_of_snapshots_where_there_may_be_some(total, said):
    told = Stats(snapshots_total=total, snapshots_kept=9, snapshot_hits=21, snapshots_evicted=6)
    assert tiles(told, told)["Snapshots of states, kept / used / evicted"] == said


@node
@pytest.mark.parametrize(("total", "said"), [(40, "9 / 2,100"), (0, "–")])
def test_the_page_tells_of_host_memory_where_it_is_used(total, said):
    told = Stats(host_pages_total=total, host_pages_kept=9, cached_host_tokens=2100)
    assert tiles(told, told)["Host memory, pages kept / prompt tokens read"] == said


@node
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {3: [5, 0], 4: [1, 4]}, "2.00"),
        ({3: [5, 0], 4: [1, 4]}, {3: [7, 2], 4: [2, 7]}, "1.50"),
        ({3: [5, 0]}, {3: [5, 0]}, "–"),
        ({3: [500, 10]}, {3: [3, 1]}, "1.50"),  # restarted
        ({}, {}, "–"),
    ],
)
def test_the_page_tells_of_experts_where_they_are_counted(before, now, said):
    found = tiles(Stats(expert_tokens=before), Stats(expert_tokens=now))
    assert found["Busiest expert, times the mean"] == said


@node
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"one_shot": 6, "two_shot": 3, "all_reduce": 3}, "50 % / 25 % / 25 %"),
        ({"one_shot": 6, "in_order": 3}, {"one_shot": 6, "in_order": 9}, "0.0 % / 0.0 % / 100 %"),
        ({"one_shot": 60}, {"one_shot": 6, "in_order": 2}, "75 % / 0.0 % / 25 %"),  # restarted
        ({"one_shot": 6}, {"one_shot": 6}, "–"),
        ({}, {}, "–"),
    ],
)
def test_the_page_tells_which_kinds_of_sums_serve(before, now, said):
    found = tiles(Stats(sums=before), Stats(sums=now))
    assert found["All-reduces, one-shot / two-shot / others"] == said


@node
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ((0, 0.0, {}), (4, 0.1, {0: 0.0, 1: 0.1, 2: 0.02}), "rank 1, 25 ms"),
        ((4, 9.0, {0: 8.0, 1: 1.0}), (8, 9.002, {0: 8.0, 1: 1.002}), "rank 1, 0.5 ms"),
        ((4, 9.0, {0: 8.0, 1: 1.0}), (2, 0.2, {0: 0.2, 1: 0.0}), "rank 0, 100 ms"),  # restarted
        ((4, 9.0, {0: 8.0, 1: 1.0}), (4, 9.0, {0: 8.0, 1: 1.0}), "–"),
        ((0, 0.0, {}), (0, 0.0, {}), "–"),
        # Each rank is the last of every other step, by 10 ms.
        ((0, 0.0, {}), (8, 0.08, {0: 0.04, 1: 0.04}), "rank 0, 5 ms"),
    ],
)
def test_the_page_names_the_last_rank(before, now, said):
    made = [
        Stats(skew_steps=steps, skew_seconds=seconds, rank_late=late)
        for steps, seconds, late in (before, now)
    ]
    assert tiles(*made)["Last rank, and its delay per step"] == said


@node
@pytest.mark.parametrize(
    ("steps", "said"),
    [((96, 4), "rank 1 of engine 1, 100 ms"), ((4, 0), "rank 0 of engine 0, 0.25 ms")],
)
def test_the_page_names_the_last_rank_of_several_engines(steps, said):
    late = [{0: 0.001, 1: 0.0}, {0: 0.0, 1: 0.1 * steps[1]}]
    now = [
        Stats(skew_steps=n, skew_seconds=max(of.values()), rank_late=of)
        for n, of in zip(steps, late, strict=True)
    ]
    assert tiles([Stats(), Stats()], now)["Last rank, and its delay per step"] == said


def tiles(*readings):
    """What the page shows after two readings, each of one engine or of several, by title."""
    texts = []
    for reading in readings:
        engines = reading if isinstance(reading, list) else [reading]
        views = [EngineView(lambda s=s: s, lambda: None, lambda: True) for s in engines]
        texts.append(Metrics(views, "m").text().decode())
    found = run_node(
        """
        const { parse } = await import(`${pages}/metrics.js`);
        const { TILES } = await import(`${pages}/live.js`);
        const [past, now] = process.argv.slice(1).map(parse), c = { now, last: past, past, dt: 1 };
        const all = TILES.map(([name, figure, word]) => [name, word(figure(c), c)]);
        console.log(JSON.stringify(all));
        """,
        *texts,
    )
    return dict(found)


def _stats():
    return Stats(running=3, generated_tokens=7)


@node
def test_reasoning_in_the_text_is_told_apart_wherever_it_is_cut():
    texts = {
        "<think>a < b</think>\n\nyes": [["thinking", "a < b"], ["text", "yes"]],
        "\n<think></think>so": [["text", "so"]],
        "no <think>here</think>": [["text", "no <think>here</think>"]],
        "<thin": [["text", "<thin"]],
        "<think>never ends</thi": [["thinking", "never ends</thi"]],
    }
    found = run_node(
        """
        const { Splitter } = await import(`${pages}/stream.js`);
        const out = JSON.parse(process.argv[1]).map((text) => {
          const all = [];
          for (let size = 1; size <= text.length; size++) {
            const one = new Splitter(), parts = [];
            for (let i = 0; i < text.length; i += size) {
              parts.push(...one.push(text.slice(i, i + size)));
            }
            parts.push(...one.end());
            const joined = [];
            for (const [kind, piece] of parts) {
              if (!piece) continue;
              if (joined.at(-1)?.[0] === kind) joined.at(-1)[1] += piece;
              else joined.push([kind, piece]);
            }
            all.push(joined);
          }
          return all;
        });
        console.log(JSON.stringify(out));
        """,
        json.dumps(list(texts)),
    )
    for (text, wanted), all_sizes in zip(texts.items(), found, strict=True):
        for size, parts in enumerate(all_sizes, start=1):
            assert parts == wanted, (text, size)


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    if len(colour) == 4:
        colour = "#" + "".join(c * 2 for c in colour[1:])
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    lin = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_enough_to_be_read(scheme):
    blocks = re.findall(r":root \{(.*?)\}", (PAGES / "style.css").read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", blocks[scheme == "dark"]))
    pairs = [(text, back) for text in ("text", "dim") for back in ("back", "card", "user")]
    pairs += [(text, "card") for text in ("mark", "good", "bad")] + [("on-mark", "mark")]
    for text, back in pairs:
        high, low = sorted((luminance(colours[text]), luminance(colours[back])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back)  # WCAG AA


@pytest.fixture(scope="module")
def page():
    if chromium.FOUND is None:
        pytest.skip("Chromium is not there")
    with chromium.browser() as one:
        yield one


CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
LOG = "document.querySelector('#log').innerText"
IDLE = "!document.querySelector('#send').disabled"


def plan_row(op, kernel, provider):
    row = {"op": op, "kernel": kernel, "provider": provider, "sites": ["norm"]}
    return row | {"refused": [["other", "too old"]]}


PLAN = {
    **dict.fromkeys(("platform", "arch", "dtype", "kv_layout", "page_size", "tp"), "x"),
    "digest": "abc",
    "rows": [
        plan_row("linear", "cpu.linear", "cpu"),
        plan_row("rms_norm", "reference.rms_norm", "reference"),
    ],
}


def test_the_page_in_a_browser(bpe_folder, page, monkeypatch):
    """The key, the plan, live figures, an answer with thinking and a call, Stop, a refusal."""
    ready = msgspec.structs.replace(fake_engine.READY, plan=PLAN)
    monkeypatch.setattr(fake_engine, "READY", ready)
    parsers = Parsers(None, "deepseekv31")
    with serving(bpe_folder, api_key=("open sesame",), parsers=parsers) as served:
        page.open(served.url + "/")
        page.until("!document.querySelector('#door').hidden")
        page.type("#key", "wrong")
        page.press("Enter")
        page.until("document.querySelector('#door-said').innerText.includes('not the key')")
        page.run("document.querySelector('#key').value = ''")
        page.type("#key", "open sesame")
        page.press("Enter")
        page.until("document.querySelector('#door').hidden")
        page.until("document.querySelector('#model').innerText === 'fake'")
        page.until("document.querySelector('#state').innerText === 'serving'")
        assert page.run("document.querySelector('#plan-head').innerText").endswith("plan abc")
        rows = page.run("document.querySelector('#rows').innerText")
        assert "cpu.linear" in rows and "reference.rms_norm" in rows

        page.type("#message", "[say <think>let me <b>see</b></think>it is 5 < 7]")
        page.press("Enter")
        page.until(f"{LOG}.includes('tokens in') && {IDLE}")
        assert page.run("document.querySelector('.thinking').innerText") == "let me <b>see</b>"
        assert page.run("document.querySelector('.text:not(.user *)').innerText") == "it is 5 < 7"
        assert page.run("document.querySelectorAll('#log b').length") == 2  # the names alone

        tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
        page.run(f"document.querySelector('#tools').value = JSON.stringify([{json.dumps(tool)}])")
        page.type("#message", f"[say {CALL}]")
        page.press("Enter")
        page.until(f"document.querySelector('.call') !== null && {IDLE}")
        called = page.run("document.querySelector('.call').innerText")
        assert called == 'calls get_weather({"city": "Rome"})'
        page.run("document.querySelector('#tools').value = ''")

        page.type("#message", "[go on and on ]")
        page.press("Enter")
        page.until("document.querySelector('#log').innerText.includes('on and on on and on')")
        page.until("!document.querySelector('.value').innerText.startsWith('–')")
        page.run("document.querySelector('#stop').click()")
        page.until(f"{LOG}.endsWith('stopped') && {IDLE}")
        assert served.wait_aborted()
        page.type("#message", "[full]")
        page.press("Enter")
        page.until(f"document.querySelector('.failed') !== null && {IDLE}")
        assert "1024 requests" in page.run("document.querySelector('.failed').innerText")

        refused = [c for c in page.complaints() if " 401 " not in c and " 503 " not in c]
        assert refused == []
        assert all(address.startswith(served.url + "/") for address in page.asked() if address)
        names = page.send("Accessibility.getFullAXTree")["nodes"]
    for node in names:
        if node.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "log"):
            assert node["name"]["value"], node
