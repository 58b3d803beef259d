"""Two small searched trees as readable records; run as a module it renews golden.json."""

import json
import pathlib
from typing import Any

import torch

from raffia.search import PUCT, Tree, ValuePrefix, gumbel_policy, search

from .table import Table

FILE = pathlib.Path(__file__).parent / "golden.json"
RENEW = "PYTHONPATH=src python -m tests.search.golden"


def table(**options: Any) -> Table:
    """Nine states of three actions by whole-number arithmetic, the same everywhere."""
    s, a = torch.arange(9).unsqueeze(-1), torch.arange(3)
    mask = (s * 5 + a * 3) % 4 > 0
    mask[7] = False  # the game has ended
    return Table(
        next=(s * 4 + a * 5 + 1) % 9,
        reward=((s * 7 + a * 3) % 11 - 5) / 8,
        value=((torch.arange(9) * 5) % 7 - 3) / 4,
        logits=((s * 3 + a * 5) % 8) / 4,
        mask=mask,
        **options,
    )


def record(tree: Tree, root: int) -> list[dict[str, Any]]:
    """A root's nodes in the order in which they were made."""
    entries = {name: entry[root] for name, entry in tree.data.items()}
    rows = [0, *(entries["parent"] >= 0).nonzero().flatten().tolist()]

    def rounded(x: torch.Tensor) -> Any:
        numbers = x.tolist()
        return [round(y, 5) for y in numbers] if isinstance(numbers, list) else round(numbers, 5)

    return [
        {
            "node": row,
            "path": tree.path_to(root, row),
            "visits": int(entries["visits"][row]),
            "value": rounded(tree.node_values()[root, row]),
            "reward": rounded(entries["reward"][row]),
            "children": entries["children"][row].tolist(),
            "children_visits": entries["children_visits"][row].tolist(),
            "q": rounded(entries["children_q"][row]),
            "prior": rounded(entries["prior"][row]),
        }
        for row in rows
    ]


def trees(backend: str) -> dict[str, list[dict[str, Any]]]:
    """One EfficientZero tree of one player and one Gumbel tree of two."""
    start = torch.tensor([2, 5])
    one = table(prefixed=True)
    puct = search(
        one.root(start),
        one,
        num_simulations=16,
        discount=0.9,
        value_prefix=ValuePrefix(2, ("prefix",)),
        select=PUCT(first_visit="value", normalize="tree"),
        backend=backend,
    )
    two = table(player=torch.arange(9) % 2 + 1)
    noise = torch.tensor([[0.5, -0.25, 1.0], [0.0, 0.75, -0.5]])
    settings = {"discount": 0.9, "root_gumbel": noise, "backend": backend}
    gumbel = gumbel_policy(two.root(start), two, 12, **settings).tree
    return {"efficientzero": record(puct, 0), "gumbel": record(gumbel, 1)}


def text(found: dict[str, list[dict[str, Any]]]) -> str:
    """JSON with a line for each node."""
    blocks = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, nodes)) + "\n]"
        for name, nodes in found.items()
    ]
    return "{\n" + ",\n".join([f'"renew": {json.dumps(RENEW)}', *blocks]) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(trees("reference")))
