"""How each public method of a container is called in `benchmarks.methods`, and which are left out.

A method without a rule here is called without arguments, and a property is read; so a method that
is added to the container is timed, or reported as failed, but never silently missing.
"""

import copy
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROWS, WIDTH, LEAVES_PER_NODE, CHILDREN = 4, 3, 6, 3
SIZES = (12, 60, 300)  # leaves
KINDS = {"TensorDict": "dense", "LazyStackedTensorDict": "lazy"}

Rule = Callable[[Any, "Inputs"], Any]


class Point(NamedTuple):
    a: Tensor
    b: Tensor


def tree(num_leaves: int, rows: tuple[int, ...], start: float = 0.0) -> dict[str, Any]:
    """Nested dicts: six leaves to a level, and up to three levels below each."""
    num_nodes = -(-num_leaves // LEAVES_PER_NODE)
    nodes: list[dict[str, Any]] = [{} for _ in range(num_nodes)]
    for leaf in range(num_leaves):
        value = (torch.arange(WIDTH) + leaf + 1.0 + start) / (num_leaves + WIDTH + start + 1)
        nodes[leaf // LEAVES_PER_NODE][f"l{leaf % LEAVES_PER_NODE}"] = (
            value.expand(*rows, WIDTH) * 1
        )
    for at in range(1, num_nodes):
        nodes[(at - 1) // CHILDREN][f"n{(at - 1) % CHILDREN}"] = nodes[at]
    return nodes[0]


class Inputs:
    """Arguments of the calls, from one package: containers of one kind and size, and values.

    All are created at their first use, so that a row pays only for its own.
    """

    def __init__(self, package: ModuleType, kind: str, num_leaves: int) -> None:
        self.package, self.kind, self.num_leaves = package, kind, num_leaves
        self.leaf = torch.ones(ROWS, WIDTH)
        self.mask = torch.tensor([True, False, True, True])
        self.at = torch.tensor([2, 0, 3])
        self.deep = ("n0", "l1")
        self.names = [f"l{i}" for i in range(1, 5)]

    def __getattr__(self, name: str) -> Any:
        if name not in MADE:
            raise AttributeError(name)
        value = MADE[name](self)
        setattr(self, name, value)
        return value

    def close(self) -> None:
        """Remove what was written to disk."""
        if "temporary" in self.__dict__:
            self.temporary.cleanup()

    def create(self, start: float = 0.0) -> Any:
        """A new container of this kind, with its own memory."""
        container = self.package.TensorDict
        if self.kind == "TensorDict":
            return container(tree(self.num_leaves, (ROWS,), start), batch_size=[ROWS])
        rows = [container(tree(self.num_leaves, (), start + i / 7), []) for i in range(ROWS)]
        return self.package.lazy_stack(rows)


def layer() -> nn.Linear:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, 0.5)
    nn.init.constant_(made.bias, 0.5)
    return made


def columns(x: Inputs) -> Any:
    entries = {f"c{i}": torch.ones(ROWS) for i in range(x.num_leaves)}
    return x.package.TensorDict(entries, batch_size=[ROWS])


def saved(x: Inputs) -> Path:
    x.td.memmap(x.folder / "saved")
    return x.folder / "saved"


MADE: dict[str, Callable[[Inputs], Any]] = {
    "td": lambda x: x.create(),
    "other": lambda x: x.create(1.0),
    "entries": lambda x: tree(x.num_leaves, (ROWS,), 1.0),
    "ints": lambda x: x.create().int(),
    "bools": lambda x: x.create() > -1.0,
    "falses": lambda x: x.create() < -1.0,
    "row": lambda x: x.other[0],
    "flat": lambda x: x.td.flatten_keys("."),
    "locked": lambda x: x.create().lock_(),
    "params": lambda x: x.create().requires_grad_(),
    "graph": lambda x: x.params * 2,
    "text": lambda x: x.create().set_non_tensor("text", "words"),
    "state": lambda x: x.other.state_dict(),
    "members": lambda x: [x.other[i] for i in range(ROWS)],
    "module": lambda x: nn.Sequential(*[layer() for _ in range(x.num_leaves // 2)]),
    "weights": lambda x: x.package.TensorDict.from_module(x.module),
    "modules": lambda x: [layer(), layer()],
    "pytree": lambda x: [tree(x.num_leaves, (ROWS,)), (torch.ones(ROWS),)],
    "from_pytree": lambda x: x.package.TensorDict.from_pytree(x.pytree),
    "columns": columns,
    "schema": lambda x: {f"c{i}": ([WIDTH], torch.float32) for i in range(x.num_leaves)},
    "table": lambda x: columns(x).to_struct_array(),
    "temporary": lambda x: tempfile.TemporaryDirectory(prefix="raffia-methods-"),
    "folder": lambda x: Path(x.temporary.name),
    "on_disk": saved,
    "mapped": lambda x: x.td.memmap(x.folder / "mapped"),
}


RULES: dict[str, Rule] = {
    "__getitem__(name)": lambda td, x: td["l1"],
    "__getitem__(nested key)": lambda td, x: td[x.deep],
    "__getitem__(number)": lambda td, x: td[1],
    "__getitem__(slice)": lambda td, x: td[1:3],
    "__getitem__(tensor)": lambda td, x: td[x.at],
    "__getitem__(mask)": lambda td, x: td[x.mask],
    "__setitem__(name)": lambda td, x: td.__setitem__("l1", x.leaf),
    "__setitem__(nested key)": lambda td, x: td.__setitem__(x.deep, x.leaf),
    "__setitem__(number)": lambda td, x: td.__setitem__(1, x.row),
    "__setitem__(slice, number)": lambda td, x: td.__setitem__(slice(1, 3), 0.5),
    "__contains__": lambda td, x: x.deep in td,
    "__delitem__": lambda td, x: delete(td, x.deep),
    "__iter__": lambda td, x: list(td),
    "__len__": lambda td, x: len(td),
    "__repr__": lambda td, x: repr(td),
    "__eq__": lambda td, x: td == x.other,
    "__ne__": lambda td, x: td != x.other,
    "__add__": lambda td, x: td + x.other,
    "__add__(number)": lambda td, x: td + 1.0,
    "__mul__": lambda td, x: td * x.other,
    "__copy__": lambda td, x: copy.copy(td),
    "__deepcopy__": lambda td, x: copy.deepcopy(td),
    "__reduce__": lambda td, x: pickle.loads(pickle.dumps(td)),
    "__enter__(unlock_)": lambda td, x: unlocked(x.locked),
    "__enter__(flatten_keys)": lambda td, x: flattened(td),
    "__init__": lambda td, x: x.package.TensorDict(x.entries, batch_size=[ROWS]),
    "append": lambda td, x: td.append(x.row),
    "apply": lambda td, x: td.apply(torch.neg),
    "apply(two)": lambda td, x: td.apply(torch.add, x.other),
    "apply_": lambda td, x: td.apply_(torch.neg),
    "batch_size(set)": lambda td, x: setattr(td, "batch_size", [ROWS, WIDTH]),
    "backward": lambda td, x: x.graph.backward(x.other, retain_graph=True),
    "bitwise_and": lambda td, x: x.ints.bitwise_and(x.ints),
    "broadcast_to": lambda td, x: td.broadcast_to((2, ROWS)),
    "cat": lambda td, x: type(td).cat([td, x.other]),
    "cat_from_tensordict": lambda td, x: x.columns.cat_from_tensordict(),
    "stack_from_tensordict": lambda td, x: x.columns.stack_from_tensordict(),
    "cat_tensors": lambda td, x: td.cat_tensors("l1", "l2", out_key="new", dim=1),
    "stack_tensors": lambda td, x: td.stack_tensors("l1", "l2", out_key="new", dim=1),
    "chunk": lambda td, x: td.chunk(2),
    "clamp": lambda td, x: td.clamp(0.2, 0.6),
    "copy_": lambda td, x: td.copy_(x.other),
    "copy_at_": lambda td, x: td.copy_at_(x.other[1:3], slice(1, 3)),
    "create_nested": lambda td, x: td.create_nested("new"),
    "cummax": lambda td, x: tuple(td.cummax(0)),
    "cummin": lambda td, x: tuple(td.cummin(0)),
    "data_ptr": lambda td, x: None if td.data_ptr() is None else 0,
    "dtype": lambda td, x: td.dtype,
    "del_": lambda td, x: td.del_(x.deep),
    "dumps": lambda td, x: td.dumps(x.folder / "dumps"),
    "save": lambda td, x: td.save(x.folder / "save"),
    "load": lambda td, x: x.package.TensorDict.load(x.on_disk),
    "load_": lambda td, x: td.load_(x.on_disk),
    "load_memmap": lambda td, x: x.package.TensorDict.load_memmap(x.on_disk),
    "load_memmap_": lambda td, x: td.load_memmap_(x.on_disk),
    "memmap": lambda td, x: td.memmap(),
    "memmap(folder)": lambda td, x: td.memmap(x.folder / "memmap"),
    "memmap_like": lambda td, x: td.memmap_like(),
    "memmap_refresh_": lambda td, x: x.mapped.memmap_refresh_(),
    "is_memmap": lambda td, x: x.mapped.is_memmap(),
    "saved_path": lambda td, x: x.mapped.saved_path and 0,
    "empty(recurse)": lambda td, x: td.empty(recurse=True),
    "entry_class": lambda td, x: td.entry_class(x.deep).__name__,
    "exclude": lambda td, x: td.exclude("l1", "l2", x.deep),
    "exclude(inplace)": lambda td, x: td.exclude("l1", "l2", x.deep, inplace=True),
    "expand": lambda td, x: td.expand(2, ROWS),
    "expand_as": lambda td, x: td.expand_as(x.other),
    "extend": lambda td, x: td.extend(x.members[:2]),
    "fill_": lambda td, x: td.fill_("l1", 0.5),
    "flatten": lambda td, x: td.unsqueeze(0).flatten(0, 1),
    "flatten_keys(inplace)": lambda td, x: td.flatten_keys(".", inplace=True),
    "flip": lambda td, x: td.flip(0),
    "fliplr": lambda td, x: td.unsqueeze(0).fliplr(),
    "rot90": lambda td, x: td.unsqueeze(0).rot90(1, (0, 1)),
    "from_any": lambda td, x: x.package.TensorDict.from_any(x.pytree[0]),
    "from_dict": lambda td, x: x.package.TensorDict.from_dict(x.entries, batch_size=[ROWS]),
    "from_dict(auto_batch_size)": lambda td, x: x.package.TensorDict.from_dict(
        x.entries, auto_batch_size=True
    ),
    "from_dict_instance": lambda td, x: td.from_dict_instance(x.entries, batch_size=[ROWS]),
    "from_list": lambda td, x: x.package.TensorDict.from_list([x.entries, x.entries]),
    "from_module": lambda td, x: x.package.TensorDict.from_module(x.module),
    "from_modules": lambda td, x: x.package.TensorDict.from_modules(*x.modules),
    "from_namedtuple": lambda td, x: x.package.TensorDict.from_namedtuple(Point(x.leaf, x.leaf)),
    "from_pytree": lambda td, x: x.package.TensorDict.from_pytree(x.pytree),
    "from_schema": lambda td, x: x.package.TensorDict.from_schema(x.schema, batch_size=[ROWS]),
    "from_struct_array": lambda td, x: x.package.TensorDict.from_struct_array(x.table),
    "from_tuple": lambda td, x: x.package.TensorDict.from_tuple((x.leaf, x.leaf)),
    "fromkeys": lambda td, x: x.package.TensorDict.fromkeys([*x.names, x.deep], 1),
    "gather": lambda td, x: td.gather(0, x.at),
    "get": lambda td, x: td.get("l1"),
    "get(nested key)": lambda td, x: td.get(x.deep),
    "get(missing)": lambda td, x: td.get("none", None),
    "get_at": lambda td, x: td.get_at("l1", 1),
    "get_item_shape": lambda td, x: td.get_item_shape(x.deep),
    "get_nestedtensor": lambda td, x: td.get_nestedtensor("l1").is_nested,
    "get_non_tensor": lambda td, x: x.text.get_non_tensor("text"),
    "is_non_tensor": lambda td, x: x.text.is_non_tensor("text"),
    "set_non_tensor": lambda td, x: x.text.set_non_tensor("text", "words"),
    "non_tensor_items": lambda td, x: [key for key, _ in x.text.non_tensor_items()],
    "filter_non_tensor_data": lambda td, x: x.text.filter_non_tensor_data(),
    "insert": lambda td, x: td.insert(1, x.row),
    "items": lambda td, x: list(td.items()),
    "items(True, True)": lambda td, x: list(td.items(True, True)),
    "keys": lambda td, x: list(td.keys()),
    "keys(True, True)": lambda td, x: list(td.keys(True, True)),
    "keys(True)": lambda td, x: list(td.keys(True)),
    "keys(in)": lambda td, x: x.deep in td.keys(True, True),
    "values": lambda td, x: list(td.values()),
    "values(True, True)": lambda td, x: list(td.values(True, True)),
    "lazy_stack": lambda td, x: x.package.TensorDict.lazy_stack([td, x.other]),
    "maybe_dense_stack": lambda td, x: x.package.TensorDict.maybe_dense_stack([td, x.other]),
    "stack": lambda td, x: type(td).stack([td, x.other]),
    "load_state_dict": lambda td, x: td.load_state_dict(x.state),
    "logical_and": lambda td, x: x.bools.logical_and(x.bools),
    "all": lambda td, x: x.bools.all(),
    "any": lambda td, x: x.bools.any(),
    "all(dim)": lambda td, x: x.bools.all(dim=0),
    "any(dim)": lambda td, x: x.bools.any(dim=0),
    "any(false everywhere)": lambda td, x: x.falses.any(),
    "masked_fill": lambda td, x: td.masked_fill(x.mask, 1.0),
    "masked_fill_": lambda td, x: td.masked_fill_(x.mask, 1.0),
    "masked_select": lambda td, x: td.masked_select(x.mask),
    "max": lambda td, x: tuple(td.max(0)),
    "min": lambda td, x: tuple(td.min(0)),
    "mod": lambda td, x: td.mod(1.0),
    "moveaxis": lambda td, x: td.unsqueeze(0).moveaxis(0, 1),
    "movedim": lambda td, x: td.unsqueeze(0).movedim(0, 1),
    "permute": lambda td, x: td.unsqueeze(0).permute(1, 0),
    "transpose": lambda td, x: td.unsqueeze(0).transpose(0, 1),
    "swapaxes": lambda td, x: td.unsqueeze(0).swapaxes(0, 1),
    "swapdims": lambda td, x: td.unsqueeze(0).swapdims(0, 1),
    "named_apply": lambda td, x: td.named_apply(named),
    "named_apply(nested_keys)": lambda td, x: td.named_apply(named, nested_keys=True),
    "narrow": lambda td, x: td.narrow(0, 1, 2),
    "new_empty": lambda td, x: tuple(td.new_empty(2).batch_size),
    "new_full": lambda td, x: td.new_full((2,), 0.5),
    "new_ones": lambda td, x: td.new_ones(2),
    "new_tensor": lambda td, x: td.new_tensor(x.other),
    "new_zeros": lambda td, x: td.new_zeros(2),
    "norm": lambda td, x: td.norm(),
    "numpy": lambda td, x: len(td.numpy()),
    "pad": lambda td, x: x.package.pad(td, [0, 1]),
    "pop": lambda td, x: td.pop(x.deep),
    "quantile": lambda td, x: td.quantile(0.5, 0),
    "refine_names": lambda td, x: td.refine_names("rows"),
    "rename": lambda td, x: td.rename("rows"),
    "rename_": lambda td, x: td.rename_("rows"),
    "rename_key_": lambda td, x: td.rename_key_("l1", "new"),
    "rename_key_(nested key)": lambda td, x: td.rename_key_(x.deep, ("n0", "new")),
    "rename_keys": lambda td, x: td.rename_keys({"l1": "new"}),
    "repeat": lambda td, x: td.repeat(2),
    "repeat_interleave": lambda td, x: td.repeat_interleave(2, dim=0),
    "replace": lambda td, x: td.replace({"l1": x.leaf}),
    "reshape": lambda td, x: td.reshape(2, 2),
    "roll": lambda td, x: td.roll(1, 0),
    "round": lambda td, x: td.round(),
    "select": lambda td, x: td.select("l1", "l2", "l3"),
    "select(nested key)": lambda td, x: td.select("l1", x.deep),
    "select(inplace)": lambda td, x: td.select("l1", "l2", x.deep, inplace=True),
    "separates": lambda td, x: td.separates("l1", "l2"),
    "set": lambda td, x: td.set("l1", x.leaf),
    "set(nested key)": lambda td, x: td.set(x.deep, x.leaf),
    "set(new levels)": lambda td, x: td.set(("new", "below"), x.leaf),
    "set(container)": lambda td, x: td.set("new", x.other),
    "set(inplace)": lambda td, x: td.set("l1", x.leaf, inplace=True),
    "set_": lambda td, x: td.set_("l1", x.leaf),
    "set_(nested key)": lambda td, x: td.set_(x.deep, x.leaf),
    "set_at_": lambda td, x: td.set_at_("l1", x.leaf[1], 1),
    "setdefault": lambda td, x: td.setdefault("l1", x.leaf),
    "setdefault(new)": lambda td, x: td.setdefault("new", x.leaf),
    "size": lambda td, x: tuple(td.size()),
    "softmax": lambda td, x: td.softmax(0),
    "split": lambda td, x: td.split(2),
    "tensor_split": lambda td, x: td.tensor_split(2),
    "split_keys": lambda td, x: td.split_keys(["l1", "l2"]),
    "split_keys(inplace)": lambda td, x: td.split_keys(["l1", "l2"], inplace=True),
    "squeeze": lambda td, x: td.unsqueeze(0).squeeze(0),
    "sub": lambda td, x: td.sub(x.other),
    "sum(dim)": lambda td, x: td.sum(0),
    "mean(dim)": lambda td, x: td.mean(0),
    "prod(dim)": lambda td, x: td.prod(0),
    "amax(dim)": lambda td, x: td.amax(0),
    "std(dim)": lambda td, x: td.std(0),
    "sum(reduce)": lambda td, x: td.sum(reduce=True),
    "logsumexp": lambda td, x: td.logsumexp(0),
    "tile": lambda td, x: td.tile(2),
    "to": lambda td, x: td.to(torch.float64),
    "to(device)": lambda td, x: td.to("cpu"),
    "to_pytree": lambda td, x: x.from_pytree.to_pytree(),
    "to_lazystack": lambda td, x: td.to_lazystack(0),
    "to_module": lambda td, x: x.weights.to_module(x.module),
    "to_module(with)": lambda td, x: entered(x.weights.to_module(x.module)),
    "to_namedtuple": lambda td, x: len(td.to_namedtuple()),
    "to_struct_array": lambda td, x: x.columns.to_struct_array().shape,
    "type": lambda td, x: td.type(torch.float64),
    "unbind": lambda td, x: td.unbind(0),
    "unflatten": lambda td, x: td.unflatten(0, (2, 2)),
    "unflatten_keys": lambda td, x: x.flat.unflatten_keys("."),
    "unsqueeze": lambda td, x: td.unsqueeze(0),
    "update": lambda td, x: td.update(x.other),
    "update(dict)": lambda td, x: td.update(x.entries),
    "update(one)": lambda td, x: td.update({"l1": x.leaf}),
    "update(one new)": lambda td, x: td.update({"new": x.leaf}),
    "update(inplace)": lambda td, x: td.update(x.other, inplace=True),
    "update(clone)": lambda td, x: td.update(x.other, clone=True),
    "update_": lambda td, x: td.update_(x.other),
    "update_(dict)": lambda td, x: td.update_(x.entries),
    "update_(one)": lambda td, x: td.update_({"l1": x.leaf}),
    "update_at_": lambda td, x: td.update_at_(x.row, 1),
    "view": lambda td, x: td.view(2, 2),
    "where": lambda td, x: td.where(x.mask, x.other),
    "addcdiv": lambda td, x: td.addcdiv(x.other, x.other),
    "addcdiv_": lambda td, x: td.addcdiv_(x.other, x.other),
    "addcmul": lambda td, x: td.addcmul(x.other, x.other),
    "addcmul_": lambda td, x: td.addcmul_(x.other, x.other),
    "lerp": lambda td, x: td.lerp(x.other, 0.5),
    "lerp_": lambda td, x: td.lerp_(x.other, 0.5),
    "pow": lambda td, x: td.pow(2),
    "pow_": lambda td, x: td.pow_(2),
    "zero_grad": lambda td, x: x.params.zero_grad(),
    "grad": lambda td, x: x.params.grad and 0,
    "data": lambda td, x: x.params.data,
    "requires_grad": lambda td, x: x.params.requires_grad,
    "share_memory_": lambda td, x: int(td.share_memory_() is td),
}  # fmt: skip


def _binary(name: str) -> Rule:
    return lambda td, x: getattr(td, name)(x.other)


def _with_number(name: str) -> Rule:
    return lambda td, x: getattr(td, name)(0.5)


for _name in ("add", "sub", "mul", "div", "maximum", "minimum"):
    RULES |= {_name: _binary(_name), f"{_name}_": _binary(f"{_name}_")}
    if _name[0] != "m" or _name == "mul":
        RULES[f"{_name}(number)"] = _with_number(_name)
for _name in ("clamp_max", "clamp_min"):
    RULES |= {_name: _with_number(_name), f"{_name}_": _with_number(f"{_name}_")}
RULES["rsub"] = _with_number("rsub")


def delete(td: Any, key: Any) -> None:
    del td[key]


def named(name: Any, leaf: Tensor) -> Tensor:
    return leaf


def entered(block: Any) -> None:
    with block:
        pass


def unlocked(td: Any) -> None:
    with td.unlock_():
        pass


def flattened(td: Any) -> None:
    with td.flatten_keys("."):
        pass


# rows whose call changes the entries or the kind of the container: each call has its own
# container, created before the clock starts
FRESH = frozenset(
    """__delitem__, append, auto_batch_size_, batch_size(set), cat_tensors, clear, clear_device_,
    create_nested, del_, exclude(inplace), extend, filter_empty_, flatten_keys(inplace), insert,
    load_memmap_, lock_, memmap_, pop, popitem, rename_, rename_key_, rename_key_(nested key),
    select(inplace), separates, set(container), set(new levels), setdefault(new), share_memory_,
    split_keys(inplace), stack_tensors, unlock_, update(one new)""".replace("\n", " ").split(", ")
)
FRESH = frozenset(name.strip() for name in FRESH)

LEFT_OUT = {
    "cuda": "needs an accelerator",
    "pin_memory": "needs an accelerator",
    "pin_memory_": "needs an accelerator",
    "record_stream": "needs an accelerator",
    "make_memmap": "makes one file: the file system's time",
    "make_memmap_from_tensor": "makes one file: the file system's time",
    "make_memmap_from_storage": "makes one file: the file system's time",
    "map": "starts processes: the system's time",
    "map_iter": "starts processes: the system's time",
    "from_consolidated": "reads a file: the file system's time",
    "from_json": "reads a text file: the parser's time",
    "to_json": "writes a text file: the file system's time",
    "from_dataclass": "makes a class at each call, in which neither has a hot path",
    **dict.fromkeys(
        """send isend recv irecv asend arecv init_remote from_remote_init broadcast all_reduce
        reduce all_gather gather_and_stack scatter""".split(),
        "needs processes: see benchmarks/messages.py",
    ),
}

# by kind of container, what it is not called with
NOT_FOR = {
    "dense": {},
    "lazy": {
        "batch_size(set)": "the peer's lazy stack refuses it",
        "backward": "gradients in the form of a lazy stack are refused by ours",
        "copy_at_": "the peer's lazy stack refuses it",
        "memmap_refresh_": "the peer's lazy stack refuses it",
        "saved_path": "the peer's lazy stack has none",
    },
}

# rows whose results are not held together: texts differ, a dtype has no numpy, memory at random
NOT_COMPARED = frozenset(("__repr__", "from_pytree", "bfloat16", "complex32"))
