"""`KeyedSearch`: a planner as one keyed module, which reads an observation and writes an action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from raffia.nn.base import TensorDictModuleBase, listed, one_or_more, shown
from raffia.nn.dispatch import Dispatch, set_skip_existing
from raffia.nn.generators import RandomSource
from raffia.search.base import RecurrentFn, RootOutput
from raffia.search.policies import PolicyOutput
from raffia.search.sampled import sampled_policy
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.keys import MissingKeyError, NestedKey, nearest_key, unravel_key
from raffia.tensordict.node import Container, Node
from raffia.tensordict.tensordict import TensorDict

WRITTEN = ("action", "action_weights", "root_value", "prior", "visits")
Policy = Callable[..., PolicyOutput]  # (root, recurrent_fn, **what policy_keys name)


class PlanningModel(Protocol):
    """The model of a planner: outputs for observations, and where actions lead.

    `root` gets the entries of `in_keys` by position, rows first, and `mask=` and `to_play=` by
    keyword where the planner reads them.

    >>> from raffia.search import KeyedSearch, RecurrentOutput, RootOutput, muzero_policy
    >>> class Walk:  # on the whole numbers: the right step pays 1, the left one nothing
    ...     def root(self, observation, mask=None, to_play=None):
    ...         rows = len(observation)
    ...         return RootOutput(torch.zeros(rows, 2), torch.zeros(rows), observation, mask)
    ...     def recurrent_fn(self, embedding, action):
    ...         rows = len(action)
    ...         output = RecurrentOutput(action.float(), torch.zeros(rows), torch.zeros(rows, 2))
    ...         return output, embedding + 2 * action - 1
    >>> def policy(root, recurrent_fn):
    ...     return muzero_policy(root, recurrent_fn, 20, dirichlet_fraction=0.0, temperature=0.0)
    >>> KeyedSearch(Walk(), policy, in_keys=["position"])(position=torch.tensor([3, 5]))[0]
    tensor([1, 1])
    """

    @property
    def root(self) -> Callable[..., RootOutput]:
        """The model's output for observations: root(observation, mask=None, to_play=None)."""

    @property
    def recurrent_fn(self) -> RecurrentFn:
        """The model's output for actions: recurrent_fn(embedding, action)."""


@dataclass(frozen=True)
class FunctionModel:
    """Two functions as the model of a planner.

    >>> from raffia.search import FunctionModel, KeyedSearch, RecurrentOutput, RootOutput
    >>> from raffia.search import gumbel_policy
    >>> def look(observation):
    ...     return RootOutput(torch.zeros(len(observation), 3), observation, observation)
    >>> def go(embedding, action):  # the third of three arms pays 1
    ...     rows = len(action)
    ...     return RecurrentOutput((action == 2).float(), torch.zeros(rows), torch.zeros(rows, 3)
    ...                            ), embedding
    >>> def policy(root, recurrent_fn):
    ...     return gumbel_policy(root, recurrent_fn, num_simulations=16)
    >>> plan = KeyedSearch(FunctionModel(look, go), policy)
    >>> plan(TensorDict(observation=torch.zeros(2, 1), batch_size=[2, 1]))["visits"].shape
    torch.Size([2, 1, 3])
    """

    root: Callable[..., RootOutput]  # (observation, ...) -> RootOutput
    recurrent_fn: RecurrentFn  # (embedding, action) -> (RecurrentOutput, embedding)


class _Rows(Dispatch):
    """A dispatcher that takes the first dimension of all tensors of a call as the batch."""

    def _container(self, given: dict[Any, Any]) -> TensorDict:
        container = super()._container(given)
        container.auto_batch_size_(batch_dims=1)
        return container


