"""Keys under which a probabilistic module writes log-probabilities, and whether they are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from raffia.nn.base import listed
from raffia.nn.distributions.composite import suffixed
from raffia.nn.modes import composite_lp_aggregate, set_composite_lp_aggregate
from raffia.tensordict.keys import NestedKey, overlap
from raffia.tensordict.node import Container, Node

_SUM = "sample_log_prob"  # where the sum goes while `composite_lp_aggregate()` is on
_AGGREGATE = set_composite_lp_aggregate.setting


def log_prob_key_of(key: NestedKey) -> NestedKey:
    """The key of the log-probability of the value at `key`.

    >>> from raffia.nn.log_prob_keys import log_prob_key_of
    >>> log_prob_key_of("action"), log_prob_key_of(("agent", "action"))
    ('action_log_prob', ('agent', 'action_log_prob'))
    """
    return suffixed(key, "_log_prob")


Result = TypeVar("Result")


class LogProbKeys:
    """The keys of the log-probabilities of `samples`, by the current `composite_lp_aggregate()`.

    asked: the keys that were asked for, None for the usual ones.
    Raises RuntimeError, in the methods, if `composite_lp_aggregate()` changed since.

    >>> from raffia.nn.log_prob_keys import LogProbKeys
    >>> LogProbKeys(["action"], None).keys
    ['action_log_prob']
    """

    def __init__(self, samples: list[NestedKey], asked: list[NestedKey] | None) -> None:
        self.summed, self._set = composite_lp_aggregate(), _AGGREGATE.get()
        usual: list[NestedKey] = (
            [_SUM] if self.summed else [log_prob_key_of(sample) for sample in samples]
        )
        self.keys = usual if asked is None else asked
        self.moves: dict[NestedKey, NestedKey] = {}  # from the key in a composite distribution
        if asked is not None and not self.summed:
            self.moves = dict(zip(usual, asked, strict=False))

    def check_mode(self, name: str) -> None:
        """Raise RuntimeError that mentions `name` if the mode has changed."""
        if _AGGREGATE.get() is self._set:  # spares a look at the environment
            return
        summed = composite_lp_aggregate()
        if summed != self.summed:
            raise RuntimeError(
                f"composite_lp_aggregate is set to `{summed}`, but the class was instantiated "
                f"with `{self.summed}`, which {name} depends on; make the module again, or "
                f"call it within set_composite_lp_aggregate({self.summed})"
            )

    def only(self) -> NestedKey:
        """The key of the log-probability if it is the only one; RuntimeError otherwise."""
        self.check_mode("log_prob_key")
        if len(self.keys) != 1:
            raise RuntimeError(
                "composite_lp_aggregate is set to ``False``, hence log_prob_key can't be accessed "
                "unless there is one and only one element in log_prob_keys, and they are "
                f"{self.keys}; try log_prob_keys"
            )
        return self.keys[0]

    def in_parts(self, ask: Callable[..., Result], *args: object) -> Result:
        """The result of a composite distribution while it does not sum log-probabilities."""
        if not self.summed:
            return ask(*args)
        undo = _AGGREGATE.put(False, not is_compiling())  # for this thread only
        try:
            return ask(*args)
        finally:
            undo()

    def with_keys(self, scores: Any, tensordict: Node) -> Node | Tensor:
        """Several log-probabilities under the keys that were asked for, or their sum.

        Where the sum is asked for, the parts are written into `tensordict`.
        """
        if not self.summed:
            return renamed(scores, self.moves)
        tensordict.update(scores)
        return scores.sum(dim="feature", reduce=True)


def requested_keys(
    keys: Any, key: Any, samples: list[NestedKey], summed: bool
) -> list[NestedKey] | None:
    """The keys that `log_prob_keys=keys` and `log_prob_key=key` ask for; None if both are None.

    Raises RuntimeError if the argument does not fit `summed`, ValueError if they differ.
    """
    if summed:
        if keys is not None:
            raise RuntimeError(
                "composite_lp_aggregate is set to True but log_prob_keys were passed: then the "
                "log-probabilities are summed, so pass the key of the sum as log_prob_key=..."
            )
    elif keys is not None:
        keys = listed(keys, "log_prob_keys")  # a tuple too: its name tells that it holds keys
        if key is not None and keys != [key]:
            raise ValueError(
                f"log_prob_key={key!r} and log_prob_keys={keys!r} name different keys; pass one "
                "of them"
            )
        return keys
    elif key is not None and len(samples) != 1:
        raise RuntimeError(
            "composite_lp_aggregate is set to `False` but a `log_prob_key` was passed: "
            f"each of {samples} has its own log-probability then; pass log_prob_keys="
            f"{[log_prob_key_of(sample) for sample in samples]}"
        )
    return None if key is None else listed([key], "log_prob_key")


def check_distinct(keys: list[NestedKey], samples: list[NestedKey], summed: bool) -> None:
    """Refuse keys that are not one for each sample, or would overwrite one."""
    if samples != ["_"] and not summed and len(keys) != len(samples):
        raise ValueError(
            f"log_prob_keys={keys} must have one key for each sampled key, which are {samples}"
        )
    for key in keys:
        for sample in samples:
            if overlap(key, sample):
                raise ValueError(
                    f"the log-probability at {key!r} would overwrite the sample at {sample!r}, or "
                    f"a part of it; give it another key, such as {log_prob_key_of(sample)!r}"
                )


def renamed(scores: Container, keys: dict[NestedKey, NestedKey]) -> Container:
    """Return a container of log-probabilities with some of them moved to other keys.

    >>> from raffia.nn.log_prob_keys import renamed
    >>> renamed(TensorDict(a_log_prob=torch.zeros(2)), {"a_log_prob": "p"})["p"]
    tensor([0., 0.])
    """
    there = {old: new for old, new in keys.items() if old in scores}
    if not there:
        return scores
    result = scores.exclude(*there)
    for old, new in there.items():
        result.set(new, scores.get(old))
    return result
