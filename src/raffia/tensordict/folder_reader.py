"""A folder of memory-mapped files that is read: nothing in it is trusted, no link is followed."""

from __future__ import annotations

import math
import os
import re
import stat
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from raffia.files import MissingFileError, shown
from raffia.tensordict import ragged
from raffia.tensordict.memmap import DamagedFileError, map_file, mapped
from raffia.tensordict.node import Node
from raffia.tensordict.record import CPU, META, Reader, Record, read_record, rebuild
from raffia.tensordict.stored_values import share


class FolderReader(Reader):
    nested = True

    def __init__(
        self,
        folder: str,
        device: torch.device | None = None,
        non_blocking: bool = False,
        mode: str | None = None,
        known: ragged.Known | None = None,
    ) -> None:
        super().__init__(f"{folder}/{META}", device, non_blocking)
        self.folder, self.mode = folder, mode
        self.known: ragged.Known = {} if known is None else known  # also in the folders below

    def fail(self, why: str, part: Record | None = None) -> NoReturn:
        raise DamagedFileError(f"{self.folder}/{part['file']}" if part else self.path, why)

    def read(self) -> Node:
        """The container in this folder."""
        record = read_record(self.folder)
        out = rebuild(self, record)
        if record.get("shared") is True and out._is_data():
            self.shared(out, None)
        return out

    def shared(self, node: Any, name: str | None) -> None:
        if self.mode != "r" and (self.device is None or self.device == CPU):
            share(node, self.folder, name)

    def below(self, name: Any) -> tuple[str, os.stat_result]:
        """The path of a file or folder in this one, and what it is; links are not followed."""
        if type(name) is not str or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            self.fail(f"{shown(name)} is not the name of a file in this folder")
        path = f"{self.folder}/{name}"
        try:
            return path, os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(path, "it is missing") from None
        except (OSError, ValueError) as error:
            if isinstance(error, PermissionError):
                raise
            # The text of an OSError holds the path once more, which may be very long.
            why = error.strerror if isinstance(error, OSError) else error
            raise DamagedFileError(path, f"it can't be found: {why}") from None

    def tensor(self, entry: Record) -> Tensor:
        device = self.device or CPU
        if "ragged" in entry:
            values, structure = ragged.read(self, entry)
            return ragged.joined(values, ragged.shared(structure, self.known, device))
        return self.plain(entry, device, self.mode)

    def part(self, part: Record, name: str) -> Tensor:
        """The values of a nested tensor; or, in memory, the positions of its rows in the values."""
        if name == "values":
            return self.tensor(part)
        return ragged.in_memory(self.plain(part, CPU, "r"))

    def plain(self, entry: Record, device: torch.device, mode: str | None) -> Tensor:
        dtype, shape = self.dtype(entry["dtype"]), self.size(entry.get("shape"))
        path, found = self.below(entry.get("file"))
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFileError(path, "it is not a file (links are not followed)")
        nbytes = math.prod(shape) * dtype.itemsize
        if found.st_size != nbytes:
            raise DamagedFileError(
                path,
                f"it holds {found.st_size} bytes, but a {entry['dtype']} tensor of shape {shape} "
                f"needs {nbytes}",
            )
        fake = active_fake_mode() is not None  # then no tensor has values
        if fake or device.type == "meta" or not nbytes:
            out = self.empty(shape, dtype, device)
            return out if fake or device.type != "cpu" else mapped(out, path)
        out = map_file(path, dtype, shape, mode)
        return out if device.type == "cpu" else out.to(device, non_blocking=self.non_blocking)

    def container(self, entry: Record) -> Node:
        if "class" in entry:
            return rebuild(self, entry)
        return self.of(entry.get("folder")).read()

    def of(self, name: Any) -> FolderReader:
        """The reader of a folder within this one."""
        path, found = self.below(name)
        if not stat.S_ISDIR(found.st_mode):
            raise DamagedFileError(path, "it is not a folder (links are not followed)")
        return FolderReader(path, self.device, self.non_blocking, self.mode, self.known)

    def at(self, key: tuple[str, ...]) -> FolderReader:
        """The reader of the container nested under `key`; ValueError if there is none."""
        reader = self
        for name in key:
            record = read_record(reader.folder)
            listed = record.get("entries")
            entry = listed.get(name) if type(listed) is dict else None
            if type(entry) is not dict or "folder" not in entry:
                names = sorted(listed) if type(listed) is dict else []
                raise ValueError(
                    f"subpath: no container was saved under {name!r} in {reader.folder}; its "
                    f"entries are {names}"
                )
            reader = reader.of(entry["folder"])
        return reader