class KeyedSearch(TensorDictModuleBase):
    """Plan from the observations of a container, and write what was found.

    Batch dimensions of any number are joined for the search and restored after it. In a call by
    tensors the first dimension of each is the batch. Nothing that is written carries a gradient.

    model: what the observations mean and where actions lead, see `PlanningModel`; two functions
        make one, see `FunctionModel`. An `nn.Module` becomes a part of this module. A folded model
        (`raffia.algorithms.efficientzero.fold`) does not: it is a snapshot without parameters,
        which `.to(...)` and `load_state_dict` leave as it is; `folded.refresh(model)` takes the
        model's present weights over.
    policy: `(root, recurrent_fn) -> PolicyOutput`, for example
        `functools.partial(muzero_policy, num_simulations=50)`.
    in_keys: the entries that `model.root` gets, in order.
    out_keys: where the action taken, the policy's target, the value of the root, its prior as it
        was searched with (noise included) and its visits go; `"_"` drops one.
    mask_key: the entry [*batch, A] bool of legal actions, given to `model.root` as `mask=`; it
        holds also where the root that comes back has none.
    to_play_key: the entry [*batch] int of the player to move, given to `model.root` as `to_play=`;
        it holds also where the root that comes back has none.
    policy_keys: {keyword: key}: further entries [*batch, ...], given to the policy by keyword:
        noise (`dirichlet`, `action_gumbel`, `root_gumbel`, `seed`), so that the same noise gives
        the same result, or what differs between rows (`num_simulations`, `temperature`).
    generator: where the policy's other draws come from: a `torch.Generator`, a seed, or the key of
        an entry with one of these; a seed in an entry is replaced by a fresh one at each call.
        Such an entry must be there, and is not among `in_keys`, as in `raffia.nn`. None: torch's
        own.
    actions_key: where the actions [*batch, A, ...] go that the A choices stand for, with a policy
        that samples them.
    tree_key: where the searched trees go, as `Tree.data`; `Tree(td[key].reshape(-1))` reads them.
    skip_ended: leave rows whose mask is all False (the game has ended) out of the search, the
        model and `policy_keys`; all that is written of them is 0, the action too. Without it such a
        row is an error. Where all rows have ended, nothing is searched and the mask says how many
        actions there are; so that is an error with `sampled_policy`, whose shapes it does not tell.

    >>> import functools
    >>> from raffia.nn import TensorDictModule, TensorDictSequential
    >>> from raffia.search import FunctionModel, KeyedSearch, RecurrentOutput, RootOutput
    >>> from raffia.search import muzero_policy
    >>> def look(observation, mask):
    ...     rows = len(observation)
    ...     return RootOutput(torch.zeros(rows, 3), torch.zeros(rows), observation, mask)
    >>> def go(embedding, action):  # the higher the action the better
    ...     rows = len(action)
    ...     return RecurrentOutput(action.float(), torch.zeros(rows), torch.zeros(rows, 3)
    ...                            ), embedding
    >>> policy = functools.partial(muzero_policy, num_simulations=30, temperature=0.0)
    >>> plan = KeyedSearch(FunctionModel(look, go), policy, mask_key="action_mask", generator=0)
    >>> act = TensorDictSequential(
    ...     TensorDictModule(lambda pixels: pixels / 255, ["pixels"], ["observation"]), plan)
    >>> act.in_keys
    ['pixels', 'action_mask']
    >>> states = TensorDict(pixels=torch.zeros(2, 5, 4), batch_size=[2, 5],
    ...                     action_mask=torch.tensor([True, True, False]).expand(2, 5, 3))
    >>> act(states)["action"].unique(), states["visits"].shape
    (tensor([1]), torch.Size([2, 5, 3]))
    """

    def __init__(
        self,
        model: PlanningModel,
        policy: Policy,
        *,
        in_keys: NestedKey | Sequence[NestedKey] = ("observation",),
        out_keys: Sequence[NestedKey] = WRITTEN,
        mask_key: NestedKey | None = None,
        to_play_key: NestedKey | None = None,
        policy_keys: Mapping[str, NestedKey] | None = None,
        generator: torch.Generator | int | NestedKey | None = None,
        actions_key: NestedKey | None = None,
        tree_key: NestedKey | None = None,
        skip_ended: bool = False,
    ) -> None:
        super().__init__()
        _check_model(model)
        if not callable(policy):
            raise TypeError(
                f"policy is a {type(policy).__name__}; it must be callable as policy(root, "
                "recurrent_fn): pass for example functools.partial(muzero_policy, "
                "num_simulations=50)"
            )
        self.model, self.policy = model, policy
        self._observations = listed(one_or_more(in_keys), "in_keys")
        self._to_root = _named(mask=mask_key, to_play=to_play_key)
        self._to_policy = {name: unravel_key(key) for name, key in (policy_keys or {}).items()}
        self._source = None if generator is None else RandomSource(generator)
        self._found = listed([out_keys] if isinstance(out_keys, str) else [*out_keys], "out_keys")
        if len(self._found) != len(WRITTEN):
            raise ValueError(
                f"out_keys={self._found} has {len(self._found)} keys; it must have one for each "
                f"of {list(WRITTEN)}, in this order, where '_' leaves an output out"
            )
        self._more = _named(actions=actions_key, tree=tree_key)
        read = [*self._observations, *self._to_root.values(), *self._to_policy.values()]
        self.in_keys = list(dict.fromkeys(read))
        self.out_keys = [*self._found, *self._more.values()]
        _check_distinct_keys(self.out_keys)
        if skip_ended and (mask_key is None or tree_key is not None):
            raise ValueError(
                "skip_ended=True needs a mask and cannot write trees, because rows that have "
                "ended have no tree: pass mask_key=..., and no tree_key"
            )
        self._skip_ended = skip_ended

    @_Rows()
    @set_skip_existing(None)
    def forward(self, tensordict: Container) -> Container:
        """Plan from each row, and write what was found into the container."""
        found = self._plan(tensordict)
        batch = tensordict.batch_size
        for key, entry in found.items():
            if key != "_":
                rest = () if isinstance(entry, Node) else entry.shape[1:]
                tensordict.set(key, entry.reshape((*batch, *rest)))
        return tensordict

    @torch.no_grad()
    def _plan(self, tensordict: Any) -> dict[NestedKey, Any]:
        """Results by key, with the batch dimensions flattened into one."""
        rows = tensordict.batch_size.numel()
        if rows == 0:
            raise ValueError(
                f"a batch of size {list(tensordict.batch_size)} has no row to plan from, and the "
                "number of actions is known only from the model's output for a row: do not call "
                "the planner for an empty batch"
            )
        observations = [self._rows(tensordict, key) for key in self._observations]
        root_inputs = {name: self._rows(tensordict, key) for name, key in self._to_root.items()}
        given = {name: self._rows(tensordict, key) for name, key in self._to_policy.items()}
        if not self._skip_ended or bool((active := _active_rows(root_inputs["mask"])).all()):
            return self._searched(tensordict, observations, root_inputs, given)
        rows_left = active.nonzero().flatten().cpu()
        if not len(rows_left):
            return self._nothing(root_inputs["mask"])
        found = self._searched(
            tensordict,
            [entry[rows_left] for entry in observations],
            {name: entry[rows_left] for name, entry in root_inputs.items()},
            {name: entry[rows_left] for name, entry in given.items()},
        )
        return {key: _spread(entry, rows_left, rows) for key, entry in found.items()}

    def _searched(
        self,
        tensordict: Any,  # read for a generator only
        observations: list[Any],
        root_inputs: dict[str, Any],
        given: dict[str, Any],
    ) -> dict[NestedKey, Any]:
        """Results of the search, by the keys under which they are written."""
        root = self.model.root(*observations, **root_inputs)
        _check_root_output(root, len(observations[0]))
        device = root.prior_logits.device
        missing = {
            name: entry.to(device)
            for name, entry in root_inputs.items()
            if getattr(root, name) is None
        }
        root = root._replace(**missing)
        with self._numbers(tensordict, device):
            plan = self.policy(root, self.model.recurrent_fn, **given)
        if not isinstance(plan, PolicyOutput):
            raise TypeError(
                f"the policy returned a {type(plan).__name__}; it must return a PolicyOutput, as "
                "muzero_policy and gumbel_policy do: pass for example "
                "functools.partial(muzero_policy, num_simulations=50)"
            )
        data = plan.tree.data
        found = (
            *(plan.action, plan.action_weights, plan.root_value),
            *(data["prior"][:, 0], plan.tree.visits_of_root()),
        )
        written = dict(zip(self._found, found, strict=True))
        if "actions" in self._more:
            if "actions" not in data.keys():
                raise ValueError(
                    f"actions_key={self._more['actions']!r} is the key of sampled actions, but "
                    "this policy samples none: leave it out, or pass a policy such as "
                    "functools.partial(sampled_policy, sampler=..., policy=...)"
                )
            written[self._more["actions"]] = data["actions"][:, 0]
        if "tree" in self._more:
            written[self._more["tree"]] = data
        return written

    def _nothing(self, mask: Tensor) -> dict[NestedKey, Any]:
        """Results that are written where all rows have ended."""
        if "actions" in self._more or getattr(self.policy, "func", self.policy) is sampled_policy:
            raise ValueError(
                f"all {len(mask)} rows have ended, and the shapes of sampled actions are known "
                "only after a search: do not call the planner when no row of the mask has a legal "
                "action"
            )
        value = torch.zeros(len(mask), device=mask.device)
        visits = torch.zeros_like(mask, dtype=torch.int32)
        found = (value.long(), visits.float(), value, visits.float(), visits)
        return dict(zip(self._found, found, strict=True))

    def _numbers(self, tensordict: Any, device: torch.device) -> AbstractContextManager[None]:
        """A context in which the policy draws its random numbers from the source."""
        if self._source is None:
            return nullcontext()
        origin = self._source.origin
        if not isinstance(origin, int | torch.Generator):
            self._entry(tensordict, origin)
        return self._source.numbers(tensordict, device)

    def _entry(self, tensordict: Any, key: NestedKey) -> Any:
        entry = tensordict.get(key, None)
        if entry is None:
            there = list(tensordict.keys(True))
            raise MissingKeyError(
                f"{type(self).__name__} reads {key!r}, which is not there"
                f"{nearest_key(key, there)}. The entries are {there}"
            )
        return entry

    def _rows(self, tensordict: Any, key: NestedKey) -> Any:
        """An entry with the batch dimensions flattened into one."""
        entry, batch = self._entry(tensordict, key), tensordict.batch_size
        if isinstance(entry, TensorCollection):
            entry = entry.copy()
            entry.batch_size = batch
            return entry.reshape(batch.numel())
        return entry.reshape(batch.numel(), *entry.shape[len(batch) :])

    def __repr__(self) -> str:
        return shown(self, [f"model={self.model!r}", f"policy={self.policy!r}"])


