"""Cached prompts go from one engine to another, and no page of either is lost on the way.

Two toys with a history and a state (`toy_model`): an answer over pages of the other is the one that
a plain computation gives, or the rig says which page was stale.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from fake_device import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import CPU, toy

from ds_runtime.kv.caches import copy_states
from ds_runtime.kv.prefix import OWN, Realm
from ds_runtime.kv.transfer import leases
from ds_runtime.kv.transfer.asked import PagesPulled
from ds_runtime.kv.transfer.handover import Handover
from ds_runtime.kv.transfer.host import HostTransfer
from ds_runtime.kv.transfer.leases import Done, Ended, Leases, Offer, Want, longest
from ds_runtime.platform.kv_transfer import TransferError
from ds_runtime.platform.page_copies import TorchPageCopies
from examples import examples

ROOT = b"r" * 32
LONG = [number * 7 % VOCAB for number in range(41)]  # ten pages and a token


class Moves(HostTransfer):
    """Moves what the fake device has of pages as well."""

    def __init__(self, name, net, device) -> None:
        super().__init__(name, b"same", net)
        self.device = device

    def _copy(self, other, read) -> None:
        super()._copy(other, read)
        own, its = self.device.caches[0], other.device.caches[0]
        for here, there in zip(read.local.pages, read.remote.pages, strict=True):
            own[here] = list(its[there])


class End:
    """One engine."""

    def __init__(self, name, net, clock, **more) -> None:
        self.rig, self.net, self.clock = toy(**more), net, clock
        self.answers: dict[str, PagesPulled] = {}
        self.rig.lent, self.rig.stalls = self.lent, self.stalls
        self.start(name)

    def start(self, name) -> None:
        """Its end of the transfer: a new one, if there was one before."""
        device, (pages,) = self.rig.device, self.rig.ranks
        self.transfer = Moves(name, self.net, device)
        caches, count = device.toys[0], self.rig.pool.num_pages
        states = next(len(c) for c in caches.groups[1][1].values())
        self.transfer.register(caches, count, states, TorchPageCopies(CPU))
        settle = lambda: copy_states(caches, pages.snapshots.drain())  # noqa: E731
        self.handover = Handover(Leases(pages, self.transfer, settle, lambda: self.clock[0]))

    def lent(self):
        pulls = self.handover._pulls.values()
        pages = [page for pull in pulls for page in pull.local.pages]
        return pages, [block for pull in pulls for block in pull.local.states]

    def stalls(self) -> bool:
        """Whether a read that cannot be given up keeps pages, until the transfer is dropped."""
        return self.handover._raised is not None and self.handover.num_coming > 0

    def poll(self) -> None:
        for pulled in self.handover.poll():
            assert pulled.token not in self.answers
            self.answers[pulled.token] = pulled
        self.rig.check_pages()

    def asked(self, rid, prompt, **params) -> int:
        self.rig.submit(rid, list(prompt), **params)
        self.rig.run()
        return self.rig.cached[rid]

    def hold(self, prompt, seconds=30.0, realm=OWN):
        return self.handover.leases.hold(prompt, realm, ROOT, seconds)

    def pull(self, token, prompt, offer, realm=OWN):
        self.handover.pull(token, prompt, realm, ROOT, offer)


@pytest.fixture
def ends():
    return make_ends()


def make_ends(**more):
    net, clock = {}, [0.0]
    return End("here", net, clock, **more), End("there", net, clock)


def settled(*ends):
    """Until nobody has anything under way."""
    for _ in range(6):
        for end in ends:
            end.poll()
    for end in ends:
        assert not end.handover.busy
        end.rig.check_end()


def test_an_answer_over_pages_of_another_is_the_same(ends):
    here, there = ends
    assert there.asked("a", LONG) == 0
    offer = there.hold(LONG)
    assert there.handover.leases.num_held == 10 and here.handover.leases.num_held == 0
    here.pull("t", LONG, offer)
    assert here.handover.num_coming == 10
    settled(here, there)
    assert here.answers["t"] == PagesPulled("t", tokens=40)
    assert here.asked("a", LONG) == 40 and here.rig.answers["a"] == there.rig.answers["a"]
    settled(here, there)
    assert (there.handover.leases.num_given, here.handover.num_read) == (10, 10)


def test_only_what_is_missing_is_read(ends):
    here, there = ends
    there.asked("a", LONG)
    here.asked("b", LONG[:21])
    here.pull("t", LONG, there.hold(LONG))
    assert here.handover.num_coming == 5
    settled(here, there)
    assert here.asked("a", LONG) == 40
    here.pull("u", LONG, there.hold(LONG))
    assert here.handover.num_coming == 0
    settled(here, there)
    assert here.answers["u"].tokens == 40 and here.handover.num_read == 5


def test_what_was_computed_here_meanwhile_stays(ends):
    here, there = ends
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG))
    assert here.asked("b", LONG) == 0
    settled(here, there)
    assert here.answers["t"].tokens == 40 and here.asked("c", [*LONG, 5]) == 40


@pytest.mark.parametrize("salt", ["", "a"])
def test_pages_go_to_the_same_realm(ends, salt):
    here, there = ends
    realm = Realm(0, salt)
    there.asked("a", LONG, salt=salt)
    here.pull("t", LONG, there.hold(LONG, realm=realm), realm)
    settled(here, there)
    assert here.asked("a", LONG, salt=salt) == 40 and here.asked("b", LONG, salt="other") == 0


@pytest.mark.parametrize("when", ["offered", "wanted", "read", "asked", "done"])
@pytest.mark.parametrize("who", ["here", "there"])
def test_no_page_leaks_when_either_side_leaves(ends, when, who):
    """In each state; and the other serves on, as does one that comes back."""
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG, seconds=30)
    steps = ["offered", "wanted", "read", "asked", "done"].index(when)
    if steps > 0:
        here.pull("t", LONG, offer)
    for end in (there, here, there, here)[: max(0, steps - 1)] if steps else ():
        end.poll()
    gone = here if who == "here" else there
    gone.handover.close()
    if when in ("offered", "wanted") and who == "here":
        here.clock[0] = 31.0  # its first word was not heard yet: the lease ends by time
    gone.start("again")
    settled(here, there)
    if when == "offered" and who == "there":
        here.pull("t", LONG, offer)
        settled(here, there)
    if who == "there" and when != "done":
        words = ("left before", "is gone", "holds these pages no more")
        assert any(word in here.answers["t"].refused for word in words)
    there.asked("b", LONG)
    here.pull("u", LONG, there.hold(LONG))
    settled(here, there)
    assert here.answers["u"].tokens == 40 and here.asked("z", LONG) == 40
    assert here.rig.answers["z"] == there.rig.answers["a"]


def test_a_lease_ends_with_time_and_its_reader_keeps_nothing(ends):
    """Its pages may be others since: what was read of them is not trusted."""
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG, seconds=10)
    here.pull("t", LONG, offer)
    here.clock[0] = 10.5
    there.handover._expire(10.5)
    assert not there.handover.leases._leases
    settled(here, there)
    assert "holds these pages no more" in here.answers["t"].refused
    assert here.rig.prefix.num_cached == 0
    here.pull("u", LONG, there.hold(LONG, seconds=10))
    for second in range(11, 40):  # a slow reader renews it
        here.clock[0] = second
        here.handover._renew(here.clock[0])
        there.poll()
        assert there.handover.leases._leases
    settled(here, there)
    assert here.answers["u"].tokens == 40


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 0.1, 0.9, leases.LEAST, 30.0])
def test_a_lease_of_no_time_is_renewed_as_one_of_a_second_and_lives_as_long(ends, seconds):
    """However often its reader looks: whoever makes offers does not drown in what they say."""
    here, there = ends
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG, seconds))
    said, notify = [], here.transfer.notify

    def noted(peer, data):
        said.append(here.clock[0])
        notify(peer, data)

    here.transfer.notify = noted
    for moment in range(600):
        here.clock[0] = moment / 200
        here.handover._renew(here.clock[0])
        there.poll()
        assert there.handover.leases._leases
    apart = [after - before for before, after in pairwise([0.0, *said])]
    assert all(each >= max(seconds, leases.LEAST) / 3 for each in apart)
    assert len(said) <= 9
    settled(here, there)
    assert here.answers["t"].tokens == 40


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 0.5, leases.LEAST, 2.5])
def test_a_lease_lives_a_second_at_least_from_its_reader_s_last_word(ends, seconds):
    here, there = ends
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG, seconds))
    there.poll()
    life = max(seconds, 1.0)
    here.clock[0] = life - 0.01
    there.poll()
    assert there.handover.leases._leases
    here.clock[0] = life + 0.01
    there.poll()
    assert not there.handover.leases._leases
    settled(here, there)
    assert here.answers["t"].refused and here.rig.prefix.num_cached == 0


def test_a_pull_ends_though_its_peer_says_nothing(ends):
    here, there = ends
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG))
    for _ in range(3):
        here.poll()
    assert here.handover.busy
    here.clock[0] = longest(10) + 1
    settled(here, there)
    assert "did not give all pages within 301 s" in here.answers["t"].refused


def test_running_requests_go_first(ends):
    """Pages that are held or come are given back before a request is preempted."""
    here, there = make_ends(num_pages=12)
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG))
    assert here.rig.pool.num_free == 2
    assert here.asked("b", [5] * 30, max_tokens=12) == 0, "needs 11 of 12 pages"
    settled(here, there)
    assert "running requests need the pages" in here.answers["t"].refused
    here.asked("c", LONG[:30])
    here.hold(LONG[:30])
    assert here.asked("d", [6] * 30, max_tokens=12) == 0
    settled(here, there)
    assert here.rig.scheduler.stats().preemptions == 0
    there.asked("e", [*LONG, *LONG[:3]])
    here.rig.submit("f", [7] * 30, max_tokens=12)
    here.rig.step()
    with pytest.raises(TransferError, match="pages are needed, and requests have them"):
        here.pull("v", [*LONG, *LONG[:3]], there.hold([*LONG, *LONG[:3]]))
    here.rig.run()
    there.clock[0] = 31
    settled(here, there)


def test_snapshots_that_are_read_stay(ends):
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG)
    for number in range(20):
        there.asked(f"b{number}", [number, *LONG])
    here.pull("t", LONG, offer)
    settled(here, there)
    assert here.asked("a", LONG) == 40
    assert here.rig.answers["a"] == there.rig.answers["a"]


def test_a_snapshot_is_there_when_it_is_offered(ends):
    """Its copy would run in front of the next step, which may never come."""
    here, there = ends
    there.rig.submit("a", LONG)
    there.rig.step()
    there.rig.abort("a")
    here.pull("t", LONG, there.hold(LONG))
    here.poll()
    settled(here, there)
    assert here.asked("a", LONG) == 40
    here.rig.check_end()


def test_flushing_disturbs_nobody(ends):
    here, there = ends
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG))
    there.rig.scheduler.flush()
    here.rig.scheduler.flush()
    settled(here, there)
    assert here.answers["t"].tokens == 40
    there.rig.scheduler.flush(), here.rig.scheduler.flush()
    assert here.rig.pool.num_free == here.rig.pool.num_pages
    assert there.rig.pool.num_free == there.rig.pool.num_pages


def test_pages_that_turn_out_broken_are_not_kept(ends):
    here, there = ends
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG))
    here.poll()
    (pages,) = there.rig.ranks
    pages.pool.free(pages.prefix.discard(pages.prefix.find(LONG).node, 0))
    settled(here, there)
    assert here.answers["t"].refused and here.rig.prefix.num_cached == 0


def test_a_transfer_that_is_dropped_leaves_all_pages(ends):
    here, there = ends
    there.asked("a", LONG)
    here.asked("b", LONG[:9])
    here.hold(LONG[:9])
    here.pull("t", LONG, there.hold(LONG))
    assert [(p.token, p.refused) for p in here.handover.drop("it broke")] == [("t", "it broke")]
    here.rig.check_end()
    there.clock[0] = 31
    settled(there)


# ---- what peers and front ends say ----


def forged(offer, **changes):
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(offer, type=Offer), **changes)
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": bytes(32)}, "of another prompt, model, adapter, layout, page size or salt"),
        ({"pages": []}, "of another prompt"),
        ({"pages": [0, 1]}, "of another prompt"),
        ({"pages": [0] * 99}, "of another prompt"),
        ({"pages": [99, *range(9)]}, "page 99 there: there are 64"),
        ({"states": []}, "keeps other states"),
        ({"states": [1 << 30]}, "state 1073741824 there"),
        ({"description": b""}, "is no description"),
        ({"key": b""}, "is no offer"),
        ({"seconds": 0.0}, "is no offer"),
        ({"seconds": float("nan")}, "is no offer"),
        ({"lease": -1}, "is no offer"),
    ],
)
def test_an_offer_that_is_wrong_is_refused_with_nothing_lost(ends, changes, said):
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG)
    with pytest.raises(TransferError, match=said):
        here.pull("t", LONG, forged(offer, **changes))
    here.rig.check_end()
    here.pull("u", LONG, offer)
    settled(here, there)
    assert here.answers["u"].tokens == 40


def test_an_offer_of_other_tokens_or_another_root_is_refused(ends):
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG)
    for prompt, root in (([9, *LONG[1:]], ROOT), (LONG[:-2], ROOT), (LONG, b"x" * 32)):
        with pytest.raises(TransferError, match="of another prompt"):
            here.handover.pull("t", prompt, OWN, root, offer)
    here.pull("t", LONG, offer)
    with pytest.raises(TransferError, match="'t' is under way"):
        here.pull("t", LONG, offer)
    settled(here, there)
    here.rig.check_end()


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3601.0, 1e12, float("inf"), float("nan")])
def test_a_lease_ends_some_time(ends, seconds):
    there = ends[1]
    there.asked("a", LONG)
    with pytest.raises(TransferError, match=f"seconds {seconds}: give more than 0 and at most"):
        there.hold(LONG, seconds)
    there.rig.check_end()


def test_leases_end_however_often_they_are_renewed(ends):
    """Counted from the reader's first word: 300 s, and a tenth of one for each page."""
    here, there = ends
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG, seconds=10))
    last = 0.0
    for second in range(0, 400, 3):
        here.clock[0] = second
        here.transfer.notify("there", msgspec.msgpack.encode(Want(1)))
        there.poll()
        last = second if there.handover.leases else last
    assert 297 <= last <= longest(10) == 301
    settled(here, there)
    assert "holds these pages no more" in here.answers["t"].refused


