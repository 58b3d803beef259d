"""Episodes in D4RL's layout: an HDF5 file with the steps of all episodes in one array.

Legend: N steps in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raffia.data.readers.episode import (
    FLAGS,
    Column,
    Columns,
    EpisodeMaker,
    Episodes,
    Key,
    Location,
    Names,
    Path,
    Rules,
    existing_file,
    missing,
)
from raffia.data.readers.hdf5 import (
    GroupLocation,
    datasets,
    h5py,
    opened_hdf5,
    read_columns,
    to_tensor,
)

NAMES: Columns = {
    "observations": "obs",
    "next_observations": ("next", "obs"),
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
    "infos": "info",
    "metadata": None,  # of the policy that acted
}


def read_d4rl(
    path: Path, *, columns: Columns | None = None, allow_nan: bool = False
) -> D4RLEpisodes:
    """The episodes of an HDF5 file of D4RL's; needs `pip install 'raffia[hdf5]'`.

    path: the file: observations, actions, rewards, terminals and maybe timeouts,
        next_observations and infos, arrays of N steps. An episode ends with a step that is
        terminal or a timeout, and with the last of the file. Without `timeouts` no step is one.
    columns: name in the file -> name here, besides obs, action, reward, terminated, truncated and
        info; None leaves a column out: {"infos": None}. The group `metadata` is left out.

    Mostly the observation after the last step of an episode is not in the file. Where that step is
    terminal its own observation stands for it, from which nothing is bootstrapped; elsewhere the
    step is left out, and the one before it is truncated.

        for episode in read_d4rl("hopper_medium-v2.hdf5"):
            buffer.extend(episode)

    >>> import os, tempfile, h5py
    >>> folder = tempfile.TemporaryDirectory()
    >>> with h5py.File(f"{folder.name}/data.hdf5", "w") as file:
    ...     for name, values in {"observations": [[0.0], [0.5], [2.0], [2.5]],
    ...                          "actions": [1, 0, 1, 1], "rewards": [0.0, 1.0, 0.0, 0.0],
    ...                          "terminals": [False, True, False, False],
    ...                          "timeouts": [False, False, False, True]}.items():
    ...         file[name] = values
    >>> for episode in read_d4rl(f"{folder.name}/data.hdf5"):
    ...     print(episode["action"].tolist(), episode["next", "obs"].tolist())
    [1, 0] [[0.5], [0.5]]
    [1] [[2.5]]
    >>> folder.cleanup()
    """
    h5py()
    return D4RLEpisodes(existing_file(path), Names(columns, NAMES), Rules(allow_nan, True, True))


class D4RLEpisodes(Episodes):
    """The episodes of a D4RL file, as returned by `read_d4rl`."""

    def __init__(self, path: str, names: Names, rules: Rules) -> None:
        super().__init__(path, rules)
        self._names = names
        self._spans = self._find()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {len(self._spans)} episodes)"

    def _find(self) -> list[slice]:
        """The steps of each episode."""
        location = GroupLocation(self.path, "the file")
        with opened_hdf5(self.path) as file, location.foreign():
            found = dict(datasets(file, self._names, location, (), set()))
            paths = {name: path for path, name in self._names.of_all(found, location).items()}
            if FLAGS[0] not in paths:
                location.fail(missing("terminated", found))
            ends = None
            for flag in FLAGS:
                if flag in paths:
                    column = "/".join(paths[flag])
                    values = to_tensor(found[paths[flag]], column, location).numpy().astype(bool)
                    if values.ndim != 1 or (ends is not None and len(ends) != len(values)):
                        location.fail("it must have one value for each step", column)
                    ends = values if ends is None else ends | values
            assert ends is not None
            for path in paths.values():
                if found[path].shape[:1] != ends.shape:
                    location.fail(
                        f"it has {found[path].shape[:1]} rows, but there are {len(ends)} steps",
                        "/".join(path),
                    )
        if not len(ends):
            location.fail("it has no steps")
        ends[-1] = True
        stops = (np.flatnonzero(ends) + 1).tolist()
        return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[dict[Key, Column], Location]]:
        for span in self._spans:
            where = f"the episode of steps {span.start} to {span.stop - 1}"
            location = GroupLocation(self.path, where)
            with opened_hdf5(self.path) as file:
                columns = read_columns(file, self._names, location, span)
            for flag in FLAGS:  # old files have numbers there
                if flag in columns:
                    columns[flag] = columns[flag]._replace(values=columns[flag].values.bool())
            yield columns, location
