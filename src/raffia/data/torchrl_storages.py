"""Storages by the names and signatures of TorchRL: thin faces of `TensorStorage`, `MemmapStorage`.

Options of TorchRL's that mean something else here are taken at their defaults, and refused else.
"""

import os
from typing import Any

import torch

from raffia.data.memmap_files import HEADER
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.storage import TensorStorage
from raffia.files import TemporaryFolder


class LazyTensorStorage(TensorStorage):
    """`TensorStorage` as TorchRL names it: rows in memory, allocated at the first write.

    max_size: the number of rows.
    device: where the rows are.

    >>> from raffia.data import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = buffer.extend(torch.arange(6))
    >>> len(buffer)
    6
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
    ) -> None:
        refuse_others(ndim=ndim, compilable=compilable, shared_init=shared_init)
        refuse_others(consolidated=consolidated)
        super().__init__(max_size, device=device)


class LazyMemmapStorage(MemmapStorage):
    """`MemmapStorage` as TorchRL names it: rows on disk, allocated at the first write.

    max_size: the number of rows.
    scratch_dir: the folder; None: a temporary one, which is removed with the storage.
    existsok: whether to go on with rows that are there already. False refuses them.

    >>> from raffia.data import LazyMemmapStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyMemmapStorage(100), batch_size=4)
    >>> _ = buffer.extend(torch.arange(6))
    >>> len(buffer)
    6
    """

    def __init__(
        self,
        max_size: int,
        scratch_dir: str | os.PathLike[str] | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        mode: str = "r+",
    ) -> None:
        refuse_others(ndim=ndim, compilable=compilable, shared_init=shared_init)
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"rows on disk are read on the CPU, not on {device}: pass "
                f"ReplayBuffer(device={str(device)!r}), which moves batches there"
            )
        found = scratch_dir is not None and os.path.lexists(os.path.join(scratch_dir, HEADER))
        if found and not existsok and mode == "r+":
            raise FileExistsError(
                f"{scratch_dir} holds a storage already: existsok=True goes on with it"
            )
        if scratch_dir is None:
            self._folder = scratch_dir = TemporaryFolder()  # removed with this
        super().__init__(max_size, scratch_dir, mode=mode)


def refuse_others(**options: Any) -> None:
    """Raise ValueError for options of TorchRL's that are not at their defaults.

    >>> refuse_others(ndim=2)
    Traceback (most recent call last):
    ...
    ValueError: ndim=2 is not offered: items are counted by one dimension. Pass data.reshape(-1)
    """
    why = {
        "ndim": "items are counted by one dimension. Pass data.reshape(-1)",
        "dim_extend": "items are counted by the first dimension. Pass data.transpose(0, dim)",
        "compilable": "buffers are not traced by torch.compile. Compile what is done with batches",
        "consolidated": "each entry has a tensor of its own",
        "shared_init": "one process writes. Others read beside it with MemmapStorage.open(folder, "
        "mode='r')",
        "shared": "one process writes. Others read beside it with MemmapStorage.open(folder, "
        "mode='r')",
        "sync": "priorities are up to date at any time. Leave it out",
        "dtype": "priorities are stored in float64. Leave it out",
    }
    for name, value in options.items():
        if value != {"ndim": 1, "dim_extend": 0, "sync": True}.get(name, False) and (
            name != "dtype" or value is not torch.float32
        ):
            raise ValueError(f"{name}={value!r} is not offered: {why[name]}")
