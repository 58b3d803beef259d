"""Tables of functions that change a container of `kinds.make`."""

import operator

import torch

from raffia import TensorDict


def like(td, value):
    """The same entries, all of this value."""
    return td.clone().apply(lambda x: torch.full_like(x, value))


def fill(td, key, value):
    td[key] = torch.full_like(td.get(key), value)


def put(td, index, value):
    td[index] = value


def assign(td, name, value):
    setattr(td, name, value)


def erase(x):
    """Zeroes in place, without a result."""
    x.zero_()


WRITES = {  # changes of values only
    "zero_": lambda td: td.zero_(),
    "fill_": lambda td: td.fill_("b", 7),
    "fill_ a nested one": lambda td: td.fill_(("n", "c"), 7),
    "set_": lambda td: td.set_("b", torch.full_like(td["b"], 5)),
    "set_ of another dtype": lambda td: td.set_("b", torch.full_like(td["b"], 5).double()),
    "set_ nested": lambda td: td.set_(("n", "c"), torch.full_like(td["n", "c"], 5)),
    "set_ a container": lambda td: td.set_("n", like(td.get("n"), 5)),
    "set_ a number": lambda td: td.set_("b", 5),
    "set inplace": lambda td: td.set("b", torch.full_like(td["b"], 5), inplace=True),
    "set nested inplace": lambda td: td.set(("n", "c"), like(td, 5)["n", "c"], inplace=True),
    "set_at_": lambda td: td.set_at_("b", 5, ...),
    "update": lambda td: td.update({"b": torch.full_like(td["b"], 5)}, inplace=True),
    "update with a container": lambda td: td.update(like(td, 5), inplace=True),
    "update_": lambda td: td.update_({"b": torch.full_like(td["b"], 5), "n": like(td["n"], 2)}),
    "update_ with a container": lambda td: td.update_(like(td, 5)),
    "update_at_": lambda td: td.update_at_({"b": torch.full_like(td["b"], 5)}, ...),
    "copy_": lambda td: td.copy_(like(td, 5)),
    "copy_at_": lambda td: td.copy_at_(like(td, 5), ...),
    "rows": lambda td: put(td, ..., like(td, 5)),
    "rows of a number": lambda td: put(td, ..., 1),
    "masked_fill_": lambda td: td.masked_fill_(torch.ones(td.shape, dtype=torch.bool), 1),
    "apply_": lambda td: td.apply_(lambda x: x * 0 + 1),
    "apply_ without results": lambda td: td.apply_(erase),
    "apply inplace": lambda td: td.apply(lambda x: x * 0 + 1, inplace=True),
    "named_apply inplace": lambda td: td.named_apply(lambda _, x: x * 0 + 1, inplace=True),
    "add_": lambda td: td["n"].add_(1),
    "mul_ of a tensor": lambda td: td["n"].mul_(torch.full(td["n"].shape, 3)),
    "sub_ of itself": lambda td: td["n"].sub_(td["n"]),
    "+=": lambda td: operator.iadd(td["n"], 1),
    "*=": lambda td: operator.imul(td["n"], td["n"].clone()),
    "neg_": lambda td: td["n"].neg_(),
    "torch.neg_": lambda td: torch.neg_(td["n"]),
    "a nested one": lambda td: td["m"].zero_(),
    "a nested one's nested one": lambda td: td["m"]["k"].zero_(),
    "an entry of a nested one": lambda td: td["n"].set_("c", td["n", "c"] * 2),
    "where": lambda td: td.where(torch.zeros(td.shape, dtype=torch.bool), like(td, 3), out=td),
    "data": lambda td: assign(td, "data", like(td, 5)),
    "load_state_dict": lambda td: td.load_state_dict(like(td, 5).state_dict()),
}
NEW_ENTRIES = {  # additions of entries
    "set": lambda td: td.set("new", torch.full((*td.shape, 2), 5)),
    "set nested": lambda td: td.set(("n", "new"), torch.full((*td["n"].shape, 2), 5)),
    "set levels": lambda td: td.set(("x", "y", "z"), torch.ones(td.shape)),
    "set a container": lambda td: td.set(
        "x", TensorDict(y=torch.ones(td.shape), batch_size=td.shape)
    ),
    "key": lambda td: put(td, "new", torch.ones(td.shape)),
    "nested key": lambda td: put(td, ("m", "new"), torch.ones(td.shape)),
    "setdefault": lambda td: td.setdefault("new", torch.ones(td.shape)) is None,
    "update": lambda td: td.update(
        {"b": td["b"] * 2, "new": td["b"] * 3, "n": {"x": td["n", "c"]}}
    ),
    "update of a tuple": lambda td: td.update({("m", "new"): torch.ones(td.shape)}),
    "update of itself": lambda td: td.update(td.clone().rename_key_("b", "new")),
    "create_nested": lambda td: td.create_nested("new"),
    "rows": lambda td: put(td, ..., TensorDict(new=torch.ones(td.shape), batch_size=td.shape)),
}
REMOVALS = {  # removals and renamings of entries
    "del": lambda td: operator.delitem(td, "a"),
    "del nested": lambda td: operator.delitem(td, ("m", "k", "d")),
    "del_": lambda td: td.del_("n"),
    "pop": lambda td: td.pop("b") is None,
    "pop nested": lambda td: td.pop(("m", "k")) is None,
    "pop in a nested one": lambda td: td["m"].pop("k") is None,
    "popitem": lambda td: td.popitem()[0],
    "clear": lambda td: td.clear() is None,
    "rename_key_": lambda td: td.rename_key_("a", "z"),
    "rename_key_ nested": lambda td: td.rename_key_(("m", "k"), ("p", "z")),
    "select": lambda td: td.select("a", ("m", "k"), inplace=True),
    "exclude": lambda td: td.exclude("a", ("m", "k"), inplace=True),
    "flatten_keys": lambda td: td.flatten_keys(".", inplace=True),
    "flatten_keys by position": lambda td: td.flatten_keys("_", True),
    "unflatten_keys": lambda td: td.rename_key_("a", "p.q").unflatten_keys(".", inplace=True),
    "separates": lambda td: list(td.separates("a").keys()),
    "split_keys": lambda td: td.split_keys(["a"], inplace=True) is None,
}
