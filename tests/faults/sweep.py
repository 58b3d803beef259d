"""Runs a case repeatedly, with faults at its calls or after losses of power; prints JSON.

    LD_PRELOAD=shim.so python sweep.py CASE SEED SECONDS_OF_FAULTS SECONDS_OF_LOSSES

One process has all modules and compiled kernels; each trial is a fork of it.
"""

import ctypes
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cases  # noqa: E402
import power  # noqa: E402

SHIM = ctypes.CDLL(None)
KILL, EIO, ENOSPC, CUT, CUT_KILL, FULL = range(1, 7)
ACTIONS = {"kill": KILL, "EIO": EIO, "ENOSPC": ENOSPC, "cut": CUT, "cut+kill": CUT_KILL}
ACTIONS |= {"full": FULL}
REFUSED = 3  # exit status: ended by an error that is meant for the user
BROKEN = 9

LEAST = 3  # trials of each kind, however slow the machine is


def forked(work, *arguments):
    """Runs it in a child; returns the exit status, negative for a signal, and the output."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = BROKEN
        try:
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            warnings.simplefilter("ignore")
            status = work(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status or 0)
    os.close(writer)
    text = b""
    while piece := os.read(reader, 1 << 16):
        text += piece
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), text.decode(errors="replace")


def run_case(root, marks, at=-1, action=0, trace=None):
    """Runs the case with a fault; steps it reports as done go to the file `marks`."""
    SHIM.fault_root(os.fsencode(root))
    to = os.open(marks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def mark(text):
        os.write(to, f"{text}\n".encode())
        SHIM.fault_mark(f"{text}".encode())

    if trace is not None:
        SHIM.fault_trace(os.open(trace, os.O_WRONLY | os.O_CREAT))
    SHIM.fault_set(ctypes.c_long(at), action)
    try:
        CASE.run(root, mark)
    except cases.CLEAN as error:
        print(f"{type(error).__name__}: {error}")
        return REFUSED
    if trace is not None:
        print(SHIM.fault_count())
    return 0


def checked(root, marks, finish):
    CASE.check(root, marks, finish)
    return 0


def main(name, seed, of_faults, of_losses):
    global CASE
    CASE = cases.CASES[name]
    draw = random.Random(int(seed))
    with tempfile.TemporaryDirectory() as home:
        CASE.prepare(f"{home}/data")
        os.mkdir(f"{home}/warm")
        CASE.run(f"{home}/warm", lambda text: None)  # so that all is compiled and loaded
        CASE.check(f"{home}/warm", [], True)
        CASE.expected = CASE.outcome(f"{home}/warm")
        os.mkdir(f"{home}/traced")
        status, text = forked(run_case, f"{home}/traced", f"{home}/marks", -1, 0, f"{home}/trace")
        assert status == 0, text
        num_calls = int(text.split()[-1])
        found = {
            "faults": faults(home, draw, num_calls, float(of_faults)),
            "losses": losses(home, draw, num_calls, float(of_losses)),
        }
    print(json.dumps({"num_calls": num_calls, **found}))


def faults(home, draw, num_calls, seconds):
    """Faults at single calls, spread over all of them, as many as there is time for."""
    trials = [(at, name) for at in range(num_calls) for name in ACTIONS]
    draw.shuffle(trials)
    failures, done, ends = [], 0, {}
    until = time.monotonic() + seconds
    for number, (at, name) in enumerate(trials):
        if time.monotonic() > until and done >= LEAST:
            break
        root, marks = f"{home}/{number}", f"{home}/{number}.marks"
        os.mkdir(root)
        status, text = forked(run_case, root, marks, at, ACTIONS[name])
        ends[str(status)] = ends.get(str(status), 0) + 1
        if status not in (0, REFUSED, -9) or "Traceback" in text or "Exception ignored" in text:
            failures.append(f"{name} at call {at}: ended with {status}: {text[-1500:]}")
        with open(marks) as file:
            reported = file.read().split("\n")[:-1]
        status, text = forked(checked, root, reported, True)
        if status:
            failures.append(f"{name} at call {at}, afterwards: {text[-1500:]}")
        shutil.rmtree(root)
        done += 1
    return {"num_trials": done, "ends": ends, "failures": failures}


def losses(home, draw, num_calls, seconds):
    """Losses of power after each of the calls; each possible state is checked once."""
    ops = power.read_trace(f"{home}/trace")
    disk, states, known = power.Disk(f"{home}/traced"), [], set()
    contents = {}  # by digest: most states have most of them in common
    for number, op in enumerate(ops):
        disk.apply(op)
        for model in power.MODELS:
            state = disk.state(model)
            for path, content in state.items():
                if content is not None:
                    digest = hashlib.blake2b(content).digest()
                    state[path] = contents.setdefault(digest, content)
            key = tuple([(path, id(content)) for path, content in state.items()]), len(disk.marks)
            if key not in known:
                known.add(key)
                states.append((number, model, state, [*disk.marks]))
    now = {path: content for path, content in disk.state("all").items()}
    for path, content in now.items():  # with all calls done, the model equals the real folder
        if content is not None:
            with open(f"{home}/traced/{path}", "rb") as file:
                assert file.read() == content, f"the trace lacks something of {path}"
    draw.shuffle(states)
    until = time.monotonic() + seconds
    failures, done, num_finished = [], 0, 0
    for number, (at, model, state, marks) in enumerate(states):
        if time.monotonic() > until and done >= LEAST:
            break
        root = f"{home}/{number}"
        power.lay_out(state, root)
        finish = number % CASE.finish_every == 0
        status, text = forked(checked, root, marks, finish)
        if status:
            failures.append(f"power lost after call {at} ({ops[at].kind}), {model}: {text[-1500:]}")
        shutil.rmtree(root)
        done, num_finished = done + 1, num_finished + finish
    return {
        "num_states": len(states),
        "num_trials": done,
        "num_finished": num_finished,
        "failures": failures,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
