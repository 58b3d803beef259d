"""Errors: the message has the problem, the value received and the call that works.

The container stays as it was. Messages are matched by the words a reader needs, not whole.
"""

import re

import pytest
import torch

from raffia import LazyStackedTensorDict, TensorClass, TensorDict, lazy_stack, unravel_key

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


# ------------------------------------------------------------- what fits in some forms only


def lazy(num=2):
    return lazy_stack([TensorDict(action=ONES[0], batch_size=[T])] * num)


class Point(TensorClass):
    x: torch.Tensor


UNFIT = {  # a call, the type of its error, and words of it
    "set_ in some members": (
        lambda: lazy_stack([TensorDict(a=1), TensorDict(b=1)]).set_("a", torch.zeros(2)),
        (KeyError, "the entry 'a' is missing in members [1]"),
    ),
    "update with absent keys": (
        lambda: make().update(make().select("action")[:1], update_batch_size=True),
        (RuntimeError, "the source has no entries"),
    ),
    "stack of different keys": (
        lambda: torch.stack([make()] * 9 + [make().exclude("action")]),
        (
            RuntimeError,
            r"not all of them have ['action']; number 0 has 'action', number 9 does not.",
        ),
    ),
    "update with more members": (
        lambda: lazy().update(lazy(3)),
        (ValueError, "2 members, and the source 3: update(source, update_batch_size=True)"),
    ),
    "write more members": (
        lambda: lazy().update_(lazy(3)),
        (ValueError, "2 members, and the source 3"),
    ),
    "apply to another batch size": (
        lambda: make().apply(torch.neg, out=make(), batch_size=[B]),
        (RuntimeError, "batch_size=[2] is not that of out, [2, 3]"),
    ),
    "apply to another device": (
        lambda: make().apply(torch.neg, out=make(), device="cpu"),
        (RuntimeError, "device=cpu is not that of out, None"),
    ),
    "a field twice": (
        lambda: Point.from_tensordict(TensorDict(x=ONES), {"x": 1}),
        (KeyError, "the field 'x' is given twice"),
    ),
    "state dict of an instance": (
        lambda: Point(x=ONES).load_state_dict({"x": ONES, "z": ONES}),
        (KeyError, "unexpected keys ['z']"),
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_calls_that_fit_in_another_form_are_refused(what):
    call, (kind, text) = UNFIT[what]
    with pytest.raises(kind, match=re.escape(text)):
        call()