def test_others_hold_half_of_all_pages_or_one_prompt():
    """Pages that several hold count once."""
    there = make_ends(num_pages=36)[0]
    for first in range(3):
        there.asked(f"{first}", [first, *LONG[1:]])
    there.hold([0, *LONG[1:]])
    there.hold([0, *LONG[1:]])
    assert there.handover.leases.num_held == 10
    with pytest.raises(TransferError, match="10 pages are held for others, and with 10 more"):
        there.hold([1, *LONG[1:]])
    there.clock[0] = 31
    settled(there)
    there.hold([1, *LONG[1:]])
    there.clock[0] = 62
    settled(there)
    small = make_ends(num_pages=12)[0]
    small.asked("a", LONG)
    small.hold(LONG), small.hold(LONG)
    small.clock[0] = 31
    settled(small)


def test_others_hold_half_of_all_snapshots(ends):
    there = ends[1]
    most = there.rig.ranks[0].snapshots.pool.num_pages // 2
    prompts = [[first, *LONG[1:6]] for first in range(most + 1)]
    for rid, prompt in enumerate(prompts):
        there.asked(f"{rid}", prompt, max_tokens=1)
    for prompt in prompts[:most]:
        there.hold(prompt), there.hold(prompt)
    with pytest.raises(TransferError, match=f"{most} snapshots are held for others, of {most}"):
        there.hold(prompts[most])
    there.clock[0] = 31
    settled(there)


