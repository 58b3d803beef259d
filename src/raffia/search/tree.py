"""Tree: what a search has found, as one record of arrays.

Shapes: B roots, N = 1 + the largest number of simulations, A actions. Row 0 of the N is the root,
row i the state that simulation i came upon (unused where it came upon none: `visits` is 0).
"""

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.hints import plural
from raffia.search.graph import TreeGraph, graph_of
from raffia.search.nodes import mean_values
from raffia.search.picture import drawn
from raffia.search.summary import summary
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.tensordict import TensorDict


class Tree:
    """The searched trees of B roots: a TensorDict of arrays, `tree.data`, and questions to it.

    data: batch [B], or of any other rank, whose dimensions are joined in order: [T, B] becomes
        [T * B]. So `Tree(td["tree"])` reads what `KeyedSearch(..., tree_key="tree")` wrote.
    embeddings: the model's embedding of each node, [*batch, N, ...] in any container.

    A loop goes over the roots, each a Tree of one.

    | entry | shape | what |
    |---|---|---|
    | `visits` | [B, N] int32 | how often the node was reached (see below); 0: no such node |
    | `value_sum` | [B, N] float64 | what was backed up, from the view of the node's own player |
    | `raw_value` | [B, N] float32 | the model's value of the state |
    | `reward` | [B, N] float32 | on the edge that leads here, from the parent's player's view |
    | `discount` | [B, N] float32 | on that edge; negative where the player changes |
    | `parent`, `action` | [B, N] int32 | that edge; -1 at the root and where there is no node |
    | `depth` | [B, N] int32 | edges from the root |
    | `ended` | [B, N] bool | no legal action: the game is over here |
    | `children` | [B, N, A] int32 | row of the child, -1 where the action was not yet tried |
    | `children_visits` | [B, N, A] int32 | how often the action was taken |
    | `children_q` | [B, N, A] float32 | reward + discount * value(child); 0 where not visited |
    | `prior` | [B, N, A] float32 | softmax of the model's logits over the legal actions |
    | `num_tried`, `q_sum` | [B, N] int32, float64 | how many actions were tried, sum of their Q |
    | `q_min`, `q_max` | [B] float32 | the range of Q that normalises (inf, -inf: none yet) |

    and where a search uses them: `mask` [B, N, A] bool (legal actions), `prior_logits` [B, N, A]
    float32, `to_play` [B, N] int32, `value_prefix` [B, N] float32, `actions` [B, N, A, ...],
    `key` [B, N] int64 and `canonical` [B, N] int32 (transpositions: the row whose statistics
    count for this one).

    The root's `visits` are its simulations, and one more with `search(..., root_value="include")`
    (the model's own value) or `"zero"`. With transpositions those of a state count all ways that
    lead to it, and may exceed the simulations. `visits_of_root` sums to the simulations.

    >>> from raffia.search import RecurrentOutput, RootOutput, search
    >>> def bandit(embedding, action):  # the second of three arms pays 1
    ...     rows = len(action)
    ...     return RecurrentOutput(reward=(action == 1).float(), value=torch.zeros(rows),
    ...                            prior_logits=torch.zeros(rows, 3)), embedding
    >>> root = RootOutput(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 1))
    >>> tree = search(root, bandit, num_simulations=16, discount=0.5)
    >>> tree.batch_size, tree.num_actions, tree.num_simulations
    (torch.Size([2]), 3, 16)
    >>> tree.visits_of_root()[0].argmax()
    tensor(1)
    >>> tree[:1].data["children"].shape
    torch.Size([1, 17, 3])
    """

    def __init__(self, data: TensorDict, embeddings: Any = None) -> None:
        batch = data.batch_size
        if len(batch) != 1:
            data = data.reshape(batch.numel())
            embeddings = _mapped(
                embeddings,
                lambda leaf: leaf.reshape(batch.numel(), *leaf.shape[len(batch) :]),
            )
        self.data = data
        self.embeddings = embeddings

    @property
    def batch_size(self) -> torch.Size:
        """The number of roots, [B]."""
        return self.data.batch_size

    @property
    def num_actions(self) -> int:
        """The number of actions, A."""
        return int(self.data["children"].shape[-1])

    @property
    def num_simulations(self) -> int:
        """The largest number of simulations of a root: N - 1."""
        return int(self.data["visits"].shape[-1]) - 1

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> "Tree":
        """The trees of some roots: slices, masks and lists of them; one number keeps its batch."""
        number = _whole_number(index)
        if number is not None:
            first = number + len(self) if number < 0 else number
            if not 0 <= first < len(self):
                raise IndexError(
                    f"root {number} is out of range: this tree has {plural(len(self), 'root')}"
                )
            index = slice(first, first + 1)
        return Tree(self.data[index], _mapped(self.embeddings, lambda leaf: leaf[index]))

    def __iter__(self) -> Iterator["Tree"]:
        return (self[root] for root in range(len(self)))

    def __repr__(self) -> str:
        deepest = f", deepest node {int(self.data['depth'].max())}" if len(self) else ""
        return (
            f"Tree({plural(len(self), 'root')}, {plural(self.num_simulations, 'simulation')}, "
            f"{plural(self.num_actions, 'action')}{deepest})"
        )

    def to(self, device: torch.device | str | int) -> "Tree":
        """The tree on another device.

        >>> Tree(TensorDict(visits=torch.ones(1, 2), batch_size=[1])).to("cpu").data["visits"]
        tensor([[1., 1.]])
        """
        return Tree(self.data.to(device), _mapped(self.embeddings, lambda leaf: leaf.to(device)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trees and their embeddings to disk, where `Tree.load` finds them.

        path: one file if it ends in `.safetensors`, else a folder, both as `TensorDict.save` has
            it: complete or not there, never a pickle.

        Raises TypeError for embeddings that are neither a tensor nor a TensorDict.

        >>> import tempfile
        >>> record = TensorDict(visits=torch.tensor([[3, 2, 1]]), batch_size=[1])
        >>> tree = Tree(record, embeddings=torch.zeros(1, 3, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tree.save(f"{folder}/tree.safetensors")
        ...     Tree.load(f"{folder}/tree.safetensors").embeddings.shape
        torch.Size([1, 3, 8])
        """
        record = TensorDict(tree=self.data, batch_size=self.batch_size)
        if self.embeddings is not None:
            if not isinstance(self.embeddings, (Tensor, TensorCollection)):
                raise TypeError(
                    f"the embeddings are a {type(self.embeddings).__name__}, but only a tensor or "
                    "a TensorDict can be saved with the tree. To save without embeddings: "
                    "tree.data.save(path); to load: Tree(TensorDict.load(path))"
                )
            record["embeddings"] = self.embeddings
        record.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tree":
        """Read what `save` wrote, on the CPU; a folder's arrays are mapped into memory.

        Raises FileNotFoundError if there is nothing, DamagedFileError if it is not as it was saved.

        >>> import tempfile
        >>> tree = Tree(TensorDict(visits=torch.tensor([[3, 2, 1]]), batch_size=[1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tree.save(folder)
        ...     Tree.load(folder).data["visits"].tolist()
        [[3, 2, 1]]
        """
        record = TensorDict.load(path)
        data: Any = record.get("tree", None)
        is_tree = isinstance(data, TensorCollection)
        if not is_tree:
            raise ValueError(
                f"{os.fspath(path)!r} was not written by Tree.save; to load what "
                "tree.data.save(path) wrote: Tree(TensorDict.load(path))"
            )
        return cls(data, record.get("embeddings", None))

    def node_values(self) -> Tensor:
        """Mean of the backed-up values [B, N] float32; the model's value before the first one."""
        return mean_values(*[self.data[name] for name in ("visits", "value_sum", "raw_value")])

    def value(self) -> Tensor:
        """Value of the roots [B] float32; the model's own value counts as `search(root_value=)`
        set."""
        return self.node_values()[:, 0]

    def visits_of_root(self) -> Tensor:
        """Visits of each action at the root [B, A] int32; they sum to the simulations."""
        return self.data["children_visits"][:, 0]

    def qvalues(self) -> Tensor:
        """Q of the root's actions [B, A] float32; 0 where an action was not tried."""
        return self.data["children_q"][:, 0]

    def path_to(self, root: int, node: int) -> list[int]:
        """The actions that lead from a root to one of its nodes.

        >>> record = TensorDict(parent=torch.tensor([[-1, 0, 1]]),
        ...                     action=torch.tensor([[-1, 2, 5]]), batch_size=[1])
        >>> Tree(record).path_to(0, 2)
        [2, 5]
        """
        actions: list[int] = []
        while (parent := int(self.data["parent"][root, node])) >= 0:
            actions.append(int(self.data["action"][root, node]))
            node = parent
        return actions[::-1]

    def best_path(self, root: int = 0) -> list[int]:
        """The most visited actions from the root down, the lowest number among equals."""
        return [edge.action for edge in self.to_graph(root).best_path]

    def summary(
        self,
        root: int = 0,
        *,
        max_nodes: int = 24,
        action_names: Sequence[str] | None = None,  # [A]
    ) -> str:
        """A root's tree as text: visits, Q, prior and reward of its most visited part.

        A node is listed below its parent, the most visited first. `share` is that of the parent's
        visits; Q and reward are from the view of the parent's player.

        >>> from raffia.search import RecurrentOutput, RootOutput, search
        >>> def model(embedding, action):  # every action pays 1
        ...     one = torch.ones(len(action))
        ...     return RecurrentOutput(one, one, torch.zeros(len(action), 2)), embedding
        >>> start = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
        >>> tree = search(start, model, num_simulations=3, discount=0.5)
        >>> print(tree.summary(action_names=["left", "right"]))
        root 0: value +1.58, 3 simulations, depth 2, 4 nodes
        best path: left · left
        action      visits  share      Q  prior  reward  raw value
        root             3                                   +0.00
        ├─ left          2    67%  +1.62    50%   +1.00      +1.00
        │  ├─ left       1   100%  +1.50    50%   +1.00      +1.00
        │  └─ … 1 not tried, prior 50%
        └─ right         1    33%  +1.50    50%   +1.00      +1.00
        """
        return summary(self.to_graph(root, action_names=action_names), max_nodes)

    def to_graph(self, root: int = 0, *, action_names: Sequence[str] | None = None) -> TreeGraph:
        """A root's tree as data: nodes and edges.

        >>> from raffia.search import RecurrentOutput, RootOutput, search
        >>> def model(embedding, action):  # every action pays 1
        ...     one = torch.ones(len(action))
        ...     return RecurrentOutput(one, one, torch.zeros(len(action), 2)), embedding
        >>> start = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
        >>> tree = search(start, model, num_simulations=3, discount=0.5)
        >>> graph = tree.to_graph(action_names=["left", "right"])
        >>> graph.edges[0].name, graph.edges[0].q
        ('left', 1.625)
        """
        root = operator.index(root)
        if not 0 <= root < len(self):
            there = f", so root must be in 0..{len(self) - 1}" if len(self) else ""
            raise IndexError(f"root={root}: this tree has {plural(len(self), 'root')}{there}")
        if action_names is not None and len(action_names) != self.num_actions:
            raise ValueError(
                f"action_names has {len(action_names)} names, but the tree has {self.num_actions} "
                "actions; pass one name for each, in the order of the actions' numbers"
            )
        one = Tree(self.data[root : root + 1]).to("cpu")
        lists = {name: entry[0].tolist() for name, entry in one.data.items()}
        return graph_of(root, lists | {"value": one.node_values()[0].tolist()}, action_names)

    def to_svg(
        self,
        root: int = 0,
        *,
        max_nodes: int = 40,
        action_names: Sequence[str] | None = None,  # [A]
    ) -> str:
        """A picture of the most visited part of a root's tree, as the text of an SVG file.

        Edges are as wide as they were often taken and coloured by Q: blue the best, orange the
        worst. Light, or dark for readers who prefer that; the mouse shows the other figures.

        >>> from raffia.search import RecurrentOutput, RootOutput, search
        >>> def model(embedding, action):  # every action pays 1
        ...     one = torch.ones(len(action))
        ...     return RecurrentOutput(one, one, torch.zeros(len(action), 2)), embedding
        >>> start = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
        >>> tree = search(start, model, num_simulations=3, discount=0.5)
        >>> tree.to_svg().startswith("<svg xmlns=")
        True
        """
        return drawn(self.to_graph(root, action_names=action_names), max_nodes).svg()

    def save_picture(
        self,
        path: str | os.PathLike[str],  # ends in .svg or .png
        *,
        root: int = 0,
        max_nodes: int = 40,
        action_names: Sequence[str] | None = None,  # [A]
    ) -> None:
        """Write the picture of `to_svg` into a file, as SVG, or as PNG with matplotlib.

        >>> from raffia.search import RecurrentOutput, RootOutput, search
        >>> def model(embedding, action):  # every action pays 1
        ...     one = torch.ones(len(action))
        ...     return RecurrentOutput(one, one, torch.zeros(len(action), 2)), embedding
        >>> start = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
        >>> tree = search(start, model, num_simulations=3, discount=0.5)
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tree.save_picture(os.path.join(folder, "tree.svg"))
        ...     os.listdir(folder)
        ['tree.svg']
        """
        drawn(self.to_graph(root, action_names=action_names), max_nodes).save(path)


def _whole_number(index: Any) -> int | None:
    """An index that stands for one root as an int: Python's, numpy's, a tensor of no dimension."""
    if getattr(index, "ndim", 0):  # a list of one root or a mask of one element
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None


def _mapped(embeddings: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A container of embeddings with each of its tensors changed."""
    if embeddings is None:
        return None
    return torch.utils._pytree.tree_map(change, embeddings)
