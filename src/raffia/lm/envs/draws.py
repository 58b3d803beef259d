"""Counter-based random numbers for many rows together: each row has its own stream.

What row i draws depends on its seed and on the purpose of the draw, not on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raffia.functional.seeds import derive_seed

Uint64s = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Draws:
    """A named source of random numbers for each of N rows.

    >>> draws = Draws.for_rows(seed=0, rows=np.arange(3), purpose="games")
    >>> draws.uniform("secret", 2).round(3)
    array([0.434, 0.028, 0.459])
    """

    keys: Uint64s  # [N]

    @classmethod
    def for_rows(cls, seed: int, rows: npt.ArrayLike, purpose: str) -> Draws:
        """Draws for the rows with these numbers.

        >>> few = Draws.for_rows(0, [5, 7], "games").uniform()
        >>> many = Draws.for_rows(0, range(8), "games").uniform()
        >>> few.tolist() == [many[5], many[7]]
        True
        """
        numbers = np.asarray(rows, dtype=np.uint64)
        return cls(_mixed(np.uint64(derive_seed(seed, purpose)) ^ _mixed(numbers)))

    @classmethod
    def for_seeds(cls, seeds: npt.ArrayLike) -> Draws:
        """Draws for rows that have one seed each.

        >>> Draws.for_seeds([3, 4]).keys.shape
        (2,)
        """
        return cls(_mixed(np.asarray(seeds, dtype=np.uint64)))

    def of(self, *parts: int | str) -> Draws:
        """The source of these rows for one purpose.

        >>> draws = Draws.for_seeds([1])
        >>> bool((draws.of("a").uniform() == draws.uniform("a")).all())
        True
        """
        keys = self.keys
        for part in parts:
            keys = _mixed(keys ^ np.uint64(derive_seed(0, part)))
        return Draws(keys)

    def uniform(self, *parts: int | str) -> npt.NDArray[np.float64]:
        """A number in [0, 1) for each row: [N]; the same again for the same parts.

        >>> Draws.for_seeds([1, 2]).uniform("x").shape
        (2,)
        """
        words = _mixed(self.of(*parts).keys ^ np.uint64(0x5851F42D4C957F2D))
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def choose(self, mask: npt.NDArray[np.bool_], *parts: int | str) -> npt.NDArray[np.int64]:
        """One of the marked columns of each row, each as likely as the others.

        mask: [N, V], at least one in each row

        >>> Draws.for_seeds([1, 2]).choose(np.array([[False, True], [True, False]]))
        array([1, 0])
        """
        counts = mask.sum(-1)
        if not counts.all():
            raise ValueError(f"row {int((counts == 0).argmax())} of the mask marks nothing")
        which = np.minimum((self.uniform(*parts) * counts).astype(np.int64), counts - 1)
        marked = mask.ravel().nonzero()[0]  # of all rows, one after the other
        return marked[counts.cumsum() - counts + which] % mask.shape[-1]

    def __getitem__(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Draws:
        """The source of some of the rows.

        >>> Draws.for_seeds([1, 2, 3])[np.array([2])].keys.shape
        (1,)
        """
        return Draws(self.keys[rows])


def _mixed(words: Uint64s | np.uint64) -> Uint64s:
    """The output function of splitmix64 (Steele, Lea & Flood 2014), on each word."""
    state = np.atleast_1d(np.asarray(words, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
