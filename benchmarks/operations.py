"""The operations that `benchmarks.tensordict` times, as one table.

The floor of each is the same work by hand on plain dicts with raw torch.
"""

import json
import math
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.operation import BATCH, Aim, Entries, Operation, container, rand
from benchmarks.timing import Call

HALF = Aim(0.5)


def flat(seed: int = 0, batch: int = BATCH) -> Entries:
    """Ten leaves in one node."""
    return {f"k{i}": rand(batch, 3, seed=seed + i) for i in range(10)}


def nested(seed: int = 0, batch: int = BATCH) -> Entries:
    """Twelve leaves in four nodes."""
    x, y, z, u, v, w, p, q, r, s, t, o = (rand(batch, 3, seed=seed + i) for i in range(12))
    return {
        "x": x, "y": y, "z": z,
        "a": {"p": p, "q": q, "r": r},
        "c": {"u": u, "v": v, "s": s, "d": {"w": w, "t": t, "o": o}},
    }  # fmt: skip


def mlp(seed: int = 0) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(rand(*parameter.shape, seed=seed + i))
    return module


def mlps() -> list[nn.Module]:
    return [mlp(seed) for seed in range(8)]


def walk(f: Callable[[Any], Any], tree: Entries) -> Entries:
    """The floor of every leafwise operation: `f` on the leaves of nested dicts."""
    return {k: walk(f, v) if type(v) is dict else f(v) for k, v in tree.items()}


def walk2(f: Callable[..., Any], tree: Entries, other: Entries) -> Entries:
    return {
        k: walk2(f, v, other[k]) if type(v) is dict else f(v, other[k]) for k, v in tree.items()
    }


def merge(f: Callable[[list], Any], trees: list[Entries]) -> Entries:
    """`f` on the list of leaves with the same key."""
    return {
        k: merge(f, [t[k] for t in trees]) if type(v) is dict else f([t[k] for t in trees])
        for k, v in trees[0].items()
    }


def part(f: Callable[[Tensor], tuple], tree: Entries, num_parts: int) -> list[Entries]:
    """Splits every leaf with `f` and makes a tree of each part."""
    parts: list[Entries] = [{} for _ in range(num_parts)]
    for k, v in tree.items():
        pieces = part(f, v, num_parts) if type(v) is dict else f(v)
        for tree_of_part, piece in zip(parts, pieces, strict=True):
            tree_of_part[k] = piece
    return parts


def leaves(tree: Entries, path: tuple[str, ...] = ()) -> list[tuple]:
    """(key, leaf) pairs; the key of a leaf in the root is a string, below it a tuple."""
    found = []
    for k, v in tree.items():
        if type(v) is dict:
            found += leaves(v, (*path, k))
        else:
            found.append(((*path, k) if path else k, v))
    return found


def flatten(tree: Entries, prefix: str = "") -> Entries:
    found: Entries = {}
    for k, v in tree.items():
        if type(v) is dict:
            found.update(flatten(v, f"{prefix}{k}."))
        else:
            found[prefix + k] = v
    return found


def unflatten(tree: Entries) -> Entries:
    root: Entries = {}
    for key, value in tree.items():
        *path, last = key.split(".")
        node = root
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return root


def on(entries: Callable[[], Entries], name: str, bind: Callable, bind_floor: Callable, **marks):
    """An operation on one container: `bind(td)` and `bind_floor(dict)` return the calls."""
    return Operation(
        name,
        make=lambda package: bind(container(package, entries())),
        floor=lambda: bind_floor(entries()),
        **marks,
    )


def leafwise(name: str, bind: Callable, f: Callable[[Tensor], Any], **marks) -> Operation:
    return on(nested, name, bind, lambda tree: lambda: walk(f, tree), **marks)


def on_eight(name: str, act: Callable, floor: Callable, **marks) -> Operation:
    """An operation on a list of eight nested containers."""
    trees = [nested(seed) for seed in range(8)]

    def make(package: ModuleType) -> Call:
        tds = [container(package, tree) for tree in trees]
        return lambda: act(package, tds)

    return Operation(name, make, lambda: lambda: floor(trees), **marks)