def test_whoever_pins_a_snapshot_is_no_prompt_that_goes_on_from_it(ends):
    there = ends[1]
    there.asked("a", LONG)
    before = there.rig.scheduler.stats().snapshot_hits
    there.hold(LONG)
    assert there.rig.scheduler.stats().snapshot_hits == before
    there.clock[0] = 31
    settled(there)


def test_a_snapshot_that_was_another_meanwhile_does_not_stand(ends):
    """It has the same number again: its bytes are others, and what was read of them is dropped."""
    here, there = ends
    there.asked("a", LONG)
    (pages,) = there.rig.ranks
    here.pull("t", LONG, there.hold(LONG))
    there.poll()
    (lease,) = there.handover.leases._leases.values()
    node, block = lease.node, lease.pin.block
    pages.snapshots.lose(node)
    assert pages.snapshots.reserve() == block
    pages.snapshots.adopt(node, block)
    there.hold(LONG)
    settled_now = [here.poll(), there.poll(), here.poll()]
    assert settled_now and "no more" in here.answers["t"].refused
    assert here.rig.prefix.num_cached == 0
    there.clock[0] = 31
    settled(here, there)


def test_a_read_that_cannot_be_given_up_keeps_its_pages(monkeypatch):
    """They may be written to yet: requests that need them wait until the transfer is dropped."""
    here, there = make_ends(num_pages=12)
    there.asked("a", LONG)
    here.pull("t", LONG, there.hold(LONG))

    def broken(ticket):
        raise OSError("the fabric is gone")

    monkeypatch.setattr(here.transfer, "release", broken)
    here.rig.submit("b", [5] * 30, max_tokens=12)
    for _ in range(3):
        assert here.rig.scheduler.schedule() is None
        here.rig.check_pages()
    assert here.handover.num_coming == 10 and here.handover.busy
    with pytest.raises(OSError, match="the fabric is gone"):
        here.handover.poll()
    assert [pulled.token for pulled in here.handover.drop("it broke")] == ["t"]
    here.rig.run()
    here.rig.check_end()
    there.clock[0] = 31
    settled(there)


