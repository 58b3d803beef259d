"""Files with changed, missing and repeated bytes are read, or refused with our error; nothing else.

`faulthandler` of pytest shows where a library of another language falls over.
"""

import random
from collections import Counter

import pytest

from raffia.data.readers import MalformedDataError
from tests.data.readers.forms import simple

VALUES = bytes([0, 1, 0x7F, 0x80, 0xFF]) + b'0-9.eE[]{},:"\\ \n'


def damaged(content, rng):
    found = bytearray(content)
    kind = rng.random()
    if kind < 0.1:
        return found[: rng.randrange(len(found))]
    if kind < 0.2:
        at, other, length = rng.randrange(len(found)), rng.randrange(len(found)), rng.randrange(64)
        found[at : at + length] = found[other : other + length]
        return found
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(found))
        random_byte, flipped = rng.randrange(256), found[at] ^ (1 << rng.randrange(8))
        found[at] = rng.choice([random_byte, flipped, rng.choice(VALUES)])
    return found


@pytest.mark.parametrize("times", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(form, tmp_path, times):
    path = form.write(tmp_path, [simple(2), simple(1, seed=1)])
    file = path / "data" / "main_data.hdf5" if path.is_dir() else path
    content, rng = file.read_bytes(), random.Random(7)
    found = Counter()
    for _ in range(times):
        file.write_bytes(damaged(content, rng))
        try:
            for td in form.read(path):
                assert td["obs"].shape[1:] == td["next", "obs"].shape[1:]
            found["read"] += 1
        except MalformedDataError as error:
            assert len(str(error).encode()) < 2000
            found["refused"] += 1
    assert found["refused"] > times / 5 and found.total() == times
