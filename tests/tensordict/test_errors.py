"""Errors: the message has the problem, the value received and the call that works.

The container stays as it was. Messages are matched by the words a reader needs, not whole.
"""

import re

import pytest
import torch

from raffia import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    dense_stack_tds,
    lazy_stack,
    pad_sequence,
    tensorclass,
    unravel_key,
    unravel_key_list,
)

B, T, A = 2, 3, 5
ONES, THREE = torch.ones(B, T), torch.ones(T)


def make(**kwargs):
    return TensorDict(
        {
            "observation": torch.arange(30.0).reshape(B, T, A),
            "action": torch.ones(B, T),
            "next": {"reward": torch.zeros(B, T), "info": {"lives": torch.ones(B, T, 4)}},
        },
        [B, T],
        **kwargs,
    )


KINDS = {
    "plain": make,
    "dressed": lambda: make(device="cpu", names=["x", "y"]),
    "locked": lambda: make(lock=True),
    "lazy0": lambda: lazy_stack(list(make().unbind(0)), 0),
    "lazy1": lambda: lazy_stack(list(make().unbind(1)), 1),
    "locked lazy": lambda: lazy_stack(list(make().unbind(0)), 0).lock_(),
}
WRITABLE, LOCKED = ["plain", "dressed", "lazy0", "lazy1"], ["locked", "locked lazy"]
DENSE = ["plain", "dressed"]


def state(td):
    """All that a failed call must not change: order and identity of entries, values, metadata."""
    nodes = [td, *[v for v in td.values(True) if not isinstance(v, torch.Tensor)]]
    return (
        list(td.keys(True)),
        [id(v) for v in td.values(True, True)] if isinstance(td, TensorDict) else None,
        [(n.batch_size, n.names, n.device, n.is_locked) for n in nodes],
        [v.tolist() for v in td.values(True, True)],
    )


def refused(td, call, error, words, what):
    """The call fails with the error and all patterns of `words`, and changes nothing."""
    before = state(td)
    try:
        call(td)
    except Exception as caught:
        assert isinstance(caught, error), f"{what}: {caught!r}"
        for word in (words,) if isinstance(words, str) else words:
            assert re.search(word, str(caught)), f"{what}: {word!r} is not in: {caught}"
    else:
        raise AssertionError(f"{what}: nothing was raised")
    assert state(td) == before, f"{what}: the container has changed"


# --------------------------------------------------------------------------- keys

