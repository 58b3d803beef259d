"""The contents a disk may have after a loss of power, given the calls made before.

The strict model: data written to a file is on disk after an fsync of the file;
a name is on disk after an fsync of its folder. A new folder's name is in its parent, and is lost
unless that was synced. Everything else may be on disk or not.
"""

import os
import random
import struct
from typing import NamedTuple

HEAD = struct.Struct("<cIIQQ")
MODELS = ("lost", "all", "names only", "zeros", "data only", "some 0", "some 1", "some 2")


class Op(NamedTuple):
    kind: str  # Open, Write, Truncate, Allocate, Sync, Unlink, Make a folder, Rename, mark (L)
    path: str
    data: bytes
    x: int
    y: int


def read_trace(path):
    """All recorded calls."""
    ops = []
    with open(path, "rb") as file:
        text = file.read()
    at = 0
    while at < len(text):
        kind, len_a, len_b, x, y = HEAD.unpack_from(text, at)
        at += HEAD.size
        name, data = text[at : at + len_a].decode(), text[at + len_a : at + len_a + len_b]
        ops.append(Op(kind.decode(), name, data, x, y))
        at += len_a + len_b
    return ops


class File:
    def __init__(self):
        self.now, self.durable, self.pending = bytearray(), b"", []

    def sync(self):
        self.durable, self.pending = bytes(self.now), []


class Folder:
    def __init__(self):
        self.now, self.durable, self.pending = {}, {}, []  # name -> File or Folder

    def do(self, *changes):
        """Changes that happen together: (name, new entry; None: it is removed)."""
        _change(self.now, changes)
        self.pending.append(changes)

    def sync(self):
        self.durable, self.pending = dict(self.now), []


class Disk:
    """Follows the calls; `state` gives the contents after a loss of power."""

    def __init__(self, root):
        self.root, self.top = root, Folder()
        self.opened, self.marks = {}, []

    def _find(self, path):
        found = self.top
        for name in self._names(path):
            found = found.now[name]
        return found

    def _names(self, path):
        inner = os.path.relpath(path, self.root)
        return [] if inner == "." else inner.split("/")

    def _parent(self, path):
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def apply(self, op):
        match op.kind:
            case "O":
                self._open(op)
            case "W":
                self._write(self.opened[op.x], op.y, op.data)
            case "T":
                self._resize(self.opened[op.x], op.x and op.y)
            case "A":
                file = self.opened[op.x]
                self._resize(file, max(len(file.now), op.y))
            case "S":
                self.opened[op.x].sync()
            case "U":
                folder, name = self._parent(op.path)
                folder.do((name, None))
            case "M":
                folder, name = self._parent(op.path)
                folder.do((name, Folder()))
            case "R":
                self._rename(op)
            case "L":
                self.marks.append(op.path)
            case _:
                raise AssertionError(op.kind)

    def _open(self, op):
        if op.path == self.root:
            self.opened[op.x] = self.top
            return
        folder, name = self._parent(op.path)
        if name not in folder.now:
            folder.do((name, File()))
        found = self.opened[op.x] = folder.now[name]
        if op.y & 2 and found.now:
            self._resize(found, 0)

    def _write(self, file, at, data):
        file.pending.append(("write", at, data))
        _write(file.now, at, data)

    def _resize(self, file, size):
        file.pending.append(("size", size, b""))
        _resize(file.now, size)

    def _rename(self, op):
        (source, a), (target, b) = self._parent(op.path), self._parent(op.data.decode())
        moved = source.now[a]
        if source is target:
            source.do((a, None), (b, moved))
        else:  # no file system loses both of them
            target.do((b, moved))
            source.do((a, None))

    def state(self, model):
        """{path: bytes, or None for a folder} after a loss of power now."""
        kind, _, seed = model.partition(" ")
        draw = random.Random(f"{seed} {len(self.marks)}") if kind == "some" else None
        found = {}
        self._collect(self.top, "", model, draw, found, set())
        return found

    def _collect(self, folder, inside, model, draw, found, visited):
        names = dict(folder.durable)
        if draw is not None:
            for changes in folder.pending:
                if draw.random() < 0.5:
                    _change(names, changes)
        elif model in ("all", "names only", "zeros"):
            names = folder.now
        for name, entry in sorted(names.items()):
            if id(entry) in visited:  # both halves of a rename: a file cannot exist twice
                continue
            visited.add(id(entry))
            path = f"{inside}{name}"
            if isinstance(entry, Folder):
                found[path] = None
                self._collect(entry, f"{path}/", model, draw, found, visited)
            else:
                found[path] = _content(entry, model, draw)


def _content(file, model, draw):
    if model in ("all", "data only"):
        return bytes(file.now)
    content = bytearray(file.durable)
    if model == "zeros":
        _resize(content, len(file.now))
    if draw is not None:
        for kind, at, data in file.pending:
            if draw.random() < 0.5:
                if kind == "size":
                    _resize(content, at)
                else:  # of a write a part, at times
                    part = data if draw.random() < 0.5 else data[: draw.randrange(len(data) + 1)]
                    _write(content, at, part)
    return bytes(content)


def _change(names, changes):
    for name, one in changes:
        if one is None:
            names.pop(name, None)
        else:
            names[name] = one


def _write(content, at, data):
    if len(content) < at:
        _resize(content, at)
    content[at : at + len(data)] = data


def _resize(content, size):
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def lay_out(state, root):
    """Make the files of a state."""
    os.makedirs(root)
    for path, content in state.items():
        if content is None:
            os.makedirs(f"{root}/{path}")
        else:
            with open(f"{root}/{path}", "wb") as file:
                file.write(content)