def set_item(key: str) -> Callable:
    x = rand(BATCH, 3, seed=50)

    def bind(c: Any) -> Call:  # a container or a dict
        def call() -> Any:
            c[key] = x
            return c

        return call

    return bind


def set_deep_item(td: Any) -> Call:
    x = rand(BATCH, 3, seed=50)

    def call() -> Any:
        td["c", "d", "w"] = x
        return td

    return call


def set_deep(td: Any) -> Call:
    x = rand(BATCH, 3, seed=50)
    return lambda: td.set(("c", "d", "w"), x)


def set_deep_floor(tree: Entries) -> Call:
    x = rand(BATCH, 3, seed=50)

    def call() -> Entries:
        tree["c"]["d"]["w"] = x
        return tree

    return call


def set_in_place(td: Any) -> Call:
    x = rand(BATCH, 3, seed=50)
    return lambda: td.set_("k3", x)


def set_in_place_floor(tree: Entries) -> Call:
    x = rand(BATCH, 3, seed=50)

    def call() -> Entries:
        tree["k3"].copy_(x)
        return tree

    return call


def set_flat(td: Any) -> Call:
    x = rand(BATCH, 3, seed=50)
    return lambda: td.set("k3", x)


def update(package: ModuleType) -> Call:
    td, other = container(package, nested()), container(package, nested(20))
    return lambda: td.update(other)


def update_floor() -> Call:
    def merge_into(tree: Entries, other: Entries) -> Entries:
        for k, v in other.items():
            if type(v) is dict:
                merge_into(tree[k], v)
            else:
                tree[k] = v
        return tree

    tree, other = nested(), nested(20)
    return lambda: merge_into(tree, other)


def set_slice(package: ModuleType) -> Call:
    td, other = container(package, nested()), container(package, nested(20, 8), 8)

    def call() -> Any:
        td[4:12] = other
        return td

    return call


def set_slice_floor() -> Call:
    tree, other = nested(), nested(20, 8)

    def put(x: Tensor, y: Tensor) -> Tensor:
        x[4:12] = y
        return x

    return lambda: walk2(put, tree, other)


def lock_and_unlock(td: Any) -> Call:
    def call() -> Any:
        td.lock_()
        return td.unlock_()

    return call


def lock_and_unlock_floor(tree: Entries) -> Call:
    state = {"locked": False}

    def call() -> Entries:
        state["locked"] = True
        state["locked"] = False
        return tree

    return call


def stack_parameters(parameters: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.stack(parameters).detach())


def from_module(package: ModuleType) -> Call:
    module = mlp()
    return lambda: package.TensorDict.from_module(module)


def from_module_floor() -> Call:
    module = mlp()
    return lambda: dict(module.named_parameters())


def from_modules(package: ModuleType) -> Call:
    modules = mlps()
    return lambda: package.TensorDict.from_modules(*modules)


def from_modules_floor() -> Call:
    modules = mlps()
    return lambda: merge(stack_parameters, [dict(m.named_parameters()) for m in modules])


def to_module(package: ModuleType) -> Call:
    module, params = mlp(), package.TensorDict.from_module(mlp(20))

    def call() -> None:
        with params.to_module(module):
            pass

    return call


def to_module_floor() -> Call:
    module, other = mlp(), mlp(20)
    params = {name: dict(child._parameters) for name, child in other.named_children()}

    def swap(params: Entries) -> Entries:
        old = {}
        for name, child in params.items():
            registered = module._modules[name]._parameters
            old[name] = registered.copy()
            registered.update(child)
        return old

    def call() -> None:
        swap(swap(params))

    return call


def to_module_and_call(package: ModuleType) -> Call:
    module, x = mlp(), rand(BATCH, 4)
    params = package.TensorDict.from_module(mlp(20))

    def call() -> Tensor:
        with params.to_module(module):
            return module(x)

    return call


