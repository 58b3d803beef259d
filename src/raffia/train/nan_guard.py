"""The guard against NaN and infinity: the run stops before they reach the parameters.

Each update is checked by its metrics, which are few: a number that is not finite in a batch, in the
parameters or in the gradients shows in the loss or in the norm of the gradients. Only then is
looked for where it came from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from raffia.files import dump_json, write_atomically
from raffia.learner import step_of
from raffia.tensordict.safetensors_file import save_file
from raffia.tensordict.tensordict import TensorDict

SMALL = 1 << 14  # numbers of an entry: below, joining entries is quicker than asking each
PIECE = 1 << 20  # numbers that are looked at together
SHOWN = 8  # rows of an entry, and entries in the text of the error


@dataclass(frozen=True)
class NonFiniteEntry:
    """An entry that has numbers which are not finite.

    >>> str(NonFiniteEntry("batch", "observation", num=2, of=10, rows=(3, 4), value="nan"))
    'batch observation: nan in rows 3, 4 (2 of 10 numbers)'
    """

    where: str  # "batch", "state", "metrics", "update" or "search"
    key: str  # with dots
    num: int  # how many of them
    of: int  # numbers in the entry
    rows: tuple[int, ...]  # the first ones of dimension 0; () if it has none
    value: str  # the first of them: "nan", "inf" or "-inf"

    def __str__(self) -> str:
        rows = f" in rows {', '.join(map(str, self.rows))}" if self.rows else ""
        count = f" ({self.num} of {self.of} numbers)" if self.of > 1 else ""
        return f"{self.where} {self.key}: {self.value}{rows}{count}"


class NonFiniteError(FloatingPointError):
    """A run was stopped by NaN or infinity: `found` lists where they are, `path` where to look.

    >>> loss = NonFiniteEntry("metrics", "loss", 1, 1, (), "nan")
    >>> raise NonFiniteError(12, [loss], "run/nan_dump/12")
    Traceback (most recent call last):
    ...
    raffia.train.nan_guard.NonFiniteError: update 12 is not finite: metrics loss: nan. ...
    """

    def __init__(
        self, update: int, found: list[NonFiniteEntry], path: str, trouble: str = "", why: str = ""
    ) -> None:
        listed = "; ".join([*filter(None, [why]), *map(str, found[:SHOWN])])
        more = f"; and {len(found) - SHOWN} more entries" if len(found) > SHOWN else ""
        look = trouble or f"The batch and a report are in {path}"
        super().__init__(
            f"update {update} is not finite: {listed}{more}. {look}. Nothing of this update was "
            "saved; earlier checkpoints are unchanged"
        )
        self.update, self.found, self.path = update, found, path


def non_finite(where: str, values: TensorDict) -> list[NonFiniteEntry]:
    """The entries of a container that have NaN or infinity.

    >>> bad = TensorDict(a=torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), b=torch.ones(3))
    >>> [str(finding) for finding in non_finite("batch", bad)]
    ['batch a: nan in rows 1 (1 of 4 numbers)']
    """
    found = []
    for key, value in values.items(True, True):
        if not _has_fractions(value):
            continue
        bad = ~value.detach().isfinite()
        if bool(bad.any()):
            name = key if isinstance(key, str) else ".".join(key)
            rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
            first = rows.nonzero()[:SHOWN, 0].tolist() if bad.dim() else []
            example = str(value.detach()[bad][0].item())
            num = int(bad.sum())
            found.append(NonFiniteEntry(where, name, num, value.numel(), tuple(first), example))
    return found


class NaNGuard:
    """Stops a run at an update that is not finite.

    folder: gets a folder for the update, with `batch.safetensors` and `report.json`.
    seeds: the seeds of the run, for the report.

    Called between `Learner.grads` and `Learner.apply`. On a GPU this waits for the update.

    >>> import tempfile
    >>> state, update = TensorDict(step=torch.tensor(11)), TensorDict()
    >>> batch = TensorDict(observation=torch.tensor([0.5, float("inf")]), batch_size=[2])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     guard = NaNGuard(folder, seed=3)
    ...     guard(state, batch, update, TensorDict(loss=torch.tensor(1.0)))
    ...     try:
    ...         guard(state, batch, update, TensorDict(loss=torch.tensor(float("nan"))))
    ...     except NonFiniteError as error:
    ...         print([str(finding) for finding in error.found], sorted(os.listdir(error.path)))
    ['batch observation: inf in rows 1 (1 of 2 numbers)', 'metrics loss: nan'] ['batch.safetensors',
    'report.json']
    """

    def __init__(self, folder: str | os.PathLike[str], **seeds: int) -> None:
        self.folder = os.path.abspath(folder)
        self.seeds = seeds

    def __call__(
        self, state: TensorDict, batch: TensorDict, update: TensorDict, metrics: TensorDict
    ) -> None:
        """Raise NonFiniteError unless all metrics are finite; of a population one member's do."""
        if all_finite(metrics) or state.batch_size and _any_finite(metrics, len(state)):
            return
        found = [
            *non_finite("batch", batch),
            *non_finite("state", state),
            *non_finite("metrics", metrics),
            *non_finite("update", update),
        ]
        self._stop(step_of(state) + 1, found, batch, metrics)

    def check(self, values: TensorDict, *, update: int) -> None:
        """Raise NonFiniteError unless all values are finite, such as outputs of environments.


        >>> NaNGuard("nowhere").check(TensorDict(observation=torch.ones(2)), update=7)
        """
        if not all_finite(values):
            self._stop(update, non_finite("batch", values), values, TensorDict())

    def check_state(self, state: TensorDict) -> None:
        """Raise NonFiniteError unless a state is finite: it is not to be saved.

        >>> NaNGuard("nowhere").check_state(TensorDict(step=torch.tensor(7), weight=torch.ones(2)))
        """
        members = state.unbind(0) if state.batch_size else (state,)
        if not any(map(all_finite, members)):
            found = non_finite("state", state)
            self._stop(step_of(state), found, state, TensorDict())

    def searched(self, state: TensorDict, inputs: TensorDict, why: str) -> NoReturn:
        """Raise NonFiniteError: a search met NaN or infinity, as `why` reports, in a search of
        `inputs`.

        >>> import tempfile
        >>> state, inputs = TensorDict(step=torch.tensor(7)), TensorDict(observation=torch.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     NaNGuard(folder).searched(state, inputs, "root.value is NaN")
        Traceback (most recent call last):
        ...
        raffia.train.nan_guard.NonFiniteError: update 8 is not finite: root.value is NaN. ...
        """
        found = [*non_finite("batch", inputs), *non_finite("state", state)]
        self._stop(step_of(state) + 1, found, inputs, TensorDict(), why)

    def _stop(
        self,
        update: int,
        found: list[NonFiniteEntry],
        batch: TensorDict,
        metrics: TensorDict,
        why: str = "",
    ) -> NoReturn:
        path, trouble = f"{self.folder}/{update:09d}", ""
        report = {
            "update": update,
            "seeds": self.seeds,
            "found": [asdict(finding) for finding in found],
            "search": why,
            "metrics": _plain(metrics),
            "torch": torch.__version__,
        }
        try:
            save_file(batch, f"{path}/batch.safetensors")
            write_atomically(f"{path}/report.json", dump_json(report))
        except OSError as error:  # it must not hide what stopped the run
            trouble = f"The batch could not be saved in {path}: {error.strerror or error}"
        raise NonFiniteError(update, found, path, trouble, why)