def _named(**keys: NestedKey | None) -> dict[str, NestedKey]:
    return {name: unravel_key(key) for name, key in keys.items() if key is not None}


def _spread(
    entry: Tensor,  # [M, ...]
    rows: Tensor,  # int64 [M]: where they belong
    batch: int,
) -> Tensor:
    """Zeros [batch, ...] with `entry` written to the given rows."""
    whole = entry.new_zeros(batch, *entry.shape[1:])
    whole[rows] = entry
    return whole


def _active_rows(mask: Tensor) -> Tensor:
    """Rows with a legal action, bool [B].

    >>> _active_rows(torch.tensor([[True, False], [False, False]]))
    tensor([ True, False])
    """
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"the mask is {mask.dtype} {list(mask.shape)}, with the batch dimensions flattened; "
            "skip_ended=True needs a bool mask [rows, actions]"
        )
    return mask.any(-1)


def _check_distinct_keys(keys: list[NestedKey]) -> None:
    """Check that no two entries are written to one key.

    >>> _check_distinct_keys(["action", "_", "_"])
    """
    twice = [key for key in dict.fromkeys(keys) if key != "_" and keys.count(key) > 1]
    if twice:
        raise ValueError(
            f"{twice} would be written twice: out_keys, actions_key and tree_key must all differ; "
            "'_' drops an entry"
        )