def to_module_and_call_floor() -> Call:
    module, x, params = mlp(), rand(BATCH, 4), dict(mlp(20).named_parameters())
    return lambda: functional_call(module, params, (x,))


def vmap_modules(package: ModuleType) -> Call:
    module, x, params = mlp(), rand(BATCH, 4), package.TensorDict.from_modules(*mlps())

    def apply(params: Any, x: Tensor) -> Tensor:
        with params.to_module(module):
            return module(x)

    return lambda: torch.vmap(apply, (0, None))(params, x)


def vmap_modules_floor() -> Call:
    module, x = mlp(), rand(BATCH, 4)
    params = merge(stack_parameters, [dict(m.named_parameters()) for m in mlps()])
    return lambda: torch.vmap(lambda p, x: functional_call(module, p, (x,)), (0, None))(params, x)


def tensordict_params(package: ModuleType) -> Call:
    params = package.TensorDict.from_module(mlp())
    return lambda: package.TensorDictParams(params)


def tensordict_params_floor() -> Call:
    params = unflatten(dict(mlp().named_parameters()))

    def call() -> Entries:
        nn.ModuleDict({name: nn.ParameterDict(child) for name, child in params.items()})
        return params

    return call


def memmap(td: Any) -> Call:
    folder = tempfile.TemporaryDirectory()
    return lambda: td.memmap(folder.name)


def save_by_hand(tree: Entries, folder: str) -> Entries:
    """One mapped file per leaf, and one index of their shapes."""
    flat_tree = flatten(tree)
    mapped = {k: map_file(f"{folder}/{k}", x.shape).copy_(x) for k, x in flat_tree.items()}
    Path(folder, "index.json").write_text(json.dumps({k: x.shape for k, x in flat_tree.items()}))
    return unflatten(mapped)


def load_by_hand(folder: str) -> Entries:
    index = json.loads(Path(folder, "index.json").read_text())
    return unflatten({k: map_file(f"{folder}/{k}", shape) for k, shape in index.items()})


def map_file(path: str, shape: list[int]) -> Tensor:
    return torch.from_file(path, shared=True, size=math.prod(shape)).view(shape)


def memmap_floor(tree: Entries) -> Call:
    folder = tempfile.TemporaryDirectory()
    return lambda: save_by_hand(tree, folder.name)


def load_memmap(package: ModuleType) -> Call:
    folder = tempfile.TemporaryDirectory()
    container(package, nested()).memmap(folder.name)
    return lambda: package.TensorDict.load_memmap(folder.name)


def load_memmap_floor() -> Call:
    folder = tempfile.TemporaryDirectory()
    save_by_hand(nested(), folder.name)
    return lambda: load_by_hand(folder.name)


def tensorclass(package: ModuleType) -> Call:
    @package.tensorclass
    class Step:
        obs: Tensor
        reward: Tensor

    obs, reward = rand(BATCH, 3), rand(BATCH)
    return lambda: Step(obs=obs, reward=reward, batch_size=[BATCH]).obs


def tensorclass_floor() -> Call:
    obs, reward = rand(BATCH, 3), rand(BATCH)
    return lambda: {"obs": obs, "reward": reward}["obs"]


def compiled(package: ModuleType) -> Call:
    td = container(package, nested())

    @torch.compile(fullgraph=True)
    def step(td: Any) -> Any:
        hidden = torch.tanh(td["x"] + td["c", "d", "w"])
        return package.TensorDict({"out": {"hidden": hidden}, "y": td["y"]}, td.batch_size)

    return lambda: step(td)


def compiled_floor() -> Call:
    tree = nested()

    @torch.compile(fullgraph=True)
    def step(tree: Entries) -> Entries:
        hidden = torch.tanh(tree["x"] + tree["c"]["d"]["w"])
        return {"out": {"hidden": hidden}, "y": tree["y"]}

    return lambda: step(tree)


def construct(name: str, entries: Entries, copy: Callable, aim: Aim | None = None, **kwargs):
    return Operation(
        name,
        lambda package: lambda: package.TensorDict(entries, **kwargs),
        lambda: lambda: copy(entries),
        aim=aim,
    )