RAISES = ("read", "notify", "release", "poll", "notices", "close", "describe")


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_whatever_raises_and_when_nothing_is_lost_or_given_twice(data):
    """Any call of a transfer, at any time, once or from then on: each pull is answered once, and
    all pages are there when the transfer is dropped."""
    here, there = make_ends(num_pages=24)
    for end, prompt in ((there, LONG), (there, LONG[:17]), (here, LONG[:9])):
        end.asked(f"{len(prompt)}", prompt)
    end, name = data.draw(st.sampled_from([here, there])), data.draw(st.sampled_from(RAISES))
    first, last = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1, 99]))
    real, count, asked, broke = getattr(end.transfer, name), [0], set(), False

    def raises(*given):
        count[0] += 1
        if first < count[0] <= first + last:
            raise OSError("the fabric is gone")
        return real(*given)

    setattr(end.transfer, name, raises)
    for number in range(data.draw(st.integers(2, 12))):
        one, action = data.draw(st.sampled_from([here, there])), data.draw(st.sampled_from(ACTIONS))
        try:
            if action in ("hold", "pull"):
                prompt = data.draw(st.sampled_from([LONG, LONG[:17]]))
                here.pull(f"{number}", prompt, there.hold(prompt, seconds=5))
                asked.add(f"{number}")
            elif action == "ask":  # others may have to leave for it, in the middle of a step
                one.rig.submit(f"{number}", [7] * 70, max_tokens=9)
                one.rig.run()
            elif action == "clock":
                here.clock[0] += 3
            elif not (broke and one is end):
                one.poll()
        except (OSError, TransferError) as e:
            if action not in ("hold", "pull", "ask") and isinstance(e, OSError):
                broke = True
                break
            assert action != "ask", "requests have nothing to do with it"
        one.rig.check_pages()
    setattr(end.transfer, name, real)
    if broke or end.handover._raised:
        for pulled in end.handover.drop("it broke"):
            assert pulled.token not in end.answers
            end.answers[pulled.token] = pulled
        end.rig.run()
        end.rig.check_end()
    other = there if end is here else here
    left = [other] if broke or end.handover._raised else [end, other]
    for _ in range(2):  # what a reader had said is only heard now
        here.clock[0] += longest(10) + 6
        for one in left:
            one.poll()
    settled(*left)
    assert {*here.answers} == asked
    for one in (here, there):
        one.rig.check_end()