def all_finite(values: TensorDict) -> bool:
    """Whether no number in a container is NaN or infinite; it waits for the device once.

    Of small entries, which are many, all are looked at together; of large ones, piece by piece, so
    that of the largest state there is never a copy.

    >>> all_finite(TensorDict(loss=torch.tensor(1.0), n=TensorDict(priority=torch.ones(4))))
    True
    """
    leaves = [leaf.detach() for leaf in values.values(True, True) if _has_fractions(leaf)]
    small = [leaf.reshape(-1) for leaf in leaves if leaf.numel() <= SMALL]
    found = [torch.cat(small).isfinite().all()] if small else []
    for leaf in leaves:
        if leaf.numel() > SMALL:
            found += [piece.isfinite().all() for piece in _pieces(leaf)]
    return bool(torch.stack([one.to(found[0].device) for one in found]).all()) if found else True


def _pieces(leaf: Tensor) -> Iterator[Tensor]:
    """A large entry in parts, without a copy if its memory is contiguous."""
    if leaf.is_contiguous():
        yield from leaf.view(-1).split(PIECE)
    elif leaf[0].numel() > PIECE:
        for part in leaf.unbind(0):
            yield from _pieces(part)
    else:
        yield from leaf.split(max(1, PIECE // max(1, leaf[0].numel())))


def _any_finite(metrics: TensorDict, size: int) -> bool:
    """Whether all metrics of at least one of the members are finite."""
    scalars = [x for key, x in metrics.items() if key != "priority" and x.shape == (size,)]
    return bool(torch.stack([x.isfinite() for x in scalars]).all(0).any()) if scalars else False


def _has_fractions(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _plain(metrics: TensorDict) -> Mapping[str, Any]:
    """Single numbers as JSON has them; others as text."""
    single = {
        name: value.item()
        for name, value in metrics.items(True, True)
        if isinstance(value, Tensor) and value.numel() == 1
    }
    return {
        name if isinstance(name, str) else ".".join(name): value
        if abs(value) < float("inf")
        else str(value)
        for name, value in single.items()
    }
