"""The link over TCP: both ends prove a secret, and nothing that crosses helps anybody else."""

from __future__ import annotations

import threading
import time
from socket import SHUT_RDWR, create_connection, create_server

import msgspec
import pytest
from test_link import SOON, Word, differ, free_port, lives, others

from ds_runtime.common import patience
from ds_runtime.errors import ConfigError
from ds_runtime.parallel.link.end import secret
from ds_runtime.parallel.link.leader import Leader
from ds_runtime.parallel.link.member import Member
from ds_runtime.parallel.link.messages import Cause, Hello, Witness, ask_why, report

OWN = Hello(0, 2, '{"plan": "of seven layers"}', "m")
MATE = msgspec.structs.replace(OWN, rank=1)


@pytest.fixture
def keys(tmp_path):
    def of(word):
        (tmp_path / "word").write_bytes(word.encode("utf-8", "surrogateescape"))
        return secret(str(tmp_path / "word"))

    return of


def leading(address, keys):
    leader = Leader(address, OWN, differ, 1, keys)
    told = []

    def wait():
        try:
            leader.wait("there", 20, lives)
            told.append("met")
        except Exception as e:
            told.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    return leader, thread, told


@pytest.mark.parametrize("word", ["word", "é", "\udcff", "w" * 5000])
def test_who_knows_the_secret_meets_whatever_it_is(keys, word):
    address = f"tcp://127.0.0.1:{free_port()}"
    leader, thread, told = leading(address, keys(word))
    with others(address, MATE, keys=keys(word)) as found:
        thread.join()
        leader.send(Word("a"))
        leader.leave()
        leader.close()
    assert told == ["met"] and found[0].found == ["there", "a"]


@pytest.mark.parametrize("ours", ["word"])
@pytest.mark.parametrize("theirs", ["world", "", None])
def test_another_secret_is_refused_and_all_others_wait_on(keys, capsys, ours, theirs):
    if ours == theirs:
        return
    address = f"tcp://127.0.0.1:{free_port()}"
    mine = None if ours is None else keys(ours)
    leader, thread, told = leading(address, mine)
    stranger = Member(address, None if theirs is None else keys(theirs or "x"), SOON)
    with pytest.raises(ConfigError, match=r"^rank 0 at 127\.\S+ has another secret, or something"):
        stranger.greet(MATE, 20)
    stranger.close()
    assert told == [] and thread.is_alive()
    with others(address, MATE, keys=mine) as found:
        thread.join()
        leader.leave()
        leader.close()
    assert told == ["met"] and found[0].found == ["there"]
    if ours and theirs:
        assert capsys.readouterr().err.count("a rank with another secret than rank 0 was") == 1


@pytest.mark.parametrize("call", ["greet", "tell", "fail", "close", "report", "ask_why"])
def test_nobody_waits_in_sending_to_rank_0_with_another_secret(keys, call):
    """ZeroMQ has given the connection up by then, and there will be none."""
    address = f"tcp://127.0.0.1:{free_port()}"
    leader = Leader(address, OWN, differ, 1, keys("word"), SOON)
    stranger, begin = Member(address, limits=SOON), time.monotonic()
    time.sleep(1)
    if call == "greet":
        with pytest.raises(ConfigError, match="has another secret"):
            stranger.greet(MATE, 120)
    elif call == "tell":
        teller = threading.Thread(target=stranger.tell, args=(b"x",), daemon=True)
        teller.start()
        teller.join(20)
        assert not teller.is_alive()
    elif call == "fail":
        assert stranger.fail(1, "x") == "x"
    elif call == "report":
        report(address, None, Cause(Witness.SEEN, 1, "x"), SOON)
    elif call == "ask_why":
        assert ask_why(address, None, SOON) == ""
    stranger.close()
    assert time.monotonic() - begin < 60  # what waits does so for longer, or for ever
    leader.part()


def test_who_listens_there_and_knows_no_secret_learns_and_says_nothing(keys):
    """It has the address of rank 0 while that is down."""
    heard = []
    with create_server(("127.0.0.1", 0)) as impostor:
        address = f"tcp://127.0.0.1:{impostor.getsockname()[1]}"

        def listen():
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\1"
            while not over.is_set():
                one, _ = impostor.accept()
                one.settimeout(0.3)
                with one:
                    try:
                        one.sendall(greeting + bytes(31))
                        while data := one.recv(1 << 16):
                            heard.append(data)
                    except OSError:
                        pass

        thread, over = threading.Thread(target=listen, daemon=True), threading.Event()
        thread.start()
        member = Member(address, keys("word"), SOON)
        with pytest.raises(ConfigError, match=r"rank 0 at 127\.\S+ has another secret, or"):
            member.greet(MATE, 20)
        over.set()
        member.close()
    assert heard and b"seven" not in b"".join(heard)


class Relay:
    """Between a rank and rank 0, with all that each side sent."""

    def __init__(self, port):
        self.port, self.sent, self.made = port, ([], []), []
        self.server = create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        near, _ = self.server.accept()
        far = create_connection(("127.0.0.1", self.port))
        self.made += [near, far]
        for source, target, heard in ((near, far, self.sent[0]), (far, near, self.sent[1])):
            threading.Thread(target=self.pass_on, args=(source, target, heard), daemon=True).start()

    def pass_on(self, source, target, heard):
        try:
            while data := source.recv(1 << 16):
                heard.append(data)
                target.sendall(data)
            target.shutdown(SHUT_RDWR)
        except OSError:
            pass

    def close(self):
        for one in (*self.made, self.server):
            one.close()


def test_what_was_heard_is_not_clear_and_cannot_be_said_again(keys):
    word, port = keys("word"), free_port()
    leader, thread, told = leading(f"tcp://127.0.0.1:{port}", word)
    relay = Relay(port)
    with others(relay.address, MATE, keys=word) as found:
        thread.join()
        leader.send(Word("a prompt"))
        time.sleep(0.2)
        leader.leave()
        leader.close()
    assert told == ["met"] and found[0].found == ["there", "a prompt"]
    relay.close()
    said, answered = (b"".join(one) for one in relay.sent)
    for clear in (b"seven layers", b"there", b"a prompt", word.secret, word.public):
        assert clear not in said + answered
    leader, thread, told = leading(f"tcp://127.0.0.1:{port}", word)
    with create_connection(("127.0.0.1", port)) as again:
        again.settimeout(1)
        got = b""
        try:
            for data in relay.sent[0]:
                again.sendall(data)
                got += again.recv(1 << 16)
        except OSError:
            pass
        assert told == [] and thread.is_alive() and not leader._ranks
    with others(f"tcp://127.0.0.1:{port}", MATE, keys=word):
        thread.join()
        leader.leave()
        leader.close()
    assert told == ["met"]


def test_what_is_waited_for_adds_up_to_less_than_all_of_it():
    failed = patience.NEIGHBOURS + patience.WORD + patience.LINGER + patience.ENDING
    cut_off = patience.SILENCE + patience.SIGN + patience.WORD + patience.LINGER
    for total in (failed, patience.STOPPED + 1 + failed, cut_off, patience.STUCK + patience.ENDING):
        assert total <= patience.WHOLE
