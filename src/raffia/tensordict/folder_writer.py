"""A container on its way into a folder of memory-mapped files: names, paths, and what is written.

All is checked, and every file has its name, before anything is written; the record of the outermost
folder is removed first and written last, so that no half of a save can be loaded.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from raffia.files import DamagedFileError, dump_json, open_plain, write_atomically
from raffia.tensordict import kinds, ragged
from raffia.tensordict.memmap import (
    SMALL,
    MemoryMappedTensor,
    Path,
    allocate,
    allocate_together,
    is_whole,
    refuse_copy,
)
from raffia.tensordict.node import Node
from raffia.tensordict.record import (
    ASIDE,
    CPU,
    META,
    RESERVED,
    Outline,
    Record,
    folder_version,
    outline,
    titled,
)
from raffia.tensordict.stored_values import Home, share

SAFE = re.compile(r"[^A-Za-z0-9_.+=,@~()\[\]{}#!$&^-]")


def file_name(name: str, suffix: str, used: set[str], robust: bool, key: tuple[str, ...]) -> str:
    """A file name for an entry, which no other has, also where upper and lower case are the same.

    >>> file_name("a/b", ".memmap", set(), True, ()), file_name("..", "", set(), True, ())
    ('a%2Fb.memmap', '%2E.')
    """
    if not robust:
        stem = name
        plain = name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)
        if not plain or (stem + suffix).lower() in used:
            raise ValueError(
                f"entry {'.'.join(key)!r} cannot be used unchanged as a file name; leave out "
                "robust_key=False"
            )
    else:
        stem = SAFE.sub(lambda m: quoted(m.group()), name) or "%"
        if stem[0] == ".":
            stem = "%2E" + stem[1:]
        if len(stem) > 180:
            stem = stem[:120] + "%" + hashlib.sha256(quoted(name).encode()).hexdigest()[:40]
        if (stem + suffix).lower() in used:
            n = 2
            while f"{stem}~{n}{suffix}".lower() in used:
                n += 1
            stem = f"{stem}~{n}"
    used.add((stem + suffix).lower())
    return stem + suffix


def namer(name: str, used: set[str], robust: bool, key: tuple[str, ...]) -> Callable[[str], str]:
    """A function that returns the file name of an entry for each suffix."""
    return lambda suffix: file_name(name, suffix, used, robust, (*key, name))


def quoted(text: str) -> str:
    return "".join([f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass")])


class Job:
    """One container on its way into a folder, or into temporary files if there is no folder."""

    def __init__(
        self,
        td: Any,
        prefix: Path | None,
        copy_existing: bool,
        existsok: bool,
        robust_key: bool | None,
        share_non_tensor: bool,
        like: bool = False,
        inplace: bool = False,
    ) -> None:
        self.td, self.copy_existing, self.existsok = td, copy_existing, existsok
        self.shares = share_non_tensor
        self.robust, self.like, self.inplace = robust_key is not False, like, inplace
        self.root = outline(td, (), like, nested=True)
        self.folders: list[str] = []
        self.metas: list[tuple[str, bytes]] = []  # by folder; the outermost one comes last
        self.leaves: list[tuple[Outline, str, Tensor, str | None]] = []
        self.structures: list[tuple[str, Tensor]] = []  # of nested tensors: file, content
        self.known: ragged.Known = {}
        self.lay_out(self.root, None if prefix is None else os.path.abspath(prefix))
        if not like:
            self.detach_sources()
        for plan in self.root.walk() if inplace else ():
            if isinstance(plan.node, nn.Module):
                raise RuntimeError(
                    f"Cannot build a memmap TensorDict in-place: {'.'.join(plan.key)!r} holds "
                    "parameters, but a mapped tensor cannot be a parameter. Use memmap or "
                    "memmap_like instead."
                )

    def detach_sources(self) -> None:
        """Copy each tensor backed by a file that is about to be written for another tensor."""
        sources: list[Any] = [
            leaf.untyped_storage().filename if leaf.device.type == "cpu" else None
            for _, _, leaf, _ in self.leaves
        ]
        if not any(sources):
            return
        targets = {os.path.realpath(file) for *_, file in self.leaves if file is not None}
        for i, (plan, name, leaf, file) in enumerate(self.leaves):
            if sources[i] and os.path.realpath(sources[i]) in targets and not in_place(leaf, file):
                self.leaves[i] = plan, name, leaf.detach().clone(), file

    def lay_out(self, plan: Outline, folder: str | None) -> None:
        """Assign a file to each leaf and a folder to each container; nothing is written yet."""
        plan.folder = folder
        used = {*RESERVED}
        listed: Record = {}
        for name, entry in plan.entries.items():
            record: Record = {}
            path = None
            leaf = not isinstance(entry, Outline)
            if folder is not None and (leaf or not entry.is_value):
                suffix = ".memmap" if leaf else ""
                file = file_name(name, suffix, used, self.robust, (*plan.key, name))
                record["file" if leaf else "folder"] = file
                path = f"{folder}/{file}"
            if not leaf and path is not None and is_link(path):
                raise linked(path)
            if leaf:
                nested = entry.is_nested
                if nested:
                    entry, structure = ragged.parted(entry, self.like)
                    plan.structures[name] = ragged.shared(structure, self.known)
                record |= ragged.described(entry)
                self.check(entry, path)
                if nested and folder is not None:
                    record = self.place_structure(plan, name, record, used)
                self.leaves.append((plan, name, entry, path))
            elif entry.is_value:
                record, entry.folder = entry.record, folder
                self.mark_shared(record)
            else:
                self.lay_out(entry, path)
            listed[name] = record
        if plan.is_value:
            self.mark_shared(plan.record)
        else:
            plan.record["entries"] = listed
        if folder is not None:
            plan.record["device"] = "cpu"
            self.folders.insert(0, folder)
            version = folder_version(plan.record)
            self.metas.append((folder, dump_json(titled(plan.record, version))))

    def mark_shared(self, record: Record) -> None:
        if self.shares:
            record["shared"] = True

    def place_structure(self, plan: Outline, name: str, record: Record, used: set[str]) -> Record:
        """Assign files to the parts of a nested tensor other than its values; return its record."""
        structure = plan.structures[name]
        record = ragged.record(structure, record, namer(name, used, self.robust, plan.key))
        for path, content in structure.files(plan.folder, record):
            self.check(content, path)
            if self.like:
                ragged.check_same(content, path)
            self.structures.append((path, content))
        return record

    def check(self, leaf: Tensor, file: str | None) -> None:
        if file is None:
            return
        if isinstance(leaf, MemoryMappedTensor) and not self.like and not is_whole(leaf, file):
            refuse_copy(leaf, self.copy_existing)
        if (self.existsok and not self.like) or not os.path.lexists(file):
            return
        if not self.existsok:
            raise RuntimeError(
                f"The file {file} already exists. To write over it, pass existsok=True"
            )
        length, nbytes = os.lstat(file).st_size, leaf.numel() * leaf.dtype.itemsize
        if length != nbytes:
            raise RuntimeError(
                f"The file {file} already exists and has {length} bytes, but the tensor needs "
                f"{nbytes}: remove it, or save to another folder"
            )

    def write(self, threads: ThreadPoolExecutor | None) -> None:
        """Write the files, the record of the outermost folder last: without it there is no save."""
        for folder in self.folders:
            make_own_folder(folder, folder == self.root.folder)
        for folder, _ in reversed(self.metas):  # from here to the end, nothing can be loaded
            with suppress(FileNotFoundError):
                os.replace(f"{folder}/{META}", f"{folder}/{ASIDE}")
        targets = self.together() if self.root.folder is None else [None] * len(self.leaves)
        if threads is None:
            for leaf, target in zip(self.leaves, targets, strict=True):
                self.store(leaf, target)
        else:
            for _ in threads.map(self.store, self.leaves, targets):
                pass
        ragged.write(self.structures)
        for folder, text in self.metas:
            put_record(folder, text)

    def together(self) -> list[MemoryMappedTensor | None]:
        """A part of one temporary file for each small tensor; the others get separate files."""
        targets: list[MemoryMappedTensor | None] = [None] * len(self.leaves)
        small = [
            i
            for i, (plan, name, leaf, _) in enumerate(self.leaves)
            if name not in plan.structures  # which fills a separate memory
            and 0 < leaf.numel() * leaf.dtype.itemsize <= SMALL
            and (self.like or not in_place(leaf, None))
        ]
        if small:
            found = allocate_together([self.leaves[i][2] for i in small])
            for i, target in zip(small, found, strict=True):
                targets[i] = target
        return targets

    def store(
        self,
        job: tuple[Outline, str, Tensor, str | None],
        target: MemoryMappedTensor | None,
    ) -> None:
        plan, name, leaf, file = job
        if not self.like and in_place(leaf, file):
            plan.mapped[name] = leaf
            return
        out = allocate(file, leaf.shape, leaf.dtype, True) if target is None else target
        if not self.like:
            out.copy_(leaf.detach())
        plan.mapped[name] = out

    def finish(self) -> Node:
        """The container over the files, locked."""
        if self.inplace:
            forget(self.td)
            self.td._set_device(CPU)
        td = self.assemble(self.root)
        td = self.td if self.inplace else td
        td.lock_()
        for plan in self.root.walk():
            mark(plan.result, plan.folder)
            if plan.is_value:
                self.find_home(plan)
        return td

    def find_home(self, plan: Outline) -> None:
        """Tie a value to its file on disk."""
        name = plan.key[-1] if plan.key else None
        if self.shares:
            share(plan.result, plan.folder, name)
        elif plan.folder is not None:
            Home(plan.folder, name, False).give_to(plan.result)

    def assemble(self, plan: Outline) -> Node:
        """The container of this outline, with mapped leaves."""
        node = plan.node
        for name, structure in plan.structures.items():
            plan.mapped[name] = ragged.joined(plan.mapped[name], structure)
        entries = {
            name: self.assemble(entry) if isinstance(entry, Outline) else plan.mapped[name]
            for name, entry in plan.entries.items()
        }
        if self.inplace:
            for store in node._stores() if plan.mapped else ():
                store.update(plan.mapped)
        elif plan.is_value:
            node = node._shallow()
            node._set_device(CPU)
        else:
            node = restored(node, entries)
        plan.result = node
        return node if plan.wrap is None else plan.wrap._wrap(node)


def restored(node: Any, entries: dict[str, Any]) -> Node:
    """A container like `node` over other entries, on the CPU."""
    if isinstance(node, kinds.LazyStackedTensorDict):
        return node._of_members(list(entries.values()))
    names = None if node._names is None else list(node._names)
    return node._plain._make(entries, node._batch_size, CPU, names)


def mark(node: Any, folder: str | None) -> None:
    """Note in a container, locked from then on, where its tensors are; None: in temporary files."""
    node._mapped_to = pathlib.Path(folder) if folder else ""


def forget(td: Any) -> None:
    """Drop what locked containers remember of their entries: in `td`, below and above it."""
    below = [td]
    for node in below:
        below += node._children()
    above = [td]
    for node in above:
        above += [ref() for ref in node._parents or () if ref() is not None]
    for node in (*below, *above[1:]):
        if node._cache:
            node._cache.clear()
        if node._buffer is not None:  # of a consolidated container
            node._buffer = None


def in_place(leaf: Tensor, file: str | None) -> bool:
    """Whether nothing is to be written: the file holds just this tensor, or none is asked for."""
    if not isinstance(leaf, MemoryMappedTensor):
        return False
    return file is None or (is_whole(leaf, file) and not is_link(file))


def make_own_folder(folder: str, outermost: bool) -> None:
    """Make a folder if it does not exist; below the outermost one, a link to another is refused."""
    if outermost:
        os.makedirs(folder, exist_ok=True)
        return
    try:
        os.mkdir(folder)
    except FileExistsError:
        if is_link(folder):
            raise linked(folder) from None
        if not os.path.isdir(folder):
            raise


def put_record(folder: str, text: bytes) -> None:
    """Write the record of a folder, or put back the one set aside if it is the same.

    To make a file costs some file systems a hundred times of what it takes to rename one.
    """
    path, aside = f"{folder}/{META}", f"{folder}/{ASIDE}"
    with suppress(FileNotFoundError, DamagedFileError):
        with open_plain(aside) as file:
            is_same = file.read() == text
        if is_same:
            os.replace(aside, path)
            return
    write_atomically(path, text, is_synced=False, follows_links=False)
    with suppress(FileNotFoundError):
        os.unlink(aside)


def is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def linked(path: str) -> RuntimeError:
    return RuntimeError(
        f"{path} is a symbolic link, and links are not written through: remove it, or save to "
        "another folder"
    )