OF_A_KEY = {
    "[]": lambda td, key: td[key],
    "pop": lambda td, key: td.pop(key),
    "select": lambda td, key: td.select(key),
    "fill_": lambda td, key: td.fill_(key, 0.0),
    "set_": lambda td, key: td.set_(key, ONES),
    "get_item_shape": lambda td, key: td.get_item_shape(key),
    "set_at_": lambda td, key: td.set_at_(key, 0.0, 0),
    "rename_keys": lambda td, key: td.rename_keys({key: "q"}),
    "split_keys": lambda td, key: td.split_keys([key]),
    "update_": lambda td, key: td.update_({key: ONES}),
    "update_at_": lambda td, key: td.update_at_({key: THREE}, 0),
    "del": lambda td, key: td.__delitem__(key),
    "del_": lambda td, key: td.del_(key),
    "rename_key_": lambda td, key: td.rename_key_(key, "q"),
    "select inplace": lambda td, key: td.select("action", key, inplace=True),
    "cat_tensors": lambda td, key: td.cat_tensors("action", key, out_key="q"),
    "stack_tensors": lambda td, key: td.stack_tensors("action", key, out_key="q"),
    "split_keys inplace": lambda td, key: td.split_keys(["action"], [key], inplace=True),
}
ALSO_LOCKED = [*OF_A_KEY][:6]
NEAR = {
    "acton": "action",
    "obsevation": "observation",
    ("next", "rewrd"): "reward",
    ("next", "info", "live"): "lives",
}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys(kind):
    td = KINDS[kind]()
    for what in ALSO_LOCKED if kind in LOCKED else OF_A_KEY:
        call = OF_A_KEY[what]
        for key, near in NEAR.items():
            refused(td, lambda td, c=call, k=key: c(td, k), KeyError, f"Did you .*{near}", what)
        words = ["zz"] if "inplace" in what else ["zz", "'action'"]
        refused(td, lambda td, c=call: c(td, ("zz", "reward")), KeyError, "zz", what)
        refused(td, lambda td, c=call: c(td, "zz"), KeyError, words[:1], what)
    for what in ("[]", "pop", "select"):
        call = OF_A_KEY[what]
        refused(td, lambda td, c=call: c(td, "zz"), KeyError, ("action", "next", "obs"), what)
    for key in ("zz", ("next", "zz"), ("zz", "a"), "next.reward", "Action", ""):
        assert td.get(key) is None
    with pytest.raises(KeyError) as error:
        td["zzzzzz"]
    assert "Did you mean" not in str(error.value)
    with pytest.raises(KeyError) as error:  # not the repr of its text, as of other KeyErrors
        td["acton"]
    assert "\\'" not in str(error.value) and not str(error.value).startswith(("'", '"'))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_through_a_tensor(kind):
    td = KINDS[kind]()
    whats = ["[]", "pop", "select", "get_item_shape"]
    for what in whats if kind in LOCKED else [*whats, "set_", "fill_", "del", "rename_key_"]:
        for key, name in ((("action", "zz"), "action"), (("next", "reward", "zz"), "reward")):
            words = (name, "Tensor", "zz")
            refused(td, lambda td, c=OF_A_KEY[what], k=key: c(td, k), KeyError, words, what)
    with pytest.raises(ValueError, match="action"):
        td["action", "zz"]
    if kind in LOCKED:
        return
    for what, call in {
        "set": lambda td: td.set(("action", "zz"), ONES),
        "item": lambda td: td.__setitem__(("action", "zz", "y"), ONES),
        "setdefault": lambda td: td.setdefault(("action", "zz"), ONES),
        "update": lambda td: td.update({("action", "zz"): ONES}),
        "rename": lambda td: td.rename_key_("observation", ("action", "zz")),
    }.items():
        refused(td, call, KeyError, "action", what)


SHARED = ("pop", "set_", "del_", "select", "rename_key_", "fill_", "set_at_")
OF_ANY_KEY = {what: OF_A_KEY[what] for what in SHARED} | {
    "get": lambda td, key: td.get(key),
    "set": lambda td, key: td.set(key, ONES),
    "update": lambda td, key: td.update({key: ONES}),
    "a tuple": lambda td, key: td.set(("n", key), ONES),
    "construct": lambda td, key: TensorDict({key: ONES}, [B, T]),
    "setdefault": lambda td, key: td.setdefault(key, ONES),
    "exclude": lambda td, key: td.exclude(key),
    "rename_key_ to": lambda td, key: td.rename_key_("action", key),
    "create_nested": lambda td, key: td.create_nested(key),
    "get_at": lambda td, key: td.get_at(key, 0),
    "unravel_key": lambda td, key: unravel_key(key),
}


@pytest.mark.parametrize("kind", ["plain", "lazy0"])
@pytest.mark.parametrize("key", [1, None, (), ("a", 1), ["a"], ["action", "next"], 2.5], ids=str)
def test_invalid_keys_are_refused(key, kind):
    td = KINDS[kind]()
    for what, call in OF_ANY_KEY.items():
        if isinstance(key, list) and what in ("construct", "update"):
            continue  # no key of a dict
        errors, words = (KeyError, TypeError), [re.escape(repr(key))]
        refused(td, lambda td, c=call: c(td, key), errors, words, what)
    for error in (KeyError, TypeError, RuntimeError, ValueError):  # it is each of them
        refused(td, lambda td: td.select(key), error, "Only NestedKeys are supported", "select")


