import os
import signal
import threading

import pytest

from raffia.train.signals import stop_on_signals
from tests.processes import wait_for


@pytest.fixture(autouse=True)
def restore_handlers():
    before = [signal.getsignal(number) for number in HANDLERS]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run behind nohup
    yield
    for number, handler in zip(HANDLERS, before, strict=True):
        signal.signal(number, handler)


HANDLERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(
    ("number", "second"), [(number, two) for number in HANDLERS for two in HANDLERS[:2]]
)
def test_the_first_signal_requests_a_stop_and_the_second_exits(number, second):
    before = [signal.getsignal(number) for number in HANDLERS]
    with pytest.raises(SystemExit) as raised, stop_on_signals() as stop:
        assert not stop.requested and stop.name == ""
        os.kill(os.getpid(), number)
        assert stop.requested and stop.name == signal.Signals(number).name
        os.kill(os.getpid(), signal.SIGHUP)  # a shell that ends repeats it
        os.kill(os.getpid(), second)
        pytest.fail("the second signal did not exit")
    assert raised.value.code == 128 + second
    assert [signal.getsignal(number) for number in HANDLERS] == before


def test_the_stop_is_announced_even_while_something_is_being_printed():
    lines, lock = [], threading.Lock()

    def announce(line):
        with lock:  # like a terminal's lock, which the interrupted code holds
            lines.append(line)

    with stop_on_signals() as stop:
        stop.announce = announce
        with lock:
            signal.raise_signal(signal.SIGINT)
        wait_for(lambda: lines, 5)
    assert lines == [
        "SIGINT: saving and stopping after this update; a second signal stops immediately, and a "
        "resume then continues from the last checkpoint"
    ]


def test_handlers_are_restored_and_ignored_signals_stay_ignored():
    def mine(number, frame):
        raise AssertionError

    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyError), stop_on_signals() as stop:
        assert signal.getsignal(signal.SIGTERM) is not mine
        signal.raise_signal(signal.SIGINT)
        assert not stop.requested
        raise KeyError
    assert [signal.getsignal(number) for number in HANDLERS[:2]] == [signal.SIG_IGN, mine]


def test_no_handler_is_set_in_another_thread():
    before, observed = signal.getsignal(signal.SIGINT), []

    def work():
        with stop_on_signals() as stop:
            observed.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert observed == [(False, before)]
