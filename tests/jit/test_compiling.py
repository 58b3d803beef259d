"""Reports of kernels that are being compiled."""

import threading
from types import SimpleNamespace

import numba
import pytest

from raffia.jit.kernel import compiling, kernel, stamped
from raffia.train.metrics import PhaseClock

# Not with `kernel`, which would find them on disk when the tests run again.
compiled = numba.njit


def noted():
    calls = []
    return calls, compiling(lambda: calls.append("in"), lambda: calls.append("out"))


def test_the_first_call_of_a_kernel_is_reported_once_and_nested_kernels_are_not():
    inner = compiled(lambda a: a + 1)
    outer = compiled(lambda a: inner(a) * 2)
    calls, block = noted()
    with block:
        assert outer(1.5) == 5.0
        assert calls == ["in", "out"]
        assert outer(2.5) == 7.0
    assert calls == ["in", "out"]


def test_nothing_is_reported_outside_of_the_block_or_for_other_threads():
    calls, block = noted()
    with block:
        thread = threading.Thread(target=compiled(lambda a: a - 3), args=(1,))
        thread.start()
        thread.join()
    compiled(lambda a: a - 4)(1)
    assert calls == []


def test_an_error_while_compiling_ends_the_report():
    calls, block = noted()
    with block, pytest.raises(Exception, match="no_such_thing"):
        compiled(lambda a: a.no_such_thing)(1)
    assert calls == ["in", "out"]


def test_compiling_is_timed_as_a_phase():
    clock, phases = PhaseClock(), []

    def enter():
        phases.append(clock.phase("compile"))
        phases[-1].__enter__()

    with compiling(enter, lambda: phases.pop().__exit__(None, None, None)):
        with clock.phase("collect"):
            compiled(lambda a: a / 7)(2.0)
    spent = clock.take()
    assert spent["seconds_compile"] > spent["seconds_collect"] > 0


def test_kernels_say_that_they_cannot_run_uncompiled(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(RuntimeError, match="runs compiled only.*NUMBA_DISABLE_JIT.*unset it"):
        kernel(lambda a: a)(1)


IMPORTED = 1


@compiled
def reader():
    return IMPORTED


def caller():
    return reader()


def test_code_on_disk_is_outdated_if_an_imported_constant_has_changed(monkeypatch):
    stamps = []
    for number in (1, 1, 2):
        monkeypatch.setitem(globals(), "IMPORTED", number)
        index = SimpleNamespace(_source_stamp="of the file")
        stamped(SimpleNamespace(_cache=SimpleNamespace(_cache_file=index)), caller)
        stamps.append(index._source_stamp)
    assert stamps[0] == stamps[1] != stamps[2]
