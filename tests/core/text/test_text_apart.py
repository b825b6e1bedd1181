"""The text process: the same text and ids, and nothing in a checkpoint's files lasts for ever."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.errors import CheckpointError, QueueFullError, RequestError
from ds_runtime.text import apart
from ds_runtime.text.apart import Text
from ds_runtime.text.formats.template import load_template

SECONDS = 0.3  # of processor time for each request here
WITHIN = 8.0  # seconds, on a machine that does other things as well
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>ü & 你</b>"}}]
HONEST = [{"role": "user", "content": "Hi"}]
LOOP = [{"role": "user", "content": "[loop]"}]
SOME = '{% if "[loop]" in messages[0].content %}BAD{% endif %}fine {{ messages[0].content }}'


def checkpoint(bpe_folder, folder, template=None, **tokenizer):
    shutil.copytree(bpe_folder, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if tokenizer:
        whole = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(whole | tokenizer))
    return folder


@contextlib.contextmanager
def opened(folder, **more):
    with contextlib.closing(Text(folder, folder, seconds=SECONDS, **more)) as text:
        yield text


@pytest.fixture(scope="module")
def plain(bpe_folder):
    with opened(bpe_folder) as text:
        yield text


def workers():
    return [p for p in psutil.Process().children(recursive=True) if "worker" in str(p.cmdline())]


def until(condition):
    end = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=300), st.booleans())
def test_ids_and_text_are_those_of_this_process(plain, bpe, bpe_folder, said, add):
    try:
        said.encode()
    except UnicodeEncodeError:
        with pytest.raises(RequestError, match="unpaired surrogate"):
            plain.tokenizer.encode(said, add)
        return
    assert plain.tokenizer.encode(said, add) == bpe.encode(said, add)
    here = load_template(bpe_folder, bpe)
    chat = [{"role": "user", "content": said}, {"role": "assistant", "content": "y", "x": 1 << 80}]
    for given_ in ((chat,), (chat, None, False), (chat, TOOLS, True, {"thinking": add})):
        assert plain.template.render(*given_) == here.render(*given_)


def test_what_the_template_is_called_and_refuses(plain, bpe, bpe_folder):
    here = load_template(bpe_folder, bpe)
    for name in ("knows_developer", "takes_response_format", "tool_calls", "source"):
        assert getattr(plain.template, name) == getattr(here, name)
    with pytest.raises(RequestError, match="may not set 'messages'") as e:
        plain.template.render(HONEST, kwargs={"messages": []})
    assert e.value.param == "chat_template_kwargs"


# templates

LOOPS = [
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% for i in range(9) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endfor %}"
    "{% endmacro %}{{ m(12) }}",
    "{% set a = namespace(x='a') %}{% for i in range(60) %}{% set a.x = a.x ~ a.x %}{% endfor %}",
    "{% for i in range(99999) %}{{ messages[0].content|center(99999) }}{% endfor %}",
    "{{ messages[0].content|center(30000000)|list|sort|join('y') }}" * 50,
    "{% set n = messages|length * 900000000 %}{{ 'x'.ljust(n).ljust(n * 4)|upper }}",
    "{{ '%4000000000d'|format(messages|length) }}",
    "{{ ('a' * 9999999).replace('a', 'a' * 9999) }}",
    "{{ messages|tojson(indent=4000000000) }}",
]
TOO_LARGE = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ 9**99999**99 }}",
    "{{ (2**9999999) ** 9999999 }}",
    "{% set x = 'a' * 10**9 %}{{ x }}",
    "{% for i in [0] * 10**9 %}{{ i }}{% endfor %}",
]


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_that_does_not_end_is_ended(bpe_folder, tmp_path, source):
    folder = checkpoint(bpe_folder, tmp_path / "m", SOME.replace("BAD", source))
    with opened(folder) as text:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.monotonic()
        with pytest.raises(RequestError) as e:
            text.template.render(LOOP)
        assert time.monotonic() - begin < WITHIN
        assert "template" in str(e.value) and "\n" not in str(e.value)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
        assert text.template.render(HONEST) == "fine Hi"


@pytest.mark.parametrize("source", TOO_LARGE)
def test_constants_are_not_folded_and_have_a_limit(bpe_folder, tmp_path, source):
    folder = checkpoint(bpe_folder, tmp_path / "m", SOME.replace("BAD", source))
    begin = time.monotonic()
    with opened(folder) as text:
        with pytest.raises(RequestError, match="is too large: at most 16777216 "):
            text.template.render(LOOP)
        assert time.monotonic() - begin < WITHIN
        assert text.template.render(HONEST) == "fine Hi" and text.ended == 0


SLOW = pytest.mark.slow
FOLDED = [
    pytest.param("{{ 'a'|center(999999999) }}", marks=SLOW),
    pytest.param("{{ '%999999999d'|format(1) }}", marks=SLOW),
    "{{ 'x'|center(99999)|list|join('x'|center(99999)) }}",
    pytest.param("{{ 'x'|center(9999999)|indent(99) }}" * 9, marks=SLOW),
    pytest.param("{{ 'x'|center(999999)|list|tojson(indent=99999) }}", marks=SLOW),
    pytest.param("{{ 'x'|center(9999)|list|join('x'|center(5000)) }}" * 9000, marks=SLOW),
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ " + "9" * 9999 + " }}",
    "{{ " + "-" * 100_000 + "1 }}",
    "{% for a in x %}" * 60 + "{% endfor %}" * 60,
    "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "x" * (2 << 20),
]


@pytest.mark.parametrize("source", FOLDED, ids=range(len(FOLDED)))
def test_a_template_loads_within_bounds_or_not_at_all(bpe_folder, tmp_path, source):
    folder = checkpoint(bpe_folder, tmp_path / "m", source)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with contextlib.suppress(CheckpointError, RequestError), opened(folder) as text:
        text.template.render(HONEST)
    assert time.monotonic() - begin < WITHIN + apart.LOAD_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_other_requests_go_on_while_some_do_not_end(bpe_folder, tmp_path):
    folder = checkpoint(bpe_folder, tmp_path / "m", SOME.replace("BAD", LOOPS[0]))
    with opened(folder) as text, ThreadPoolExecutor(5) as pool:
        bad = [pool.submit(text.template.render, LOOP) for _ in range(5)]
        early = 0
        while not all(b.done() for b in bad):
            assert text.template.render(HONEST) == "fine Hi"
            early += not any(b.done() for b in bad)
        assert early > 3, "who waits for one of them is not answered before it has ended"
        assert all(isinstance(b.exception(), RequestError) for b in bad) and text.ended == 5


def test_more_at_once_than_there_is_room_for_wait_and_then_hear_so(bpe_folder, tmp_path):
    folder = checkpoint(bpe_folder, tmp_path / "m", SOME.replace("BAD", LOOPS[0]))
    with opened(folder) as text:
        text._copies._room = threading.Semaphore(1)
        with text._copies.one(1.0), pytest.raises(QueueFullError, match="is being worked on"):
            text.template.render(HONEST)
        assert text.template.render(HONEST) == "fine Hi"


# tokenizers


def split_by(pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    parts = [split | {"invert": False}, level | {"use_regex": False}]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}


def replaced(pattern, content, times):
    one = {"type": "Replace", "pattern": pattern, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [one] * times}}


HOSTILE = [
    (split_by(r"(x+x+)+y"), "x" * 3000),
    (split_by(r"(?:(?:x|y|xx)+)+z"), "x" * 3000),
    (replaced({"String": "~"}, "~~~~~~~~~~~~~~~~", 12), "~~~~"),
    (replaced({"Regex": "~"}, "~" * 4096, 4), "~~~~"),
    ({"normalizer": {"type": "NFKD"}} | split_by("([x-z]+[xw]+)+v"), "x" * 5000),
]


@pytest.mark.parametrize(("how", "said"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_tokenizer_that_explodes_is_ended(bpe_folder, tmp_path, how, said):
    with opened(checkpoint(bpe_folder, tmp_path / "m", **how)) as text:
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        with pytest.raises(RequestError, match="the checkpoint's tokenizer ") as e:
            text.tokenizer.encode(said)
        assert time.monotonic() - begin < WITHIN and "\n" not in str(e.value)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
        assert text.tokenizer.decode([70, 71]), "what comes back is told by this process"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(replaced({"String": "a"}, "aaaaaaaaaaaaaaaa", 12), marks=SLOW),
        replaced({"Regex": "e"}, "e" * 4096, 4),
        pytest.param({"normalizer": {"type": "Prepend", "prepend": "a" * (60 << 20)}}, marks=SLOW),
    ],
)
def test_a_tokenizer_that_explodes_as_it_loads_is_refused(bpe_folder, tmp_path, how):
    folder = checkpoint(bpe_folder, tmp_path / "m", **how)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(CheckpointError, match="take more than 2 GiB of memory to load: download"):
        Text(folder, folder)
    assert time.monotonic() - begin < WITHIN + apart.LOAD_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


# processes


def test_it_ends_with_its_owner_and_comes_back_if_others_end_it(bpe_folder):
    others = workers()
    with opened(bpe_folder) as text:
        (first,) = [p for p in workers() if p not in others and p.ppid() == os.getpid()]
        for one in [*first.children(), first]:
            one.kill()
        until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
        assert text.tokenizer.encode("Hello") and text.template.render(HONEST)
        assert first not in workers()
        text.close()
        text.close()
        assert text.tokenizer.encode("Hello"), "an LLM's tokenizer outlives it"
    ours = workers()
    text = Text(bpe_folder, bpe_folder)
    assert len(workers()) > len(ours)
    del text
    gc.collect()
    until(lambda: len(workers()) <= len(ours))


def test_closing_ends_what_is_being_rendered(bpe_folder, tmp_path):
    folder = checkpoint(bpe_folder, tmp_path / "m", SOME.replace("BAD", LOOPS[0]))
    with contextlib.closing(Text(folder, folder, seconds=60.0)) as text:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(text.template.render, LOOP)
            time.sleep(0.2)
            begin = time.monotonic()
            text.close()
            assert isinstance(asked.exception(30), RequestError)
        assert time.monotonic() - begin < 30  # of the 60 that a request has here


@pytest.fixture
def many_files():
    """Descriptors from now on have numbers that `select` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 2048
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1100:
        taken.append(os.dup(taken[0]))
    yield
    for one in taken:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_serves_beside_many_connections(bpe_folder, many_files):
    with opened(bpe_folder) as text:
        assert text.template.render(HONEST) and text.tokenizer.encode("Hello")
        for one in [p for p in workers() if p.ppid() == os.getpid()]:
            one.kill()
        assert text.tokenizer.encode("Hello")
