"""Models that are tables of numbers, for searches whose results are known."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raffia.search import RecurrentOutput, RootOutput, search


@dataclass(frozen=True)
class Table:
    """S states and A actions: the transitions, and the model's outputs.

    The embedding is {"state": [M] int64, "prefix": [M] float32}; the second is the sum of rewards
    since the last reset, for searches over value prefixes.
    """

    next: Tensor  # [S, A] int64
    reward: Tensor  # [S, A] float32
    value: Tensor  # [S] float32
    logits: Tensor  # [S, A] float32
    mask: Tensor | None = None  # [S, A] bool; a row without any: the game is over
    player: Tensor | None = None  # [S] int64
    discount: Tensor | None = None  # [S, A] float32
    labels: Tensor | None = None  # [S, A] int64: the label of choice a; the tables count labels
    prefixed: bool = False

    def root(self, states: Tensor, mask: Tensor | None = None) -> RootOutput:
        """The states as roots; `mask` replaces that of the table."""
        if mask is None and self.mask is not None:
            mask = self.mask[states]
        embedding = {"state": states, "prefix": torch.zeros(len(states))}
        return RootOutput(
            prior_logits=self.logits[states],
            value=self.value[states],
            embedding=embedding,
            mask=mask,
            to_play=_at(self.player, states),
            actions=_at(self.labels, states),
        )

    def __call__(
        self, embedding: dict[str, Tensor], action: Tensor
    ) -> tuple[RecurrentOutput, dict[str, Tensor]]:
        state = embedding["state"]
        after = self.next[state, action]
        reward = self.reward[state, action]
        prefix = embedding["prefix"] + reward
        output = RecurrentOutput(
            reward=prefix if self.prefixed else reward,
            value=self.value[after],
            prior_logits=self.logits[after],
            discount=None if self.discount is None else self.discount[state, action],
            mask=_at(self.mask, after),
            to_play=_at(self.player, after),
            actions=_at(self.labels, after),
        )
        return output, {"state": after, "prefix": prefix}


def _at(rows: Tensor | None, index: Tensor) -> Tensor | None:
    return None if rows is None else rows[index]


def table_of(record: dict[str, Any], *, two_players: bool = False, prefixed: bool = False) -> Table:
    """The table of a recorded case; with two players state s is s for the first and S + s for the
    second, who alternate."""
    after = torch.tensor(record["next"])
    reward = torch.tensor(record["reward"])
    value, logits = torch.tensor(record["value"]), torch.tensor(record["logits"])
    if not two_players:
        return Table(after, reward, value, logits, prefixed=prefixed)
    num = len(after)
    return Table(
        next=torch.cat([after + num, after]),
        reward=reward.repeat(2, 1),
        value=value.repeat(2),
        logits=logits.repeat(2, 1),
        player=torch.arange(2 * num) // num + 1,
        prefixed=prefixed,
    )


def random_table(
    seed: int,
    *,
    states: int = 14,
    actions: int = 3,
    over: float = 0.0,  # fraction of states where the game has ended
    illegal: float = 0.0,  # fraction of illegal actions elsewhere
    players: bool = False,
    discounts: bool = False,
    labels: bool = False,
    prefixed: bool = False,
) -> Table:
    """A random table; its first half of states has legal actions."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw)

    mask = None
    if over or illegal:
        mask = uniform(states, actions) >= illegal
        mask[torch.arange(states), (uniform(states) * actions).long()] = True
        ends = uniform(states) < over
        ends[: states // 2] = False
        mask[ends] = False
    return Table(
        next=(uniform(states, actions) * states).long(),
        reward=torch.randn(states, actions, generator=draw),
        value=torch.randn(states, generator=draw),
        logits=2 * torch.randn(states, actions, generator=draw),
        mask=mask,
        player=(uniform(states) < 0.5).long() + 1 if players else None,
        discount=uniform(states, actions) if discounts else None,
        labels=uniform(states, actions).argsort(-1) if labels else None,
        prefixed=prefixed,
    )


B, A = 4, 3
STATES = torch.arange(B)
BACKENDS = ("reference", "compiled")
GAME = {"players": True, "illegal": 0.4, "over": 0.2, "actions": 4, "discounts": True}


def run(root=None, model=None, **settings):
    """A search of the first table from the first states, or with other arguments."""
    table = random_table(0)
    settings = {"num_simulations": 6} | settings
    root = table.root(STATES) if root is None else root
    return search(root, table if model is None else model, **settings)


def root(**fields) -> RootOutput:
    """The root of that search, with other fields."""
    return random_table(0).root(STATES)._replace(**fields)


def assert_same(one, other) -> None:
    """Two trees are equal, bit for bit."""
    assert set(one.data.keys()) == set(other.data.keys())
    for name in one.data.keys():
        left, right = one.data[name], other.data[name]
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), f"{name}: {(left != right).nonzero()[:5].tolist()}"


def equal(one, other) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True
