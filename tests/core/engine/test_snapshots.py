"""Pages, the prefix cache and snapshots together, against what every block ought to hold."""

from __future__ import annotations

import pytest
import torch
from fake_device import Rig, next_token
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from ds_runtime.engine.messages import Submit
from ds_runtime.engine.schedule.ledger import Holdings
from ds_runtime.engine.schedule.request import Request, State
from ds_runtime.kv import snapshots
from ds_runtime.kv.caches import allocate, copy_states
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import Node, PrefixCache
from ds_runtime.kv.rank_pages import Pages
from ds_runtime.kv.snapshots import Snapshots
from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.ops.contracts.caches import HistoryGroup, LaidGroup, StateGroup
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.sampling_params import SamplingParams
from examples import examples

SIZE, ROWS, PAGES, EVERY = 2, 4, 24, 6


class Machine(RuleBasedStateMachine):
    """Requests come, compute, and leave; pages are evicted, flushed and discarded in between.

    `read`: the nodes that prompts have gone on from last, a quarter of the blocks of them. They
    keep their snapshots, whatever requests do.
    """

    running = Bundle("running")

    @initialize(blocks=st.sampled_from([0, 1, 3, 3, 4, 5, 8]))
    def begin(self, blocks):
        before, snapshots.TOKENS = snapshots.TOKENS, EVERY
        self.blocks, self.made = blocks, Snapshots(SIZE, ROWS, blocks)
        snapshots.TOKENS = before
        self.pages = Pages(PagePool(PAGES), PrefixCache(SIZE, self.made), SIZE, self.made)
        self.rows = list(range(ROWS))
        self.states: dict[int, tuple[int, ...]] = {}  # block → the tokens that it stands for
        self.history: dict[int, tuple[int, ...]] = {}  # page → all tokens up to its end
        self.here: list[Request] = []
        self.read: list[Node] = []
        self.count = 0

    def forget(self) -> None:
        """Pages have left, and snapshots with them."""
        self.read = [node for node in self.read if node in self.made]

    def copy(self) -> None:
        for source, target in self.made.drain():
            self.states[target] = self.states[source]

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)

    @rule(target=running, tokens=tokens, salt=st.sampled_from(["", "", "a"]), thinks=st.booleans())
    def arrive(self, tokens, salt, thinks):
        """thinks: no page behind its prompt is shared."""
        self.count += 1
        submit = Submit(
            rid=str(self.count), prompt=tokens, params=SamplingParams(), seed=0, salt=salt,
            think_id=tokens[-1] if thinks else None,
        )  # fmt: skip
        request = Request.create(submit, (0, self.count), (), 100)
        known = self.pages.match(request, reads_cache=True)
        if not self.rows or not self.pages.take(request, known, self.rows[0]):
            return None
        request.row, request.state = self.rows.pop(0), State.RUNNING
        self.states[request.row] = ()
        self.forget()
        if request.num_shared:
            self.read = [request.node, *(n for n in self.read if n is not request.node)]
            del self.read[self.blocks // 4 :]
        self.copy()
        computed = tuple(tokens[: request.num_computed])
        assert self.states[request.row] == (salt, *computed) if computed else True
        if not computed:
            self.states[request.row] = (salt,)
        for number, page in enumerate(request.pages[: request.num_shared]):
            assert self.history[page] == (salt, *tokens[: (number + 1) * SIZE])
        self.here.append(request)
        return request

    @rule(request=running, at=st.integers(1, 6))
    def part(self, request, at):
        """Another prompt leaves it there: a snapshot is due, unless it is behind."""
        if request is None or request not in self.here or at * SIZE >= request.prompt_len:
            return
        behind = request.num_computed >= at * SIZE
        due = not request.on_device and not behind
        assert self.made.branch(request, at * SIZE) == due
        assert not due or self.pages.reach(request, 20) <= at * SIZE - request.num_computed

    @rule(request=running, length=st.integers(1, 9), token=st.integers(0, 1))
    def compute(self, request, length, token):
        if request is None or request not in self.here:
            return
        if request.num_computed == request.total_len:
            request.on_device = True
            request.append(token)
        length = min(length, request.total_len - request.num_computed)
        if request.on_device and not self.pages.grow(request):
            return
        length = self.pages.reach(request, length)
        assert length >= 1
        self.forget()
        had = request.snapshot >= 0
        self.pages.advance(request)
        if request.on_device and request.snapshot >= 0 and not had:
            assert sum(r.snapshot >= 0 for r in self.here) <= self.blocks // 2
        self.copy()
        start, stop = request.num_computed, request.num_computed + length
        more = request.tokens(start, stop)
        self.states[request.row] += tuple(more)
        for page in range(start // SIZE, stop // SIZE):
            told = request.salt, *request.tokens(0, (page + 1) * SIZE)
            self.history[request.pages[page]] = told
        request.num_computed = stop
        self.pages.share(request, stop, proved=True)

    @rule(steps=st.integers(1, 5), token=st.integers(0, 1))
    def answer(self, steps, token):
        """All that run, side by side."""
        for _ in range(steps):
            for request in self.here:
                self.compute(request, 9, token)

    @rule(request=consumes(running), broken=st.sampled_from([False, False, True]))
    def leave(self, request, broken):
        if request is None or request not in self.here:
            return
        self.here.remove(request)
        row = request.row
        self.pages.release(request)
        if broken:
            self.pages.discard(request)
            self.forget()
            left = self.pages.prefix.match(request.tokens(0, request.total_len), request.realm)
            assert left.node.page < 0, "nothing goes on from what broke"
        self.rows.append(row)
        assert request.snapshot == -1

    @rule(count=st.integers(0, 5))
    def evict(self, count):
        self.pages.pool.free(self.pages.prefix.evict(count))
        self.forget()

    @rule()
    def flush(self):
        self.pages.flush()
        self.forget()

    @invariant()
    def every_block_is_somebodys_and_holds_what_it_stands_for(self):
        cached = self.pages.prefix.check()
        owned = [page for r in self.here for page in r.pages[r.num_shared :]]
        assert sorted([*cached, *owned, *self.pages.pool.free_pages()]) == list(range(PAGES))
        self.made.check(self.here)
        self.copy()
        for node, block in (*self.made._new.items(), *self.made._read.items()):
            assert self.states[block] == self.history[node.page]
        assert all(node in self.made for node in self.read)
        for request in self.here:
            if request.snapshot >= 0:
                most = request.total_len if request.max_shared is None else request.max_shared
                assert request.snapshot_at <= most, "nobody will go on from there"
                known = request.salt, *request.tokens(0, request.snapshot_at)
                assert self.states[request.snapshot] == known

    def teardown(self):
        for request in self.here:
            self.pages.release(request)
        self.pages.flush()
        assert self.pages.pool.num_free == PAGES and self.made.pool.num_free == self.blocks


TestSnapshots = Machine.TestCase
TestSnapshots.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("opens", ["prompt", "answer"])
def test_answers_that_think_leave_others_their_snapshots(overlap, opens):
    """Half of the blocks are for answers. Those whose pages nobody will share take none, so that
    the next turn of a chat beside them goes on from its answer."""

    def next_turn(thinks):
        rig = Rig(200, overlap=overlap, snapshots=4, max_running=6)
        for n in range(4):
            text = [n, n, n + 9, n, 5]
            seed = len(text)
            think = 5 if opens == "prompt" else next_token(text, seed, 0)
            rig.submit(f"t{n}", text, max_tokens=60, think=think if thinks else None)
        for _ in range(12):
            rig.step()
        chat = [20 + n for n in range(10)]
        rig.submit("chat", chat, max_tokens=20)
        while rig.answers["chat"].finish is None:
            rig.step()
        turn = [*chat, *rig.answers["chat"].tokens, 1, 2]
        rig.submit("next", turn, max_tokens=2)
        rig.run()
        rig.check_end()
        return rig.cached["next"]

    assert next_turn(thinks=True) == 28  # of 10 and 20 tokens in pages of 4
    assert next_turn(thinks=False) < 28, "they had all blocks that are for answers"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("blocks", [0, 1, 8])
def test_where_there_are_no_snapshots_nobody_waits_for_one(blocks, overlap):
    """Equal prompts wait for what they will go on from; without snapshots each goes its own way."""
    rig = Rig(200, overlap=overlap, snapshots=blocks, prefill_chunk=8)
    for n in range(6):
        rig.submit(str(n), list(range(30)), max_tokens=2)
    rig.step()
    assert len(rig.scheduler.running) == (1 if blocks else 6)
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().prefix_waits == (5 if blocks else 0)
    assert sorted(rig.cached.values()) == ([0, *[28] * 5] if blocks else [0] * 6)


SIDE = st.integers(0, 7)  # pages


@given(
    common=st.integers(1, 9), tails=st.lists(st.tuples(SIDE, st.integers(0, 3)), min_size=3,
    max_size=5), chunk=st.sampled_from([4, 8, 64]), overlap=st.integers(0, 1), first=st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_where_a_prompt_was_left_the_next_one_goes_on(common, tails, chunk, overlap, first):
    """Prompts that share so many pages and differ in the first token behind them: the first
    computes all, the second what it shares, too, and leaves a snapshot where it left; the rest
    compute only their own. At once, the second waits for the first unless that is past it."""
    rig = Rig(400, overlap=overlap, snapshots=64, prefill_chunk=chunk, max_running=6)
    shared = [n % 9 for n in range(4 * common)]
    for n, (pages, more) in enumerate(tails):
        tail = [10 + n] + [20 + (n + k) % 19 for k in range(4 * pages + more)]
        rig.submit(str(n), [*shared, *tail], max_tokens=3)
        if first:
            rig.run()
    rig.run()
    rig.check_end()
    found = [rig.cached[str(n)] for n in range(len(tails))]
    assert found[0] == 0 and found[2:] == [4 * common] * len(found[2:])
    ends = sum(tails[0], 3 * tails[0][0]) < 4  # the first prompt, there
    assert found[1] == 4 * common if ends or (not first and chunk == 4 < 4 * common) else True


@given(
    copies=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    undo=st.integers(0, 2),
)
def test_copies_are_made_one_after_the_other(copies, undo):
    """Of every layer of state groups, and of no page."""
    facts = Facts(DeviceInfo("cpu", "a CPU", "x86"), {"kv_lora": 3, "qk_rope": 1}, page_size=4)
    groups = [HistoryGroup("kv", (0,)), StateGroup("near", (0, 1), rows=2)]
    laid = [LaidGroup(g, LATENT_PAGES, g.within(facts, undo)) for g in groups]
    caches = allocate(laid, 6, 6, torch.device("cpu"))
    for cache in caches:
        cache.copy_(torch.rand_like(cache))
    wanted = [cache.clone() for cache in caches]
    for source, target in copies:
        for cache in wanted[1:]:
            cache[target] = cache[source].clone()
    copy_states(caches, copies)
    assert all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True))


@given(
    shared=st.lists(st.integers(0, 24), min_size=2, max_size=3),
    own=st.integers(0, 24),
    computed=st.integers(0, 6),
)
@example(shared=[20, 14], own=20, computed=0)
@settings(max_examples=examples(150), deadline=None)
def test_asking_groups_for_a_place_changes_the_chosen_one_alone(shared, own, computed):
    """Nobody of another group keeps a snapshot for a prompt that never comes there."""
    common, running = list(range(100, 124)), []

    def group():
        made = Snapshots(SIZE, ROWS, 4)
        return Pages(PagePool(64), PrefixCache(SIZE, made), SIZE, made)

    def request(number, length):
        prompt = [*common[:length], *[number] * 5]
        submit = Submit(rid=f"{number}", prompt=prompt, params=SamplingParams(), seed=0)
        return Request.create(submit, (0, number), (), 200)

    holdings = Holdings([group() for _ in shared], 8)
    for number, length in enumerate(shared):
        one, pages = request(number, length), holdings.groups[number]
        assert pages.take(one, pages.match(one, True), number)
        one.state, one.group, one.num_computed = State.RUNNING, number, SIZE * computed
        running.append(one)
    asking = request(9, own)
    known = [
        pages.ahead(asking, pages.match(asking, True), here=False) for pages in holdings.groups
    ]
    assert not asking.branches and not any(one.branches for one in running)
    taken = holdings.take(asking, True)
    changed = {number for number, one in enumerate(running) if one.branches}
    if asking.behind is not None:
        assert not taken and changed <= {asking.behind.group}
        assert (asking.behind_pages, asking.behind) == known[asking.behind.group]
    else:
        assert taken and changed <= {asking.group}