def _check_root_output(root: Any, rows: int) -> None:
    """Check that a model's `root` gave an answer for each row.

    >>> _check_root_output(RootOutput(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2)), rows=2)
    """
    if not isinstance(root, RootOutput):
        raise TypeError(
            f"model.root returned a {type(root).__name__}; it must return a "
            "RootOutput(prior_logits, value, embedding)"
        )
    if root.prior_logits.shape[:1] != (rows,):
        raise ValueError(
            f"model.root returned prior_logits of shape {list(root.prior_logits.shape)} for "
            f"{rows} rows of observations; the shape must be [{rows}, actions]"
        )


def _check_model(model: Any) -> None:
    """Check that a model can be planned with.

    >>> _check_model(torch.nn.Linear(1, 1))
    Traceback (most recent call last):
        ...
    TypeError: Linear has no root and no recurrent_fn: ...
    """
    if isinstance(model, type):
        raise TypeError(
            f"model is the class {model.__name__}; pass an instance of it: {model.__name__}(...)"
        )
    lacks = [name for name in ("root", "recurrent_fn") if not hasattr(model, name)]
    if lacks and hasattr(model, "initial_inference"):
        raise TypeError(
            f"{type(model).__name__} is a network to train; to plan with it pass a snapshot of "
            "it, fold(model), from raffia.algorithms.efficientzero.inference import fold"
        )
    if lacks:
        raise TypeError(
            f"{type(model).__name__} has no {' and no '.join(lacks)}: a model to plan with needs "
            "root(observation, mask=None, to_play=None) and recurrent_fn(embedding, action); pass "
            "two functions as FunctionModel(root, recurrent_fn)"
        )