@pytest.mark.parametrize("fails", ["settle", "read"])
def test_whatever_a_transfer_raises_loses_no_page(ends, monkeypatch, fails):
    """A plugin's own errors, too: they are the caller's, and nothing is held for them."""
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG)

    def broken(*given):
        raise OSError("no memory can be registered")

    where = (here.transfer, "read") if fails == "read" else (here.handover, "_settle")
    monkeypatch.setattr(*where, broken)
    with pytest.raises(OSError, match="no memory"):
        here.pull("t", LONG, offer)
    here.rig.check_end()
    if fails == "settle":
        monkeypatch.setattr(there.handover.leases, "settle", broken)
        with pytest.raises(OSError, match="no memory"):
            there.hold(LONG)
        assert len(there.handover.leases._leases) == 1, "the one that was there"
    there.clock[0] = 31
    settled(there)


def test_nothing_is_offered_of_what_is_not_cached(ends, monkeypatch):
    here, there = ends
    with pytest.raises(TransferError, match="no page of this prompt is cached here"):
        there.hold(LONG)
    there.asked("a", LONG)
    monkeypatch.setattr(leases, "MOST_LEASES", 2)
    there.hold(LONG), there.hold(LONG)
    with pytest.raises(TransferError, match="2 prompts are held for others"):
        there.hold(LONG)
    there.clock[0] = 31
    settled(here, there)