def construct_by_keyword(package: ModuleType) -> Call:
    x, y = rand(3), rand(2)
    return lambda: package.TensorDict(a=x, b=y)


def construct_by_keyword_floor() -> Call:
    x, y = rand(3), rand(2)
    return lambda: {"a": x, "b": y}


INDEX = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
MASK = torch.arange(BATCH) % 2 == 0

OPERATIONS = (
    construct("TensorDict(10 keys, batch_size)", flat(), dict, batch_size=[BATCH]),
    construct(
        "TensorDict(nested, 12 leaves)",
        nested(),
        lambda tree: walk(lambda x: x, tree),
        aim=HALF,
        batch_size=[BATCH],
    ),
    Operation("TensorDict(a=, b=), no batch", construct_by_keyword, construct_by_keyword_floor),
    construct("TensorDict(10 keys, device=cpu)", flat(), dict, batch_size=[BATCH], device="cpu"),
    on(flat, "td[key]", lambda td: lambda: td["k3"], lambda d: lambda: d["k3"]),
    on(flat, "td.get(key)", lambda td: lambda: td.get("k3"), lambda d: lambda: d.get("k3")),
    on(
        nested,
        "td[a, b, c]",
        lambda td: lambda: td["c", "d", "w"],
        lambda d: lambda: d["c"]["d"]["w"],
        aim=HALF,
    ),
    on(
        nested,
        "td.get((a, b, c))",
        lambda td: lambda: td.get(("c", "d", "w")),
        lambda d: lambda: d["c"]["d"]["w"],
        aim=HALF,
    ),
    on(flat, "td[key] = x", set_item("k3"), set_item("k3")),
    on(flat, "td.set(key, x)", set_flat, set_item("k3")),
    on(nested, "td[a, b, c] = x", set_deep_item, set_deep_floor, aim=HALF),
    on(nested, "td.set((a, b, c), x)", set_deep, set_deep_floor, aim=HALF),
    on(flat, "td.set_(key, x)", set_in_place, set_in_place_floor),
    on(
        nested,
        "key in td.keys(True)",
        lambda td: lambda: ("c", "d", "w") in td.keys(True),
        lambda d: lambda: "w" in d["c"]["d"],
    ),
    Operation("td.update(td2), nested", update, update_floor, aim=HALF),
    leafwise("td[3]", lambda td: lambda: td[3], lambda x: x[3]),
    leafwise("td[4:20]", lambda td: lambda: td[4:20], lambda x: x[4:20]),
    leafwise("td[index tensor]", lambda td: lambda: td[INDEX], lambda x: x[INDEX]),
    leafwise("td[bool mask]", lambda td: lambda: td[MASK], lambda x: x[MASK]),
    leafwise("td[..., None]", lambda td: lambda: td[..., None], lambda x: x[:, None]),
    Operation("td[4:12] = td2", set_slice, set_slice_floor),
    on(
        nested,
        "for row in td (32 rows)",
        lambda td: lambda: list(td),
        lambda d: lambda: part(Tensor.unbind, d, BATCH),
    ),
    on_eight(
        "torch.stack(8 tds)",
        lambda package, tds: torch.stack(tds),
        lambda trees: merge(torch.stack, trees),
        aim=HALF,
    ),
    on_eight(
        "torch.cat(8 tds)",
        lambda package, tds: torch.cat(tds),
        lambda trees: merge(torch.cat, trees),
        aim=HALF,
    ),
    on_eight(
        "lazy_stack(8 tds)[key]",
        lambda package, tds: package.lazy_stack(tds)["x"],
        lambda trees: torch.stack([tree["x"] for tree in trees]),
    ),
    on(
        nested,
        "td.split(8)",
        lambda td: lambda: td.split(8),
        lambda d: lambda: part(lambda x: x.split(8), d, BATCH // 8),
    ),
    on(
        nested,
        "td.unbind(0)",
        lambda td: lambda: td.unbind(0),
        lambda d: lambda: part(Tensor.unbind, d, BATCH),
    ),
    leafwise(
        "td.reshape(4, 8)",
        lambda td: lambda: td.reshape(4, 8),
        lambda x: x.reshape(4, 8, -1),
    ),
    leafwise("td.view(4, 8)", lambda td: lambda: td.view(4, 8), lambda x: x.view(4, 8, -1)),
    leafwise("td.unsqueeze(0)", lambda td: lambda: td.unsqueeze(0), lambda x: x.unsqueeze(0)),
    leafwise(
        "td.expand(4, 32)", lambda td: lambda: td.expand(4, 32), lambda x: x.expand(4, *x.shape)
    ),
    leafwise("td.clone()", lambda td: td.clone, Tensor.clone),
    leafwise("td.clone(False)", lambda td: lambda: td.clone(False), lambda x: x, aim=HALF),
    leafwise(
        "td.to(float64)", lambda td: lambda: td.to(torch.float64), lambda x: x.to(torch.float64)
    ),
    leafwise("td.to('cpu')", lambda td: lambda: td.to("cpu"), lambda x: x.to("cpu")),
    leafwise("td.apply(x + 1)", lambda td: lambda: td.apply(lambda x: x + 1), lambda x: x + 1),
    leafwise("td + 1", lambda td: lambda: td + 1, lambda x: x + 1),
    leafwise("td.mean()", lambda td: td.mean, Tensor.mean),
    leafwise("td.detach()", lambda td: td.detach, Tensor.detach),
    leafwise("td.to_dict()", lambda td: td.to_dict, lambda x: x),
    on(
        nested,
        "td.select(3 keys)",
        lambda td: lambda: td.select("x", "y", ("c", "u")),
        lambda d: lambda: {"x": d["x"], "y": d["y"], "c": {"u": d["c"]["u"]}},
    ),
    on(
        flat,
        "td.exclude(2 keys)",
        lambda td: lambda: td.exclude("k2", "k5"),
        lambda d: lambda: {k: v for k, v in d.items() if k not in ("k2", "k5")},
    ),
    on(
        nested,
        "td.flatten_keys('.')",
        lambda td: lambda: td.flatten_keys("."),
        lambda d: lambda: flatten(d),
    ),
    on(
        lambda: flatten(nested()),
        "td.unflatten_keys('.')",
        lambda td: lambda: td.unflatten_keys("."),
        lambda d: lambda: unflatten(d),
    ),
    on(
        nested,
        "list(td.items(True, True))",
        lambda td: lambda: list(td.items(True, True)),
        lambda d: lambda: leaves(d),
    ),
    on(flat, "list(td.keys())", lambda td: lambda: list(td.keys()), lambda d: lambda: list(d)),
    on(nested, "td.lock_(); td.unlock_()", lock_and_unlock, lock_and_unlock_floor, aim=HALF),
    Operation("from_module(MLP)", from_module, from_module_floor),
    Operation("from_modules(8 MLPs)", from_modules, from_modules_floor, aim=HALF),
    Operation("with params.to_module(m)", to_module, to_module_floor, aim=HALF),
    Operation(
        "with params.to_module(m): m(x)",
        to_module_and_call,
        to_module_and_call_floor,
        aim=HALF,
    ),
    Operation("vmap over params of 8 MLPs", vmap_modules, vmap_modules_floor, alone=True),
    Operation("TensorDictParams(params)", tensordict_params, tensordict_params_floor),
    on(
        nested,
        "pickle dumps + loads",
        lambda td: lambda: pickle.loads(pickle.dumps(td)),
        lambda d: lambda: pickle.loads(pickle.dumps(d)),
    ),
    on(nested, "td.memmap(dir)", memmap, memmap_floor),
    Operation("TensorDict.load_memmap(dir)", load_memmap, load_memmap_floor),
    Operation("@tensorclass construct + attribute", tensorclass, tensorclass_floor),
    Operation("torch.compile(f)(td)", compiled, compiled_floor, alone=True),
)
