"""`MCTSForest`: rollouts stored step by step, each step once, and the trees that grow of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from raffia.data import map_files
from raffia.data.map import TensorDictMap
from raffia.data.map_values import UnknownRowError
from raffia.data.rows import RowLayout, row_layout
from raffia.data.table import CapacityError
from raffia.data.tree import Growth, Path, StepGraph, Tree, shown, side_by_side
from raffia.files.folder import Folder, load_folder, write_folder
from raffia.hints import check_range
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.functions import is_tensor_collection
from raffia.tensordict.keys import (
    MissingKeyError,
    NestedKey,
    dotted,
    overlap,
    unravel_key_list,
    unravel_key_to_tuple,
)
from raffia.tensordict.tensorclass import is_tensorclass
from raffia.tensordict.tensordict import TensorDict

KIND, VERSION = "raffia.MCTSForest", 1
KEYS = ("observation_keys", "action_keys", "excluded_keys", "reward_keys", "done_keys")
CHUNK = 4096  # how many steps are read in one call to find their observations


class MCTSForest:
    """A graph of all steps ever taken, merged where observation, action and outcome are equal.

    A step is an observation, an action and the next observation; equal ones are stored once and
    counted. So a state that is reached in several ways is one node, and an action with several
    outcomes (a stochastic environment) branches into all of them. `get_tree` gives what is known
    from an observation on. There is no limit unless `max_size` sets one.

    Not safe under threads: let one thread at a time extend it or grow a tree. A tree is a copy of
    what was known when it grew, and is not touched by what comes later.

    observation_keys, action_keys: the entries of the state and of the action.
    excluded_keys: entries of a rollout, and of its "next", that are not stored.
    reward_keys, done_keys: entries that every rollout must have under "next"; None: any.
    max_size: how many steps there may be.

    >>> from raffia.data.forest import MCTSForest
    >>> forest = MCTSForest()
    >>> def rollout(*obs, actions):
    ...     obs = torch.tensor(obs)
    ...     return TensorDict(
    ...         observation=obs[:-1], action=torch.tensor(actions),
    ...         next=TensorDict(observation=obs[1:]), batch_size=[len(actions)],
    ...     )
    >>> forest.extend(rollout(0, 1, 2, actions=[0, 0]))
    >>> forest.extend(rollout(0, 1, 3, actions=[0, 1]))  # the first step is known
    >>> len(forest)
    3
    >>> print(forest.get_tree(TensorDict(observation=torch.tensor(0))).to_string())
    () {'observation': tensor(1)}
    (0,) {'observation': tensor(2)}
    (1,) {'observation': tensor(3)}
    """

    def __init__(
        self,
        *,
        observation_keys: Sequence[NestedKey] = ("observation",),
        action_keys: Sequence[NestedKey] = ("action",),
        excluded_keys: Sequence[NestedKey] = (),
        reward_keys: Sequence[NestedKey] | None = None,
        done_keys: Sequence[NestedKey] | None = None,
        max_size: int | None = None,
    ) -> None:
        self.observation_keys = unravel_key_list(observation_keys)
        self.action_keys = unravel_key_list(action_keys)
        self.excluded_keys = unravel_key_list(excluded_keys)
        self.reward_keys = None if reward_keys is None else unravel_key_list(reward_keys)
        self.done_keys = None if done_keys is None else unravel_key_list(done_keys)
        next_keys = unravel_key_list([("next", key) for key in self.observation_keys])
        step_keys = [*self.observation_keys, *self.action_keys, *next_keys]
        for key in self.excluded_keys:
            needed = [dotted(other) for other in step_keys if overlap(key, other)]
            if needed:
                raise ValueError(
                    f'excluded_keys holds "{dotted(key)}", and steps are identified by {needed}: '
                    "only other entries can be left out"
                )
        self.steps = TensorDictMap(in_keys=step_keys, max_size=max_size)
        self._nodes = TensorDictMap(in_keys=self.observation_keys)
        self._graph = StepGraph()  # of as many steps as it has; `_linked` adds the others

    def __len__(self) -> int:
        """How many distinct steps are stored."""
        return len(self.steps)

    def __bool__(self) -> bool:
        """True, also while it is empty: `forest or other` asks whether there is a forest."""
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} steps between {len(self.nodes)} observations)"

    @property
    def max_size(self) -> int | None:
        """How many steps there may be; None: no limit."""
        return self.steps.max_size

    @property
    def data_map(self) -> TensorDictMap:
        """`steps`, as TorchRL names it."""
        return self.steps

    @property
    def node_map(self) -> TensorDictMap:
        """`nodes`, as TorchRL names it."""
        return self.nodes

    @property
    def nodes(self) -> TensorDictMap:
        """The observations that a step leaves or reaches; `root in forest.nodes` asks for one.

        It is there to be asked, as `steps` is: write through `extend` and `add`.

        >>> from raffia.data.forest import MCTSForest
        >>> forest = MCTSForest()
        >>> forest.add(TensorDict(
        ...     observation=torch.tensor(0), action=torch.tensor(1),
        ...     next=TensorDict(observation=torch.tensor(2)),
        ... ))
        >>> TensorDict(observation=torch.tensor(2)) in forest.nodes
        True
        """
        self._linked()
        return self._nodes

    # -- writing

    @overload
    def extend(self, rollout: TensorCollection, *, return_node: Literal[False] = False) -> None: ...
    @overload
    def extend(self, rollout: TensorCollection, *, return_node: Literal[True]) -> Tree: ...
    @overload
    def extend(self, rollout: TensorCollection, *, return_node: bool) -> Tree | None: ...

    def extend(self, rollout: Any, *, return_node: bool = False) -> Tree | None:
        """Store the steps of a rollout, or of several.

        rollout: container [*batch, T] with the entries of `observation_keys` and `action_keys`,
            and the observations that followed under "next"; other entries are stored with their
            step, with their last values.
        return_node: also give the tree that grows out of the first observation; for a rollout [T].
        Raises CapacityError when full, KeyError for a missing entry, and ValueError or TypeError
        for one that differs from those of the stored steps. Nothing is changed then.
        """
        rollout = _container(rollout)
        _check_batch(rollout, return_node)
        steps = rollout.reshape(-1) if len(rollout.batch_size) > 1 else rollout
        after_keys = [("next", key) for key in (*(self.reward_keys or ()), *(self.done_keys or ()))]
        needed = [*self.steps.in_keys, *unravel_key_list(after_keys)]
        missing = [dotted(key) for key in needed if steps.get(key, None) is None]
        if missing:
            raise MissingKeyError(
                f"the rollout has no {missing}: each step needs an observation, an action and, "
                'under "next", the observation that followed. Set other names with '
                "MCTSForest(observation_keys=[...], action_keys=[...])"
            )
        steps = steps.to(self.steps.device).copy()
        after = steps["next"].copy()
        after.batch_size = steps.batch_size  # a "next" may count more dimensions as its batch
        self._check_layouts(steps, after)
        self._store(steps.set("next", after))
        return self.get_tree(rollout[0]) if return_node else None

    @overload
    def add(self, step: TensorCollection, *, return_node: Literal[False] = False) -> None: ...
    @overload
    def add(self, step: TensorCollection, *, return_node: Literal[True]) -> Tree: ...
    @overload
    def add(self, step: TensorCollection, *, return_node: bool) -> Tree | None: ...

    def add(self, step: Any, *, return_node: bool = False) -> Tree | None:
        """Store one step, a container [] or [*batch]: as `extend`, without a dimension of time.

        >>> from raffia.data.forest import MCTSForest
        >>> forest = MCTSForest()
        >>> forest.add(TensorDict(
        ...     observation=torch.tensor(0), action=torch.tensor(1),
        ...     next=TensorDict(observation=torch.tensor(2)),
        ... ))
        >>> len(forest)
        1
        """
        return self.extend(_container(step).unsqueeze(-1), return_node=return_node)

    def _check_layouts(self, steps: Any, after: Any) -> None:
        """Refuse an outcome that could never be where another step begins."""
        for key, here, there in self._differing(steps, after):
            raise ValueError(
                f'"{dotted(key)}" is {here}, but the entry under "next" is {there}. Rows of '
                "different dtype or shape count as different content, so no step would lead to "
                "another: convert one of them"
            )

    def _differing(
        self, these: Any, those: Any
    ) -> Iterator[tuple[NestedKey, RowLayout, RowLayout]]:
        """The entries of observations that differ in the layout of their rows, and the layouts."""
        asked = self._nodes.query_module
        both = zip(asked.in_keys, asked.entries(these), asked.entries(those), strict=True)
        for key, x, y in both:
            here, there = row_layout(x, 1), row_layout(y, 1)
            if here != there:
                yield key, here, there

    def _store(self, steps: Any) -> None:
        unwanted = [*self.excluded_keys, *[("next", key) for key in self.excluded_keys]]
        value = steps.exclude(*unwanted, *self.steps.in_keys)
        if any(overlap(key, "_count") for key in value.keys(True)):
            raise ValueError(
                'the entry name "_count" is reserved for the forest: rename your entry, or '
                "exclude it"
            )
        value["_count"] = torch.ones(len(steps), dtype=torch.int64, device="cpu")
        self._check_entries(value)
        try:
            self.steps.update(steps, value, merge=last_and_count, accumulate=True)
        except CapacityError as error:
            raise CapacityError(
                f"the new steps do not fit: the forest holds {len(self)}, and max_size is "
                f"{self.steps.max_size}. Nothing was changed. To continue with a larger forest: "
                "larger = MCTSForest(max_size=...), then "
                "larger.load_state_dict(forest.state_dict())"
            ) from error

    def _check_entries(self, value: Any) -> None:
        """Refuse steps that bring other entries than those that are here."""
        structure = self.steps.storage.structure
        if structure is None:
            return
        here = set(structure.paths)
        given = {unravel_key_to_tuple(key) for key in value.keys(True, True)}
        parts = ("it lacks", here - given), ("this one has in addition", given - here)
        mismatches = [f"{how} {sorted(map(dotted, paths))}" for how, paths in parts if paths]
        if mismatches:
            raise ValueError(
                "all rollouts of a forest must have the entries of the first one: "
                f"{', '.join(mismatches)}. Leave out entries that are not always present with "
                "MCTSForest(excluded_keys=[...])"
            )

    def _linked(self) -> StepGraph:
        """The graph of all steps, with those that came since it was asked for last.

        All of it follows from the steps, so that a write is one write, all or nothing.
        """
        if len(self._graph) == len(self):
            return self._graph
        graph, self._graph = self._graph, StepGraph()  # if this is interrupted, it starts over
        for start in range(len(graph), len(self), CHUNK):
            stop = min(start + CHUNK, len(self))
            steps, _ = self.steps.at(torch.arange(start, stop, device="cpu"))
            ends = [td.select(*self.observation_keys) for td in (steps, steps["next"])]
            query = TensorDict.cat(ends)
            # A map holds something for each key.
            known = torch.ones(len(query), dtype=torch.bool, device="cpu")
            self._nodes[query] = TensorDict(known=known, batch_size=len(query))
            nodes = self._nodes.rows(query).tolist()
            graph.extend(nodes[: stop - start], nodes[stop - start :])
        self._graph = graph
        return graph

    # -- trees

    def get_child(self, root: TensorCollection) -> tuple[TensorDict, Tensor]:
        """The steps from an observation, container [n], and how often each was taken, [n].

        >>> from raffia.data.forest import MCTSForest
        >>> forest = MCTSForest()
        >>> forest.add(TensorDict(
        ...     observation=torch.tensor(0), action=torch.tensor(1),
        ...     next=TensorDict(observation=torch.tensor(2)),
        ... ))
        >>> steps, count = forest.get_child(TensorDict(observation=torch.tensor(0)))
        >>> steps["action"], count
        (tensor([1]), tensor([1]))
        """
        node = self._node(root)
        return self._steps_at(self._linked().leaving(node))

    def get_tree(
        self, root: TensorCollection, *, max_depth: int | None = None, compact: bool = True
    ) -> Tree:
        """The tree of all that is known from an observation onwards.

        root: container [] with the entries of `observation_keys`.
        max_depth: how many vertices there may be below each other.
        compact: whether steps without a branch between them are one vertex.
        Raises UnknownRowError if no step ever left or reached the observation.

        What follows a node is there once: where several ways lead to it, the vertices below stand
        below all of them. Where the first of these ways leads back to the root, or to where a
        vertex above ends, the tree ends with a vertex whose `repeats` is true; so a tree of an
        environment with cycles is finite, and `get_tree(vertex.node_data)` continues from there.
        """
        if max_depth is not None:
            check_range("max_depth", max_depth, 0)
        growth = Growth(self._linked(), self._node(root), max_depth=max_depth, compact=compact)
        return self._grown(growth)

    def _grown(self, growth: Growth) -> Tree:
        """The tree of a `growth`, with the steps and observations of its vertices read together."""
        steps, found = self._steps_at(growth.steps)
        counts = found.tolist()
        hashes = self.steps.hashes(_rows(growth.steps)).tolist()
        observations = self._nodes.at(_rows(growth.nodes))[0].unbind(0)
        starts = [0, *itertools.accumulate(growth.lengths)]
        rollouts = iter(steps.split([length for length in growth.lengths if length]))
        held = [next(rollouts) if length else None for length in growth.lengths]
        trees: list[Any] = [None] * len(growth.nodes)
        stacks: dict[int, Tree | None] = {}  # of vertices below; where ways meet, it is the same
        for vertex in growth.ended:
            below, start = growth.below[vertex], starts[vertex]
            if id(below) not in stacks:
                stacks[id(below)] = side_by_side([trees[child] for child in below])
            trees[vertex] = Tree(
                stacks[id(below)],
                rollout=held[vertex],
                node_data=observations[vertex],
                count=counts[start] if held[vertex] is not None else 0,
                hash=hashes[start] if vertex and held[vertex] is not None else None,
                repeats=growth.repeats[vertex],
                action_keys=tuple(self.action_keys),
            )
        trees[0].number()
        return trees[0]

    def _node(self, root: Any) -> int:
        root = _container(root)
        if not len(self):
            raise UnknownRowError("the forest is empty: call forest.extend(rollout) first")
        if root.batch_size.numel() != 1:
            raise ValueError(
                "a tree starts from one observation, but the root has batch_size "
                f"{list(root.batch_size)}: pass rollout[0]"
            )
        query = root.select(*self.observation_keys).to(self._nodes.device)
        row = int(self.nodes.rows(query))
        if row < 0:
            raise UnknownRowError(
                "no step in the forest starts from or leads to this "
                f"observation{self._mismatches(query)}"
            )
        return row

    def _mismatches(self, root: Any) -> str:
        """A note on entries of a root that no stored observation can equal, or nothing."""
        for key, here, there in self._differing(self._nodes.at(_rows([0]))[0], root):
            return (
                f'. Note: "{dotted(key)}" is {here} in the forest, and {there} here. Rows of '
                "different dtype or shape count as different content, so convert it"
            )
        return ""

    def _steps_at(self, rows: list[int]) -> tuple[Any, Tensor]:
        """The steps of these rows as they came in, container [n], and their counts."""
        keys, values = self.steps.at(_rows(rows))
        return values.exclude("_count").update(keys), values["_count"]

    @classmethod
    def valid_paths(cls, tree: Tree) -> Iterator[Path]:
        """All paths to an end of a tree, the shortest first: `tree.valid_paths()`."""
        return tree.valid_paths()

    def to_string(self, root: Any, node_format_fn: Callable[[Tree], str] = shown) -> str:
        """The compact tree from an observation on, as text."""
        return self.get_tree(root).to_string(node_format_fn)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The complete state of the forest, as tensors.

        >>> from raffia.data.forest import MCTSForest
        >>> forest, other = MCTSForest(), MCTSForest()
        >>> forest.add(TensorDict(
        ...     observation=torch.tensor(0), action=torch.tensor(1),
        ...     next=TensorDict(observation=torch.tensor(2)),
        ... ))
        >>> other.load_state_dict(forest.state_dict())
        >>> len(other)
        1
        """
        return {"steps": self.steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`; raises RuntimeError if it belongs to other keys."""
        if "steps" not in state:
            raise RuntimeError(
                f"the state of a forest must have the entry 'steps'; got {sorted(state)}"
            )
        self.steps.load_state_dict(state["steps"])
        # What follows from the steps that were here before is dropped.
        self._nodes = TensorDictMap(in_keys=self.observation_keys)
        self._graph = StepGraph()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the forest into a folder, atomically.

        >>> import tempfile
        >>> from raffia.data.forest import MCTSForest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     MCTSForest(action_keys=["action"]).save(folder + "/forest")
        ...     MCTSForest.load(folder + "/forest").action_keys
        ['action']
        """
        tensors = TensorDict(dict(map_files.tensors_of(self.steps)))
        extras = {name: getattr(self, name) for name in (*KEYS, "max_size")}
        write_folder(folder, KIND, VERSION, {"steps.safetensors": tensors.save}, extras=extras)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> MCTSForest:
        """The forest that `save` wrote.

        Raises DamagedFileError for a file that is not what was written, and ValueError for a folder
        of another kind.
        """
        return load_folder(folder, KIND, VERSION, cls._of_folder)

    @classmethod
    def _of_folder(cls, found: Folder) -> MCTSForest:
        # Older files have no reward_keys and done_keys.
        keys = {name: map_files.as_keys(found.extras.get(name)) for name in KEYS}
        forest = cls(**keys, max_size=found.extras["max_size"])
        tensors = TensorDict.load(found.path("steps.safetensors"))
        map_files.fill(forest.steps, dict(tensors.items()))
        return forest


def last_and_count(values: TensorDict, group: Tensor, num_groups: int) -> TensorDict:
    """The last value of each group with its total count: a `merge` for `TensorDictMap.update`."""
    items = torch.arange(len(group), device=group.device)
    last = torch.zeros(num_groups, dtype=torch.int64, device=group.device)
    merged = values[last.scatter_reduce_(0, group, items, "amax")]
    merged["_count"] = values["_count"].new_zeros(num_groups).index_add_(0, group, values["_count"])
    return merged


def _rows(rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _container(td: Any) -> Any:
    """The container that can be read by key: for a tensorclass, that of its fields."""
    if not is_tensor_collection(td):
        raise TypeError(
            f"steps and observations must be given as a container; got a {type(td).__name__}: "
            "pass TensorDict({'observation': x, ...}, batch_size=...)"
        )
    return td.to_tensordict() if is_tensorclass(td) else td


def _check_batch(rollout: Any, return_node: bool) -> None:
    batch = list(rollout.batch_size)
    if not batch:
        raise ValueError(
            "a rollout must have a dimension of steps; for a single step call add(step)"
        )
    if return_node and len(batch) > 1:
        raise ValueError(
            f"return_node=True needs a single rollout [T]; got {batch}: call get_tree(rollout[i, "
            "0]) for each"
        )
    if return_node and not batch[0]:
        raise ValueError("return_node=True needs a first step, but the rollout has none")