@given(notice=st.binary(max_size=30))
def test_any_notice_is_borne(notice):
    here, there = make_ends()
    there.asked("a", LONG)
    there.hold(LONG)
    here.transfer.attach(there.transfer.describe())
    here.transfer.notify("there", notice)
    there.poll()
    assert len(there.handover.leases._leases) == 1


def test_only_what_moves_is_in_haste(ends):
    """A lease that nobody reads is looked at now and then: its engine may rest."""
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG)
    assert there.handover.moves, "its reader may speak at once"
    there.clock[0] += leases.SOON
    assert there.handover.busy and not there.handover.moves
    here.pull("p", LONG, offer)
    there.poll()
    assert here.handover.moves and there.handover.moves
    settled(here, there)
    assert here.answers["p"].tokens == 40 and not (here.handover.moves or there.handover.moves)


def test_a_lease_has_one_reader(ends):
    here, there = ends
    there.asked("a", LONG)
    offer = there.hold(LONG)
    third = End("third", here.net, here.clock)
    here.pull("t", LONG, offer)
    there.poll()
    third.pull("t", LONG, offer)
    for said in (Done(1), Want(1), Ended(1, True), Done(77)):
        third.transfer.notify("there", msgspec.msgpack.encode(said))
        third.transfer.notify("here", msgspec.msgpack.encode(said))
    settled(here, there, third)
    assert here.answers["t"].tokens == 40 and "no more" in third.answers["t"].refused


ACTIONS = ("ask", "hold", "pull", "step", "poll", "clock", "leave", "flush", "abort")


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_whatever_happens_no_page_is_lost(data):
    """Any order of requests, offers, pulls, steps, time and ends, on pools that are nearly full."""
    here, there = make_ends(num_pages=24)
    prompts = [LONG, LONG[:17], [3, *LONG], LONG[:30] + [1] * 9]
    offers = []
    for number in range(data.draw(st.integers(5, 40))):
        end = data.draw(st.sampled_from([here, there]))
        prompt = data.draw(st.sampled_from(prompts))
        action = data.draw(st.sampled_from(ACTIONS))
        try:
            if action == "ask":
                end.rig.submit(f"{number}", list(prompt), max_tokens=data.draw(st.integers(1, 20)))
            elif action == "hold":
                offers.append((prompt, end.hold(prompt, seconds=5)))
            elif action == "pull" and offers:
                prompt, offer = data.draw(st.sampled_from(offers))
                end.pull(f"{number}", prompt, offer)
            elif action == "step" and end.rig.scheduler.has_work:
                end.rig.step()
            elif action == "poll":
                end.poll()
            elif action == "clock":
                here.clock[0] += data.draw(st.sampled_from([0.5, 6.0]))
            elif action == "leave":
                end.handover.close()
                end.start(f"again {number}")
            elif action == "flush":
                end.rig.scheduler.flush()
            elif action == "abort" and end.rig.submits:
                rid = next(iter(end.rig.submits))
                if rid in end.rig.scheduler._requests:
                    end.rig.abort(rid)
        except TransferError:
            pass
        end.rig.check_pages()
    for end in (here, there):
        end.rig.run()
    here.clock[0] += longest(10) + 6
    settled(here, there)
