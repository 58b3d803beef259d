"""Damages of files: other bytes, other values of JSON, and something else under their name."""

import copy
import math
import os
import re

JUNK = [
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\x00" * 50,
    b"\xff\xfe\xfd",
    b"null",
    b"[]",
    b"{}",
    b"9" * 5000,
    b"1e999",
    b'"\\ud800"',
    b"-1",
    b"1" + b"0" * 30,
    b"a: &a [*a]\n",
    b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\n",
]
NASTY = [
    *(None, True, False, 0, 1, -1, 2, 3, 4, 7, 2**31, 2**62, 2**63, 2**64, 10**40, 0.5, math.nan),
    *("", ".", "..", "/", "../a", "/etc/passwd", "a\0b", "\ud800", "é" * 300, "x" * 5000, "a", "n"),
    *("float64", "float32", "torch.float32", "qint8", "complex128", "float4_e2m1fn_x2", "meta"),
    *("tests.tensordict.stored.Fixed", "os.system", "cuda", "cpu", "raffia"),
    *("TensorDict", "LazyStackedTensorDict", "NonTensorData", "NonTensorStack", "tensorclass"),
    *([], [0], [2], [-1], [2, 3], [3, 2], [6], [2.0, 3], [True], [None], ["2"], [[2]], [1] * 70),
    *([2**62, 2**62], [0, 2**62], [0, 2**62, 2**62], {}, {"a": 1}, {"class": "TensorDict"}),
    *({"file": "a.memmap"}, {"$tuple": 3}, {"$dict": 3}, {"$tuple": [1]}),
]  # fmt: skip
REPLACEMENTS = ["gone", "pipe", "folder", "file", "link", "loop", "device"]


def damaged(text, draw):
    """The bytes of a file with one thing wrong."""
    at = draw.randrange(len(text) + 1)
    to = min(len(text), at + draw.choice([1, 2, 8, 100]))
    match draw.randrange(8):
        case 0:
            bit = bytearray(text or b"a")
            bit[at % len(bit)] ^= 1 << draw.randrange(8)
            return bytes(bit)
        case 1:
            return text[:at]
        case 2:
            return text[:at] + text[to:]
        case 3:
            return text[:to] + text[at:]
        case 4:
            return draw.choice(JUNK)
        case 5:
            return text[:at] + draw.choice(JUNK) + text[to:]
        case 6:  # a value of JSON or YAML by another one
            return _other_value(text, draw)
        case _:
            return text[:at] + bytes(to - at) + text[to:]


def _other_value(text, draw):
    spans = [m.span() for m in re.finditer(rb"(?<=[:\[,] )[^\s,\]}{\[]+", text[:20_000])]
    if not spans:
        return text[::-1]
    begin, end = draw.choice(spans)
    return text[:begin] + draw.choice([b"0", b"-5", b'"x"', b"[]", b"{}", *JUNK]) + text[end:]


def paths_of(value, path=()):
    """The paths of all values in a JSON document."""
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(item, (*path, key))


def changed(document, rng):
    """A copy with one or two values replaced, removed, renamed or doubled."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2))):
        path = rng.choice([path for path in paths_of(document) if path] or [()])
        if not path:
            return rng.choice(NASTY)
        parent = document
        for part in path[:-1]:
            parent = parent[part]
        key, what = path[-1], rng.random()
        if what < 0.7:
            parent[key] = copy.deepcopy(rng.choice(NASTY))
        elif what < 0.8:
            del parent[key]
        elif isinstance(parent, dict):
            name = rng.choice([name for name in NASTY if isinstance(name, str)])
            parent[name] = copy.deepcopy(parent[key]) if what < 0.9 else parent.pop(key)
        else:
            parent.insert(key, copy.deepcopy(parent[key]))
    return document


def put(kind, path, outside):
    """Puts something else under the name of a file or folder, which is moved outside."""
    path.rename(outside)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_bytes(b"\0" * 3)
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "loop":
        path.symlink_to(path.parent)
    elif kind == "device":
        path.symlink_to("/dev/zero")
