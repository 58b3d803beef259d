import os
import signal
import threading

import pytest

from raffia.train.signals import stop_on_signals
from tests.processes import wait_for


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = [signal.getsignal(one) for one in HANDLERS]
    yield
    for one, handler in zip(HANDLERS, before, strict=True):
        signal.signal(one, handler)


HANDLERS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize(("number", "second"), [(one, two) for one in HANDLERS for two in HANDLERS])
def test_the_first_signal_asks_and_the_second_leaves(number, second):
    before = [signal.getsignal(one) for one in HANDLERS]
    with pytest.raises(SystemExit) as left, stop_on_signals() as stop:
        assert not stop.requested and stop.name == ""
        os.kill(os.getpid(), number)
        assert stop.requested and stop.name == signal.Signals(number).name
        os.kill(os.getpid(), second)
        pytest.fail("it was to leave")
    assert left.value.code == 128 + second
    assert [signal.getsignal(one) for one in HANDLERS] == before


def test_who_asks_is_told_even_while_something_is_being_printed():
    told, lock = [], threading.Lock()

    def tell(line):
        with lock:  # as a terminal's, which what was interrupted holds
            told.append(line)

    with stop_on_signals() as stop:
        stop.announce = tell
        with lock:
            signal.raise_signal(signal.SIGINT)
        wait_for(lambda: told, 5)
    assert told == [
        "SIGINT: saving and stopping after this update; a second signal stops immediately, and a "
        "resume then continues from the last checkpoint"
    ]


def test_handlers_are_restored_and_what_is_ignored_stays_ignored():
    def mine(number, frame):
        raise AssertionError

    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyError), stop_on_signals() as stop:
        assert signal.getsignal(signal.SIGTERM) is not mine
        signal.raise_signal(signal.SIGINT)
        assert not stop.requested
        raise KeyError
    assert [signal.getsignal(one) for one in HANDLERS] == [signal.SIG_IGN, mine]


def test_in_another_thread_nothing_is_done():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with stop_on_signals() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
