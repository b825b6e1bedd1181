"""The link between rank 0 and others: who is let in, who is told why not, and who is gone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from socket import create_connection, create_server

import msgspec
import pytest
import zmq

from ds_runtime.common.patience import LINK_LIMITS, LinkLimits
from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.parallel.link.end import is_free, numeric, secret
from ds_runtime.parallel.link.leader import Leader
from ds_runtime.parallel.link.member import Member
from ds_runtime.parallel.link.messages import Cause, Hello, Witness

OWN = Hello(0, 3, '{"tp": 3}', "m")
SHARE = 0.5  # of the limits that serve, so that tests take less and a busy machine still meets them
SOON = LinkLimits(**{f.name: SHARE * getattr(LINK_LIMITS, f.name) for f in fields(LinkLimits)})


def free_port(host=""):
    with create_server((host, 0)) as one:
        return one.getsockname()[1]


def differ(here, there):
    return [f"{here} here, {there} there"]


@pytest.fixture(params=["ipc", "tcp"])
def address(request, tmp_path):
    return f"ipc://{tmp_path}/r" if request.param == "ipc" else f"tcp://localhost:{free_port('')}"


class Word(msgspec.Struct, tag=True):
    text: str


@dataclass
class Other:
    """A rank in a thread of its own: what it was told, or what it raised."""

    hello: Hello
    address: str
    delay: float = 0.0
    keys: object = None
    limits: LinkLimits = LINK_LIMITS
    found: object = None

    def run(self):
        time.sleep(self.delay)
        member = Member(self.address, self.keys, self.limits)
        try:
            self.found = [member.greet(self.hello, 5.0)]
            while data := member.receive():
                self.found.append(msgspec.msgpack.decode(data, type=Word).text)
        except Exception as e:
            self.found = e
        member.close()


@contextmanager
def others(address, *hellos, keys=None, limits=LINK_LIMITS):
    told = [one if isinstance(one, tuple) else (0.0, one) for one in hellos]
    made = [Other(hello, address, delay, keys, limits) for delay, hello in told]
    threads = [threading.Thread(target=one.run) for one in made]
    for thread in threads:
        thread.start()
    yield made
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def lives():
    return None


def test_ranks_are_told_where_to_meet_then_what_to_do_then_to_leave(address):
    per_node = 2 if address.startswith("tcp") else 0
    leader = Leader(address, OWN, differ, per_node)
    mates = [msgspec.structs.replace(OWN, rank=rank) for rank in (1, 2)]
    with others(address, *mates) as found:
        leader.wait("file:///there", 20, lives)
        for text in ("a", "b"):
            leader.send(Word(text))
        leader.leave()
        leader.close()
    assert [one.found for one in found] == [["file:///there", "a", "b"]] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "0.0.9"}, "runs ds-runtime 0.0.9, and rank 0"),
        ({"size": 4}, "has --tp 4, and rank 0 --tp 3"),
        ({"model": "n"}, "has another checkpoint than rank 0, by its config.json"),
        ({"weights": "w"}, "has other weights than rank 0, under the same config.json"),
        ({"plan": '{"tp": 2}'}, 'there) against rank 0 (here): {"tp": 3} here, {"tp": 2} there'),
    ],
)
def test_one_that_does_not_fit_ends_all_with_the_reason(tmp_path, changes, said):
    address = f"ipc://{tmp_path}/r"
    leader = Leader(address, OWN, differ)
    own = [msgspec.structs.replace(OWN, rank=rank) for rank in (1, 2)]
    bad = msgspec.structs.replace(own[1], **changes)
    with others(address, own[0], (0.3, bad)) as found:
        with pytest.raises(ConfigError) as refusal:
            leader.wait("file:///there", 20, lives)
        leader.part()
    assert said in str(refusal.value) and "rank 2" in str(refusal.value)
    assert [str(one.found) for one in found] == [str(refusal.value)] * 2


def test_two_nodes_of_one_number_are_refused(tmp_path):
    leader = Leader(f"ipc://{tmp_path}/r", OWN, differ)
    same = msgspec.structs.replace(OWN, rank=1)
    with others(f"ipc://{tmp_path}/r", same, (0.3, same)) as found:
        with pytest.raises(ConfigError, match="rank 1 came twice: give every node a --node-rank"):
            leader.wait("file:///there", 20, lives)
        leader.part()
    assert all("came twice" in str(one.found) for one in found)


@pytest.mark.parametrize(("others_number", "first"), [(1, True), (2, True), (1, False)])
def test_one_that_only_said_that_it_is_here_is_refused_and_hears_no_plan(
    address, others_number, first
):
    """A second machine of one number that decides yet, when all that are needed have said hello."""
    leader = Leader(address, OWN, differ, 1 if address.startswith("tcp") else 0)
    late, begun = Member(address), threading.Event()
    if first:
        late.arrive(others_number)
        late.arrive(others_number)
    one, two = (msgspec.structs.replace(OWN, rank=rank) for rank in (1, 2))

    def check():
        begun.set()

    with others(address, one, (0.4, two)) as found:
        met = threading.Thread(target=leader.wait, args=("file:///there", 20, check))
        met.start()
        if not first:
            assert begun.wait(20)
            time.sleep(0.2)
            late.arrive(others_number)
        met.join()
        leader.send(Word("a prompt of somebody"))
        with pytest.raises(ConfigError, match=rf"rank {others_number}\b.* came twice: give every"):
            late.greet(msgspec.structs.replace(OWN, rank=others_number, plan="another"), 5)
        leader.send(Word("and another"))
        assert late.receive(200) is None
        late.tell(b"an answer that is none")
        assert leader.told(200) == []
        late.close()
        leader.leave()
        leader.close()
    assert [each.found for each in found] == [
        ["file:///there", "a prompt of somebody", "and another"]
    ] * 2


def test_who_comes_late_is_told_as_well_and_the_own_node_last(capsys):
    """The end of a rank of node 0 ends rank 0 with it, and nobody would be left to tell."""
    address = f"tcp://127.0.0.1:{free_port('')}"
    leader = Leader(address, Hello(0, 6, "6", "m"), differ, 2, limits=LinkLimits(late=0.1))
    same, odd = Hello(1, 6, "6", "m"), Hello(2, 6, "7", "m")
    late = [(2.0, Hello(rank, 6, "6", "m")) for rank in (4, 5)]
    when = {}

    def refuse():
        with pytest.raises(ConfigError, match="decided differently"):
            leader.wait("file:///there", 20, lives)

    waiting = threading.Thread(target=refuse)
    waiting.start()
    with others(address, same, odd, (0.0, Hello(3, 6, "6", "m")), *late) as found:
        deadline = time.monotonic() + 20
        while any(one.found is None for one in found) and time.monotonic() < deadline:
            for one in found:
                if one.found is not None:
                    when.setdefault(one.hello.rank, time.monotonic())
            time.sleep(0.01)
        when.setdefault(1, time.monotonic())
    waiting.join(20)
    leader.part()
    assert all("6 here, 7 there" in str(one.found) for one in found)
    assert when[1] >= when[2] + 1
    assert capsys.readouterr().err.count("node 0 exits in 30 s, and tells nodes") == 1


def test_a_rank_that_never_comes_is_named_with_its_node():
    port = free_port("")
    leader = Leader(f"tcp://127.0.0.1:{port}", OWN, differ, 2, limits=LinkLimits(late=0.2))
    one = msgspec.structs.replace(OWN, rank=1)
    with (
        others(f"tcp://127.0.0.1:{port}", one) as found,
        pytest.raises(EngineDeadError, match=r"^rank 2 on node 1 did not start within 1 s"),
    ):
        leader.wait("tcp://there:1", 1, lives)
    assert "rank 2 on node 1 did not start" in str(found[0].found)
    leader.part()


def test_rank_0_that_never_answers_is_named():
    member = Member(f"tcp://127.0.0.1:{free_port('')}")
    with pytest.raises(EngineDeadError, match=r"rank 0 at 127.* did not answer within 0 s .*start"):
        member.greet(OWN, 0.3)
    member.close()


def test_another_s_death_is_raised_while_waiting(tmp_path):
    leader = Leader(f"ipc://{tmp_path}/r", OWN, differ)
    with pytest.raises(EngineDeadError, match="rank 2 has died"):
        leader.wait("", 20, lambda: "rank 2 has died")
    leader.part()


def test_an_address_in_use_is_refused():
    address = f"tcp://127.0.0.1:{free_port('')}"
    leader = Leader(address, OWN, differ, 1)
    with pytest.raises(ConfigError, match=r"--dist-init-addr 127\.0\.0\.1:\d+: cannot be had"):
        Leader(address, OWN, differ, 1)
    with pytest.raises(ConfigError, match=r"--dist-init-addr no\.such\.host:1: cannot be had"):
        Leader("tcp://no.such.host:1", OWN, differ, 1)
    with pytest.raises(ConfigError, match=r"--dist-init-addr a\.\.b:1: cannot be had"):
        Leader("tcp://a..b:1", OWN, differ, 1)  # no name at all
    leader.part()


def test_strangers_are_not_heard():
    address = f"tcp://127.0.0.1:{free_port('')}"
    leader = Leader(address, OWN, differ, 1)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    hello = msgspec.msgpack.encode(msgspec.structs.replace(OWN, rank=1))
    others_numbers = [msgspec.structs.replace(OWN, rank=rank) for rank in (-1, 0, 3, 1 << 40)]
    for data in (
        b"",
        b"\xff" * 100,
        msgspec.msgpack.encode({"rank": 1}),
        b"GET / HTTP/1.1",
        hello.replace(b"\xa1m", b"\xa1\xff"),  # a text that is none
        msgspec.msgpack.encode(Cause(Witness.SAID, 1, "x"))[:-1],
        *map(msgspec.msgpack.encode, others_numbers),
        bytes(1 << 25),
    ):
        stranger.send(data)
    stranger.send_multipart([b"a", b"b", b"c"])
    with others(address, *(msgspec.structs.replace(OWN, rank=r) for r in (1, 2))) as found:
        leader.wait("there", 20, lives)
        leader.leave()
        leader.close()
    assert [one.found for one in found] == [["there"]] * 2
    context.destroy(linger=0)


def test_who_keeps_sending_does_not_put_off_the_end(tmp_path):
    leader, member = Leader(f"ipc://{tmp_path}/r", OWN, differ), Member(f"ipc://{tmp_path}/r")
    over = threading.Event()

    def send():
        while not over.wait(0.01):
            member._end.socket.send(b"?")

    sender = threading.Thread(target=send)
    sender.start()
    begin = time.monotonic()
    try:
        with pytest.raises(EngineDeadError, match="rank 1, 2 did not start"):
            leader.wait("there", 0.5, lives)
        assert time.monotonic() - begin < 60  # and not for ever
    finally:
        over.set()
        sender.join()
        leader.part()
        member.close()


def test_connections_that_ended_before_a_rank_came_are_not_its_own():
    """Their descriptors are given again."""
    port = free_port("")
    address, own = f"tcp://127.0.0.1:{port}", msgspec.structs.replace(OWN, size=2)
    leader = Leader(address, own, differ, 1, limits=SOON)
    for _ in range(5):
        with create_connection(("127.0.0.1", port)):
            time.sleep(0.05)
    time.sleep(0.2)
    member, told = Member(address, limits=SOON), []
    met = threading.Thread(target=leader.wait, args=("there", 20, lives))
    met.start()
    member.greet(msgspec.structs.replace(own, rank=1), 20)
    met.join()
    leader.watch(told.append)
    with create_connection(("127.0.0.1", port)):
        time.sleep(2 * SOON.sign)
    assert told == []
    leader.leave()
    leader.close()
    member.close()


@contextmanager
def told_by_two(tmp_path):
    """Rank 0 of one machine, and two others that have been welcomed and may be told of."""
    address = f"ipc://{tmp_path}/r"
    leader, members = Leader(address, OWN, differ), [Member(address) for _ in range(2)]
    mates = [msgspec.structs.replace(OWN, rank=rank) for rank in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(one.greet, own, 20) for one, own in zip(members, mates, strict=True)]
        leader.wait("there", 20, lives)
        assert [one.result() for one in met] == ["there"] * 2
    yield leader, members
    leader.part()
    for member in members:
        member.close()


@pytest.mark.parametrize("milliseconds", [0, 2, 200])
@pytest.mark.parametrize("gone", [0, 1])
def test_who_waits_for_answers_hears_that_one_has_gone(tmp_path, milliseconds, gone):
    """Nobody else looks meanwhile. What others answer before is taken."""
    with told_by_two(tmp_path) as (leader, members):
        members[1 - gone].tell(b"before")
        begin, found = time.monotonic(), []
        while not found and time.monotonic() < begin + 20:
            found = leader.told(milliseconds)
        assert found == [b"before"]
        members[gone].close()
        with pytest.raises(EngineDeadError, match=f"^rank {gone + 1} has left, or cannot be"):
            while time.monotonic() < begin + 60:
                leader.told(milliseconds)
                time.sleep(0.001)


def test_one_that_answers_late_is_waited_for(tmp_path):
    with told_by_two(tmp_path) as (leader, members):
        late = threading.Timer(1.5, members[0].tell, (b"late",))
        late.start()
        found = list[bytes]()
        deadline = time.monotonic() + 10
        while not found and time.monotonic() < deadline:
            found = leader.told(2)
        assert found == [b"late"]
        late.join()


@pytest.mark.parametrize("who", ["leader", "member"])
def test_the_other_end_is_missed_over_tcp(who):
    address = f"tcp://127.0.0.1:{free_port('')}"
    own = msgspec.structs.replace(OWN, size=2)
    leader, member = Leader(address, own, differ, 1, limits=SOON), Member(address, limits=SOON)
    met = threading.Thread(target=leader.wait, args=("there", 20, lives))
    met.start()
    member.greet(msgspec.structs.replace(own, rank=1), 20)
    met.join()
    told, gone = [], threading.Event()

    def lost(why):
        told.append(why)
        gone.set()

    if who == "leader":
        member.watch(lost)
        leader.part()
        said = f"rank 0 on node 0 ({address[6:]}) has left, or cannot be reached any more"
    else:
        leader.watch(lost)
        member.close()
        said = "rank 1 on node 1 (127.0.0.1) has left, or cannot be reached any more"
    assert gone.wait(10) and told == [said]
    (leader.part if who == "member" else member.close)()


def test_the_secret_of_a_file(tmp_path):
    for name, text in (("a", b"word\n"), ("b", b" \n"), ("d", b"word"), ("e", b"\xff\xc3\xa9")):
        (tmp_path / name).write_bytes(text)
    assert secret(None) is None and secret(f"{tmp_path}/a") == secret(f"{tmp_path}/d")
    assert secret(f"{tmp_path}/e") != secret(f"{tmp_path}/a")
    with pytest.raises(ConfigError, match=r"--dist-token-file .*/b: is empty"):
        secret(f"{tmp_path}/b")
    with pytest.raises(ConfigError, match=r"--dist-token-file .*/c: cannot be read"):
        secret(f"{tmp_path}/c")


def test_names_that_mean_this_machine_alone_are_refused(monkeypatch):
    from ds_runtime.parallel.link import end

    monkeypatch.setattr(end, "gethostbyname", {"here": "127.0.1.1", "h": "10.1.2.3"}.get)
    with pytest.raises(ConfigError, match=r"--dist-init-addr here:5: here this name is 127.0.1.1"):
        Leader("tcp://here:5", OWN, differ, 1)
    assert numeric("tcp://h:5") == "tcp://10.1.2.3:5"
    monkeypatch.undo()
    assert numeric("tcp://localhost:5") == "tcp://127.0.0.1:5" and numeric("ipc://x") == "ipc://x"


def test_a_port_that_somebody_has_is_not_free():
    with create_server(("127.0.0.1", 0)) as one:
        assert not is_free("127.0.0.1", one.getsockname()[1])
    assert is_free("127.0.0.1", free_port())