# ------------------------------------------------------------------------- other errors

MISMATCH = r"batch dimension mismatch"
OTHER = dict.fromkeys(["observation"], torch.ones(B, T, 6))
SIXES = ("observation|lives", "6")
DEEP = ("next", "info", "lives")
LIST, BOTH = [("z", ONES)], ["x", "y"]
ERRORS = (RuntimeError, ValueError, TypeError)
# Kinds, the call, the error, and the words in it.
MISTAKES = [
    # shapes that do not begin with the batch size
    *[
        (WRITABLE, call, RuntimeError, (MISMATCH, r"\[2, 3\]", r"\[3, 2\]", "'z'"))
        for call in (
            lambda td: td.set("z", ONES.t()),
            lambda td: td.update({"z": ONES.t()}),
            lambda td: td.setdefault(("n", "m", "z"), ONES.t()),
        )
    ],
    (DENSE, lambda td: td.__setitem__("z", 1.0), RuntimeError, (MISMATCH, "'z'", "[Ss]calar")),
    (DENSE, lambda td: td.__setitem__("z", 1.0), RuntimeError, "expand|full|set_non_tensor"),
    (
        DENSE,
        lambda td: setattr(td, "batch_size", [B, 4]),
        RuntimeError,
        ("observation", r"\[2, 4\]"),
    ),
    # other shapes, in place
    (KINDS, lambda td: td.set_("observation", OTHER["observation"]), RuntimeError, SIXES),
    (KINDS, lambda td: td.update_(OTHER), RuntimeError, SIXES),
    (KINDS, lambda td: td.update_at_({"observation": torch.ones(T, 6)}, 0), RuntimeError, SIXES),
    (DENSE, lambda td: td.set_("next", ONES), ERRORS, "next"),
    (DENSE, lambda td: td.set_("action", {"c": ONES}), ERRORS, "action"),
    (WRITABLE, lambda td: td.set_("action", "text"), RuntimeError, "update 'action'"),
    # names of existing entries
    (
        WRITABLE,
        lambda td: td.rename_key_("action", ("next", "reward"), safe=True),
        KeyError,
        ("already", "reward"),
    ),
    (WRITABLE, lambda td: td.rename_key_("observation", ("action", "z")), KeyError, "action"),
    (WRITABLE, lambda td: td.rename_keys({"action": "q", "observation": "q"}), ValueError, "q"),
    (WRITABLE, lambda td: td.rename_keys({"next": "z", DEEP: "y"}), ValueError, ""),
    (DENSE, lambda td: td.flatten_keys(3), TypeError, "3"),
    (DENSE, lambda td: td.unflatten_keys(3), TypeError, "3"),
    # several entries, of which one is wrong
    (DENSE, lambda td: td.separates("action", "zz"), KeyError, "zz"),
    *[
        (
            DENSE,
            lambda td, m=method: getattr(td, m)("action", "action", out_key=("action", "q")),
            KeyError,
            "action|present|already|Tensor",
        )
        for method in ("cat_tensors", "stack_tensors")
    ],
    # invalid keys and containers
    (DENSE, lambda td: td["reward"], KeyError, re.escape("('next', 'reward')")),
    (DENSE, lambda td: td[0, "action"], (TypeError, KeyError, IndexError), "action"),
    (DENSE, lambda td: td[["action", "next"]], IndexError, r"td\.select\('action', 'next'\)"),
    (DENSE, bool, RuntimeError, ("bool", "is_empty")),
    (DENSE, lambda td: 1 in td, RuntimeError, "1"),
    (DENSE, lambda td: setattr(td, "batch_size", None), TypeError, "None"),
    (DENSE, lambda td: list(TensorDict(a=1)), TypeError, r"keys\(\)"),
    *[
        (WRITABLE, lambda td, m=method, s=source: getattr(td, m)(s), TypeError, word)
        for method in ("update", "update_")
        for source, word in ((3, "int"), (LIST, "list"), ("abc", "str"))
    ],
    (DENSE, lambda td: td.update({"z": ONES}, keys_to_update="z"), TypeError, "str"),
    (DENSE, lambda td: setattr(td, "device", "meta"), (RuntimeError, AttributeError), r"\.to\("),
    *[
        (["plain"], lambda td, a=args: td.refine_names(*a), ERRORS, "name")
        for args in [("a", "b", "c"), ("a", "a"), (..., "a", ...)]
    ],
    (["locked"], lambda td: td["next"].unlock_(), RuntimeError, "[Uu]nlock the root"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_errors(kind):
    num = 0
    for number, (kinds, call, error, words) in enumerate(MISTAKES):
        if kind in kinds:
            refused(KINDS[kind](), call, error, words, f"mistake {number} of {kind}")
            num += 1
    assert num > 2


LAZY = lazy_stack([TensorDict(a=1, b=2), TensorDict(a=1, c=2)])
RAGGED = lazy_stack([TensorDict(a=torch.ones(3)), TensorDict(a=torch.ones(4))])
NO_SHAPE = (TypeError, ValueError)
OF_NONE = [
    *[
        (
            lambda s=source: TensorDict(s, [2]),
            NO_SHAPE,
            f"(?i)(mapping|dict).*{type(source).__name__}",
        )
        for source in ([("a", torch.ones(2))], torch.ones(2), "abc")
    ],
    (
        lambda: TensorDict({"n": {"z": THREE}}, [B]),
        RuntimeError,
        rf"{MISMATCH}.*\[2\].*\[3\].*'z'",
    ),
    (lambda: TensorDict({}, [2.5]), NO_SHAPE, "batch.?size"),
    (lambda: TensorDict({}, "a"), TypeError, "a batch_size must be"),
    (lambda: TensorDict({"a": 1}, b=1), ValueError, "not both"),
    (lambda: TensorDict({}, device="nowhere"), RuntimeError, "nowhere"),
    (lambda: LazyStackedTensorDict(TensorDict(), stack_dim=3), IndexError, "out of range"),
    (lambda: LAZY["b"], KeyError, "(?s)b.*Lazy|Lazy.*b"),
    (lambda: RAGGED["a"], RuntimeError, "(?s)'a'.*(as_padded_tensor|as_list|as_nested_tensor)"),
    (
        lambda: TensorDict.from_modules([torch.nn.Linear(2, 2)]),
        TypeError,
        r"nn.Modules, got list.*from_modules\(\*modules\)",
    ),
]


def test_errors_of_constructors_and_functions():
    for number, (call, error, words) in enumerate(OF_NONE):
        refused(make(), lambda td, c=call: c(), error, words, f"mistake {number}")


@pytest.mark.parametrize(
    "method, source",
    [
        ("flatten_keys", {"b": {"c": 1}, "b.c": 2}),
        ("unflatten_keys", {"b": 1, "b.c": 2}),
        ("unflatten_keys", {"q.r": 1, "b": 1, "b.c": 2}),
        ("unflatten_keys", {"b.c": 1, "b.c.d": 2}),
        ("unflatten_keys", {"b.c": 1, "b": {"c": 2}}),
    ],
)
def test_conflicting_names(method, source):
    for inplace in (False, True):
        td = TensorDict(source)
        refused(td, lambda td, i=inplace: getattr(td, method)(inplace=i), KeyError, "b.*c", method)


def test_a_failed_setter_leaves_the_children_unchanged():
    td = TensorDict({"m": {"c": torch.ones(B, T, 4)}, "n": {"e": torch.ones(B, T, A)}}, [B, T])
    refused(td, lambda td: setattr(td, "batch_size", [B, T, 4]), RuntimeError, "e", "batch size")


def test_attributes_have_no_getattr_hook():
    """With a `__getattr__` each read of an attribute, found or not, takes a third longer."""
    assert not hasattr(TensorDict, "__getattr__")


# ------------------------------------------------------------------ texts that programs look for


def lazy():
    return lazy_stack(list(make().unbind(0)), 0)


@tensorclass
class Point:
    x: torch.Tensor


def rows_of():
    return make()._get_sub_tensordict(0)


LOCKED_TEXT = "Cannot modify locked TensorDict. For in-place modification"
CLASHING = {"a": {"b": 1}, "a.b": 2}
INCOMPATIBLE = (
    "the Tensor observation has shape torch.Size([2, 3, 5]) which is incompatible with the "
    "batch-size torch.Size([2, 4])."
)
# a call, and how the error of PyTorch's tensordict begins, which its users match
TEXTS = {
    "locked": (lambda: make(lock=True).set("z", ONES), LOCKED_TEXT),
    "locked stack": (lambda: lazy().lock_().set("z", ONES), LOCKED_TEXT),
    "unlock an entry": (
        lambda: (td := make(lock=True))["next"].unlock_() or td,
        "Cannot unlock a tensordict that is part of a locked graph. Unlock the root tensordict",
    ),
    "lock rows": (lambda: rows_of().lock_(), "Cannot lock a"),
    "map rows": (
        lambda: rows_of().memmap_(),
        "Converting a sub-tensordict values to memmap cannot be done",
    ),
    "share rows": (
        lambda: rows_of().share_memory_(),
        "Casting a sub-tensordict values to shared memory cannot be done",
    ),
    "detach rows": (
        lambda: rows_of().detach_(),
        "Detaching a sub-tensordict in-place cannot be done",
    ),
    "name rows": (
        lambda: setattr(rows_of(), "names", ["x"]),
        "Names of a subtensordict cannot be modified",
    ),
    "batch size of rows": (
        lambda: setattr(rows_of(), "batch_size", []),
        "Modifying the batch size of a lazy representation of a tensordict is not permitted",
    ),
    "batch size": (lambda: setattr(make(), "batch_size", [B, 4]), INCOMPATIBLE),
    "device": (
        lambda: setattr(make(), "device", "cpu"),
        "device cannot be set using tensordict.device = device",
    ),
    "too few names": (
        lambda: make(names=["x"]),
        "the length of the dimension names must equate the tensordict batch_dims attribute. "
        "Got ['x'] for batch_dims 2",
    ),
    "equal names": (
        lambda: make(names=["x", "x"]),
        "Some dimension names are non-unique: ['x', 'x'].",
    ),
    "refine_names": (
        lambda: make(names=["x", "y"]).refine_names("z", "y"),
        "refine_names: cannot coerce TensorDict names ['x', 'y'] with ['z', 'y']",
    ),
    "rename": (
        lambda: make(names=["x", "y"]).rename(z="y"),
        "Some names to be renamed were not part of the tensordict names",
    ),
    "rename nothing": (
        lambda: make().rename(),
        "Neither a name map nor a name list was passed",
    ),
    "rename in two ways": (
        lambda: make().rename("x", y="z"),
        "Passed both a name map and a name list",
    ),
    "flatten_keys": (
        lambda: TensorDict(CLASHING).flatten_keys("."),
        "Flattening keys in tensordict causes keys 'a.b' to collide",
    ),
    "unflatten_keys": (
        lambda: TensorDict({"a": 1, "a.b": 2}).unflatten_keys("."),
        "Unflattening key(s) in tensordict will override an existing for unflattened key "
        "('a', 'b')",
    ),
    "rename_key_": (
        lambda: lazy().rename_key_("action", "next", safe=True),
        "key next already present in TensorDict",
    ),
    "into a leaf": (
        lambda: make()["action", "z"],
        "'action' is a Tensor, not a tensordict, so it has no entry 'z'",
    ),
    "missing in a stack": (
        lambda: lazy()["z"],
        'key "z" not found in TensorDict with keys',
    ),
    "unravel_key": (lambda: unravel_key(1), "key should be a Sequence<NestedKey>"),
    "unravel_key_list": (
        lambda: unravel_key_list("a"),
        "unravel_key_list(): incompatible function arguments",
    ),
    "through a leaf": (
        lambda: make().set(("action", "z"), ONES),
        "The entry action is already present in tensordict",
    ),
    "state dict": (
        lambda: make().load_state_dict({"b": ONES}),
        "Cannot load state-dict because the key sets don't match",
    ),
    "truth": (
        lambda: bool(make()),
        "Converting a tensordict to boolean value is not permitted",
    ),
    "truth of an instance": (
        lambda: bool(Point(x=ONES)),
        "Converting a tensorclass to boolean value is not permitted",
    ),
    "device of an instance": (
        lambda: setattr(Point(x=ONES), "device", "cpu"),
        "device cannot be set using tensorclass.device = device",
    ),
    "rows of an instance": (
        lambda: Point(x=ONES, batch_size=[B]).__setitem__(0, "a"),
        "__setitem__ only supports tensorclasses, tensordicts, numeric scalars and tensors. Got",
    ),
    "all": (
        lambda: make().all(dim=2),
        "dim must be greater than or equal to -tensordict.batch_dims and smaller than "
        "tensordict.batch_dims",
    ),
    "split nothing": (
        lambda: make().split([], 0),
        "Insufficient number of elements in split_size",
    ),
    "split by text": (
        lambda: make().split("1", 0),
        "split(): argument 'split_size' must be int or list of ints",
    ),
    "split backwards": (
        lambda: make().split([3, -1], 0),
        "split_with_sizes expects split_sizes have only non-negative entries",
    ),
    "repeat": (
        lambda: make().repeat(2),
        "The number of repeat elements must match the number of dimensions of the tensordict",
    ),
    "gather": (
        lambda: make().gather(2, torch.zeros(1, 1, dtype=torch.int64)),
        "Cannot gather tensordict with shape torch.Size([2, 3]) along dim 2",
    ),
    "flatten": (
        lambda: make().flatten(1, 0),
        "The end dimension must be greater or equal to the start dim",
    ),
    "stack": (
        lambda: torch.stack([make(), make()], 3),
        "Dimension out of range (expected to be in range of [-3, 2], but got 3)",
    ),
    "lazy_stack": (
        lambda: lazy_stack([make(), make()], 3),
        "Stack dim 3 is too big for batch size",
    ),
    "where": (
        lambda: make().where(ONES > 0, make().exclude("action")),
        "Key action not found and no pad value provided",
    ),
    "map": (
        lambda: make().map(torch.neg, chunksize=1, num_chunks=2),
        "ither chunksize or num_chunks must be provided, but not both",
    ),
    "source": (
        lambda: TensorDict("a", []),
        "A TensorDict source is expected to be a TensorDictBase sub-type or a Mapping",
    ),
    "pad_sequence": (lambda: pad_sequence([]), "list_of_tensordicts cannot be empty"),
    "dense_stack_tds": (
        lambda: dense_stack_tds([make(), make()]),
        "If a list of tensordicts is provided, stack_dim must not be None",
    ),
    "share a mapped one": (
        lambda: make().memmap_().share_memory_(),
        "memmap and shared memory are mutually exclusive features",
    ),
    "map a shared one": (
        lambda: make().share_memory_().memmap_(),
        "memmap and shared memory are mutually exclusive features",
    ),
    "make_memmap": (
        lambda: make().make_memmap("z", shape=[B, T], dtype=torch.float32),
        "Can only make a memmap tensor within a memory-mapped tensordict",
    ),
    "saved_path": (
        lambda: make().saved_path,
        "The tensordict has no saved path (memmap=False, path=None)",
    ),
    "two sources": (
        lambda: TensorDict({"a": 1}, b=2),
        "Either a dictionary or a sequence of kwargs must be provided, not both",
    ),
    "from_dict": (
        lambda: TensorDict.from_dict({"a": ONES}, batch_size=[B], batch_dims=1),
        "Cannot pass both batch_size and batch_dims to `from_dict`",
    ),
    "set_ in some members": (
        lambda: lazy_stack([TensorDict(a=1), TensorDict(b=1)]).set_("a", torch.zeros(2)),
        "setting a value in-place on a stack of TensorDict is only permitted if all members of "
        "the stack have this key",
    ),
    "update with absent keys": (
        lambda: make().update(make().select("action")[:1], update_batch_size=True),
        "Some keys of the dest tensordict are not present in the source during update with "
        "mismatching batch-size",
    ),
    "update with more members": (
        lambda: lazy().update(lazy_stack([TensorDict(a=ONES[0], batch_size=[T])] * 3)),
        "cannot update stacked tensordicts with different shapes",
    ),
    "write more members": (
        lambda: lazy().update_(lazy_stack([TensorDict(action=ONES[0], batch_size=[T])] * 3)),
        "cannot update stacked tensordicts with different shapes",
    ),
    "apply to another batch size": (
        lambda: make().apply(torch.neg, out=make(), batch_size=[B]),
        "batch_size and out.batch_size must be equal when both are provided",
    ),
    "apply to another device": (
        lambda: make().apply(torch.neg, out=make(), device="cpu"),
        "device and out.device must be equal when both are provided",
    ),
    "apply in place": (
        lambda: lazy().apply(torch.neg, inplace=True, batch_size=[B]),
        "Cannot pass other arguments to LazyStackedTensorDict.apply when inplace=True",
    ),
    "a stack of something": (
        lambda: LazyStackedTensorDict(make(), 3),
        "Expected all inputs to be TensorDictBase instances but got",
    ),
    "map an array": (
        lambda: MemoryMappedTensor.from_tensor(ONES.numpy()),
        "Convert input to torch.Tensor before calling MemoryMappedTensor.from_tensor",
    ),
    "a field twice": (
        lambda: Point.from_tensordict(TensorDict(x=ONES), {"x": 1}),
        "x is present in both tensor and non-tensor dicts",
    ),
    "state dict of an instance": (
        lambda: Point(x=ONES).load_state_dict({"x": ONES, "z": ONES}),
        "Key 'z' wasn't expected in the state-dict",
    ),
    "map with parameters": (
        lambda: TensorDictParams(TensorDict(a=ONES)).map(torch.neg),
        "Cannot call map on a TensorDictParams object",
    ),
    "a stack of parameters": (
        lambda: TensorDictParams(lazy()),
        "Using a LazyStackedTensorDict within a TensorDictParams isn't permitted",
    ),
    "data of several values": (
        lambda: NonTensorStack("a", "b").data,
        "Cannot get the non-unique data of a NonTensorStack. Use .tolist() instead.",
    ),
    "backward": (
        lambda: make().backward(),
        "backward() cannot be called on a tensordict that has no leaf tensor requiring gradients",
    ),
    "sparse gradients": (
        lambda: torch.gather(make(), 0, torch.zeros(1, 1, dtype=torch.int64), sparse_grad=True),
        "sparse_grad=True not implemented for torch.gather(tensordict, ...)",
    ),
    "map parameters": (
        lambda: TensorDictParams(TensorDict(a=ONES)).memmap_(),
        "Cannot build a memmap TensorDict in-place",
    ),
}


@pytest.mark.parametrize("what", TEXTS)
def test_texts_that_programs_for_tensordict_match(what):
    call, text = TEXTS[what]
    with pytest.raises(Exception, match=re.escape(text)):
        call()
