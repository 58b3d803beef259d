"""Trees written by hand, to test how trees are shown without a search."""

import random

import torch

from raffia import TensorDict
from raffia.search import Tree


def made_tree(edges, num_actions, num_rows=None, prior=None, root_value=0.25, **entries):
    """One root's tree. `edges`: (parent, action, visits, q, reward) of rows 1, 2, ...; discount 1.

    `entries` are further ones of the record, without their batch dimension.
    """
    rows = num_rows or len(edges) + 1
    ints = {name: torch.zeros(rows, dtype=torch.int32) for name in ("visits", "depth", "num_tried")}
    ints |= {name: torch.full((rows,), -1, dtype=torch.int32) for name in ("parent", "action")}
    floats = {name: torch.zeros(rows) for name in ("raw_value", "reward", "discount")}
    record = ints | floats | {"value_sum": torch.zeros(rows, dtype=torch.float64)}
    record["ended"] = torch.zeros(rows, dtype=torch.bool)
    for name, fill in (("children", -1), ("children_visits", 0)):
        record[name] = torch.full((rows, num_actions), fill, dtype=torch.int32)
    record["children_q"] = torch.zeros(rows, num_actions)
    record["prior"] = torch.full((rows, num_actions), 1 / num_actions)
    if prior is not None:
        record["prior"][0] = torch.tensor(prior)
    for row, (parent, action, visits, q, reward) in enumerate(edges, 1):
        for name, number in (("parent", parent), ("action", action), ("visits", visits)):
            record[name][row] = number
        record["depth"][row] = record["depth"][parent] + 1
        record["reward"][row], record["discount"][row] = reward, 1.0
        record["raw_value"][row] = q - reward
        record["value_sum"][row] = visits * (q - reward)
        record["children"][parent, action] = row
        record["children_visits"][parent, action] = visits
        record["children_q"][parent, action] = q
        record["num_tried"][parent] += 1
    total = int(record["children_visits"][0].sum())
    record["visits"][0], record["value_sum"][0] = total, root_value * total
    record["raw_value"][0] = root_value
    record |= {name: torch.as_tensor(entry) for name, entry in entries.items()}
    return Tree(TensorDict(record, batch_size=[rows]).unsqueeze(0).auto_batch_size_(1))


def random_tree(seed, num_rows=30, num_actions=6, shared=0.0):
    """A random tree; about the fraction `shared` of its nodes repeat earlier ones."""
    draw = random.Random(seed)
    edges, free, canonical = [], [(0, a) for a in range(num_actions)], [0]
    for row in range(1, num_rows):
        parent, action = free.pop(draw.randrange(len(free)))
        visits, q = draw.choice([1, 1, 2, 5, 40]), draw.uniform(-2, 2) * draw.choice([1, 50])
        edges.append((parent, action, visits, q, draw.choice([0.0, 0.5])))
        is_shared = draw.random() < shared and len(free) > 1
        canonical.append(draw.choice(canonical) if is_shared else row)
        if not is_shared:
            free += [(row, a) for a in range(num_actions)]
    entries = {"canonical": torch.tensor(canonical, dtype=torch.int32)} if shared else {}
    if draw.random() < 0.5:
        entries["to_play"] = torch.tensor([draw.randrange(2) for _ in range(num_rows)])
    entries["ended"] = torch.tensor([draw.random() < 0.2 for _ in range(num_rows)])
    return made_tree(edges, num_actions, **entries)
