"""Mistakes: the message says what was wrong, what was seen and what works.

The container stays as it was. Messages are matched by the words a reader needs, not whole.
Classes and functions with `ours` in their name ask for more than PyTorch's tensordict gives.
"""

import re

import pytest
import torch

from raffia import TensorDict, lazy_stack, unravel_key

B, T, A = 2, 3, 5


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
}
WRITABLE = ["dressed", "lazy0", "lazy1"]


def state(td):
    """Everything a failed call must not change: order and identity of entries, values, metadata."""
    nodes = [td, *(v for v in td.values(True) if not isinstance(v, torch.Tensor))]
    return (
        list(td.keys(True)),
        [id(v) for v in td.values(True, True)] if isinstance(td, TensorDict) else None,
        [v.clone() for v in td.values(True, True)],
        [(n.batch_size, n.names, n.device, n.is_locked) for n in nodes],
    )


def same_state(one, two):
    return (
        one[:2] == two[:2]
        and one[3] == two[3]
        and all(torch.equal(x, y) for x, y in zip(one[2], two[2], strict=True))
    )


class fails:
    """The block raises `error`, its message matches all of `words`; `td` is unchanged."""

    def __init__(self, td, error, *words):
        self.td, self.error, self.words = td, error, words

    def __enter__(self):
        self.before = state(self.td)

    def __exit__(self, kind, error, traceback):
        assert kind is not None, f"nothing was raised instead of {self.error}"
        if not issubclass(kind, self.error):
            return False
        message = str(error)
        for word in self.words:
            assert re.search(word, message), f"{word!r} is not in the message: {message}"
        assert same_state(self.before, state(self.td)), "the container has changed"
        return True


READS_AND_WRITES = {
    "[]": lambda td, key: td[key],
    "pop": lambda td, key: td.pop(key),
    "select": lambda td, key: td.select(key),
    "fill_": lambda td, key: td.fill_(key, 0.0),
    "set_": lambda td, key: td.set_(key, torch.ones(B, T)),
    "set_at_": lambda td, key: td.set_at_(key, 0.0, 0),
    "get_item_shape": lambda td, key: td.get_item_shape(key),
    "rename_keys": lambda td, key: td.rename_keys({key: "q"}),
    "split_keys": lambda td, key: td.split_keys([key]),
    "update_": lambda td, key: td.update_({key: torch.ones(B, T)}),
    "update_at_": lambda td, key: td.update_at_({key: torch.ones(T)}, 0),
    "del": lambda td, key: td.__delitem__(key),
    "del_": lambda td, key: td.del_(key),
    "rename_key_": lambda td, key: td.rename_key_(key, "q"),
    "select inplace": lambda td, key: td.select("action", key, inplace=True),
    "cat_tensors": lambda td, key: td.cat_tensors("action", key, out_key="q"),
    "stack_tensors": lambda td, key: td.stack_tensors("action", key, out_key="q"),
    "split_keys inplace": lambda td, key: td.split_keys(["action"], [key], inplace=True),
}
MISSING = {
    "acton": "action",
    "obsevation": "observation",
    ("next", "rewrd"): "reward",
    ("next", "info", "live"): "lives",
}


class TestMissingKey:
    @pytest.mark.parametrize("what", READS_AND_WRITES)
    def test_names_the_key(self, what):
        td = make(device="cpu", names=["x", "y"])
        for key in MISSING:
            with fails(td, KeyError, key if isinstance(key, str) else key[-1]):
                READS_AND_WRITES[what](td, key)

    @pytest.mark.parametrize("what", ["[]", "pop", "select"])
    def test_lists_the_keys_that_are_there(self, what):
        td = make()
        with fails(td, KeyError, "action", "next", "observation"):
            READS_AND_WRITES[what](td, "zz")

    def test_locked(self):
        td = make(lock=True)
        for what in ("[]", "pop", "select", "fill_", "set_", "get_item_shape"):
            with fails(td, KeyError, "zz"):
                READS_AND_WRITES[what](td, "zz")

    @pytest.mark.parametrize(
        "key", ["zz", ("next", "zz"), ("zz", "a"), "next.reward", "Action", ""], ids=str
    )
    def test_get_does_not_raise(self, key):
        for kind in KINDS:
            assert KINDS[kind]().get(key) is None


class TestMissingKey_ours:
    @pytest.mark.parametrize("what", READS_AND_WRITES)
    @pytest.mark.parametrize("kind", ["plain", "lazy0", "lazy1"])
    def test_names_the_nearest(self, what, kind):
        td = KINDS[kind]()
        for key, near in MISSING.items():
            with fails(td, KeyError, f"Did you mean ['\"(].*{near}"):
                READS_AND_WRITES[what](td, key)

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_hint_where_nothing_is_near(self, kind):
        td = KINDS[kind]()
        with pytest.raises(KeyError) as error:
            td["zzzzzz"]
        assert "Did you mean" not in str(error.value)

    @pytest.mark.parametrize("kind", KINDS)
    def test_readable(self, kind):
        """KeyError shows the repr of its argument unless told otherwise: quotes and escapes."""
        with pytest.raises(KeyError) as error:
            KINDS[kind]()["acton"]
        assert "\\'" not in str(error.value) and not str(error.value).startswith(("'", '"'))

    def test_a_nested_one_of_this_name(self):
        with fails(td := make(), KeyError, re.escape("('next', 'reward')")):
            td["reward"]

    def test_a_dotted_path(self):
        with fails(td := make(), KeyError, re.escape("('next', 'reward')")):
            td["next.reward"]

    def test_lists_the_keys_of_the_level_that_was_reached(self):
        with fails(td := make(), KeyError, "zz", "'info'", "'reward'"):
            td["next", "zz"]
        with fails(td, KeyError, "zz", "'action'"):
            td["zz", "reward"]

    @pytest.mark.parametrize("what", ["set_", "set_at_", "update_"])
    @pytest.mark.parametrize("kind", WRITABLE)
    def test_writing_in_place_makes_no_levels(self, what, kind):
        td = KINDS[kind]()
        with fails(td, KeyError, "zz"):
            READS_AND_WRITES[what](td, ("zz", "reward"))

    def test_of_an_empty_container(self):
        with fails(td := TensorDict({}, [B]), KeyError, "action"):
            td["action"]
        with fails(td, KeyError):
            td.popitem()

    def test_names_the_member_of_a_lazy_stack(self):
        """The key is in one member only: the message says so."""
        td = lazy_stack([TensorDict(a=1, b=2), TensorDict(a=1, c=2)])
        with pytest.raises(KeyError, match="b"):
            td["b"]
        with pytest.raises(KeyError, match="Lazy"):
            td["b"]


class TestThroughALeaf_ours:
    @pytest.mark.parametrize(
        "what", ["[]", "pop", "select", "set_", "fill_", "del", "rename_key_", "get_item_shape"]
    )
    @pytest.mark.parametrize("kind", WRITABLE)
    def test_says_that_it_is_a_tensor(self, what, kind):
        td = KINDS[kind]()
        with fails(td, KeyError, "action", "Tensor", "zz"):
            READS_AND_WRITES[what](td, ("action", "zz"))
        with fails(td, KeyError, "reward", "Tensor", "zz"):
            READS_AND_WRITES[what](td, ("next", "reward", "zz"))

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_a_value_error_too(self, kind):
        with pytest.raises(ValueError, match="action"):
            KINDS[kind]()["action", "zz"]

    @pytest.mark.parametrize("kind", WRITABLE)
    def test_writing(self, kind):
        td = KINDS[kind]()
        for write in (
            lambda: td.set(("action", "zz"), torch.ones(B, T)),
            lambda: td.__setitem__(("action", "zz", "y"), torch.ones(B, T)),
            lambda: td.setdefault(("action", "zz"), torch.ones(B, T)),
            lambda: td.update({("action", "zz"): torch.ones(B, T)}),
            lambda: td.rename_key_("observation", ("action", "zz")),
        ):
            with fails(td, KeyError, "action"):
                write()


MALFORMED = [1, None, (), ("a", 1), ["a"], 2.5]


class TestMalformedKey:
    @pytest.mark.parametrize("what", ["get", "set", "pop", "construct", "update", "[]=tuple"])
    @pytest.mark.parametrize("key", [k for k in MALFORMED if not isinstance(k, list)], ids=str)
    def test_shows_the_key(self, what, key):
        td, value = make(), torch.ones(B, T)
        act = {
            "get": lambda: td.get(key),
            "set": lambda: td.set(key, value),
            "pop": lambda: td.pop(key),
            "construct": lambda: TensorDict({key: value}, [B, T]),
            "update": lambda: td.update({key: value}),
            "[]=tuple": lambda: td.set(("n", key), value),
        }[what]
        with fails(td, KeyError, "string", re.escape(repr(key))):
            act()

    @pytest.mark.parametrize("key", MALFORMED, ids=str)
    def test_everywhere_ours(self, key):
        td, value = make(), torch.ones(B, T)
        for act in (
            lambda: td.set_(key, value),
            lambda: td.setdefault(key, value),
            lambda: td.del_(key),
            lambda: td.select(key),
            lambda: td.exclude(key),
            lambda: td.rename_key_(key, "q"),
            lambda: td.rename_key_("action", key),
            lambda: td.create_nested(key),
            lambda: td.fill_(key, 0.0),
            lambda: td.set_at_(key, 0.0, 0),
            lambda: td.get_at(key, 0),
            lambda: unravel_key(key),
        ):
            with fails(td, (KeyError, TypeError), re.escape(repr(key))):
                act()

    def test_several_keys_in_a_list_ours(self):
        td = make()
        for method in (td.select, td.exclude):
            with fails(td, (KeyError, TypeError), re.escape("['action', 'next']")):
                method(["action", "next"])


class TestBatchSize:
    @pytest.mark.parametrize("shape", [(), (T,), (B,), (T, B), (B, 1)], ids=str)
    @pytest.mark.parametrize("kind", WRITABLE)
    def test_set_names_key_and_both_shapes(self, shape, kind):
        td, value = KINDS[kind](), torch.ones(shape)
        words = [
            "batch dimension mismatch",
            re.escape(str(torch.Size([B, T]))),
            re.escape(str(value.shape)),
            "key .*'z'",
        ]
        for write in (
            lambda: td.set("z", value),
            lambda: td.__setitem__("z", value),
            lambda: td.update({"z": value}),
            lambda: td.setdefault("z", value),
            lambda: td["next"].set("z", value),
            lambda: td.set(("next", "z"), value),
        ):
            with fails(td, RuntimeError, *words):
                write()
        with fails(td, RuntimeError, "key 'action'"):
            td["action"] = value

    @pytest.mark.parametrize(
        "source", [{"z": torch.ones(T)}, {"n": {"z": torch.ones(T)}}, {("n", "z"): torch.ones(T)}]
    )
    def test_constructor(self, source):
        with pytest.raises(RuntimeError, match=r"batch dimension mismatch.*\[2\].*\[3\].*'z'"):
            TensorDict(source, [B])

    def test_scalar_in_a_batch(self):
        with fails(td := make(), RuntimeError, "batch dimension mismatch", "'z'", "[Ss]calar"):
            td["z"] = 1.0

    @pytest.mark.parametrize(
        "batch, key", [([T], "observation"), ([B, T, 7], "observation"), ([B, 4], "observation")]
    )
    def test_setter(self, batch, key):
        td = make()
        if batch == [B, T, 7]:
            del td["next"], td["action"]
        with fails(
            td,
            RuntimeError,
            key,
            re.escape(str(torch.Size(batch))),
            re.escape(str(torch.Size([B, T, A]))),
        ):
            td.batch_size = batch

    def test_nested_container(self):
        td, inner = make(), TensorDict({"c": torch.ones(4, T)}, [4])
        for value in (inner, {"c": torch.ones(4, T)}):
            with fails(td, RuntimeError, "c", re.escape(str(torch.Size([B, T])))):
                td["n"] = value
        assert inner.batch_size == (4,)

    def test_index_assignment(self):
        td = make()
        with fails(td, RuntimeError, r"\[3\]", r"\[4\]"):
            td[0] = TensorDict({"action": torch.ones(4)}, [4])


class TestBatchSize_ours:
    @pytest.mark.parametrize("key", [("n", "z"), ("n", "m", "z")], ids=str)
    @pytest.mark.parametrize("kind", WRITABLE)
    def test_a_failed_set_leaves_no_empty_levels(self, key, kind):
        td = KINDS[kind]()
        with fails(td, RuntimeError, "batch dimension mismatch"):
            td[key] = torch.ones(T)
        with fails(td, RuntimeError, "batch dimension mismatch"):
            td.setdefault(key, torch.ones(T))

    def test_a_failed_setter_leaves_the_children(self):
        td = TensorDict({"m": {"c": torch.ones(B, T, 4)}, "n": {"e": torch.ones(B, T, A)}}, [B, T])
        with fails(td, RuntimeError, "e"):
            td.batch_size = [B, T, 4]
        assert td["m"].batch_size == (B, T)

    def test_constructor_names_the_whole_path(self):
        with pytest.raises(RuntimeError, match="n.*z"):
            TensorDict({"n": {"z": torch.ones(T)}}, [B])

    @pytest.mark.parametrize("batch", ["ab", [2.5], {"a": 1}], ids=str)
    def test_not_a_shape(self, batch):
        with pytest.raises((TypeError, ValueError), match="batch.?size"):
            TensorDict({}, batch)

    def test_scalar_tells_what_works(self):
        with pytest.raises(RuntimeError, match="expand|full|NonTensorData|set_non_tensor"):
            make()["z"] = 1.0


class TestLocked:
    ACTS = {
        "set": lambda td: td.set("z", torch.ones(B, T)),
        "[]": lambda td: td.__setitem__("action", torch.ones(B, T)),
        "nested": lambda td: td.__setitem__(("next", "z"), torch.ones(B, T)),
        "child": lambda td: td["next"].set("z", torch.ones(B, T)),
        "update": lambda td: td.update({"z": torch.ones(B, T)}),
        "pop": lambda td: td.pop("action"),
        "del": lambda td: td.__delitem__("action"),
        "rename": lambda td: td.rename_key_("action", "z"),
        "clear": lambda td: td.clear(),
    }

    @pytest.mark.parametrize("what", ACTS)
    def test_points_to_in_place_writing(self, what):
        for td in (make(lock=True), KINDS["lazy0"]().lock_()):
            with fails(td, RuntimeError, "Cannot modify locked", r"set_\("):
                self.ACTS[what](td)

    @pytest.mark.parametrize("what", ACTS)
    def test_points_to_unlocking_ours(self, what):
        for td in (make(lock=True), KINDS["lazy0"]().lock_()):
            with fails(td, RuntimeError, "Cannot modify locked", "unlock_"):
                self.ACTS[what](td)

    def test_unlocking_a_child(self):
        td = make(lock=True)
        for key in ("next", ("next", "info")):
            with fails(td, RuntimeError, "[Uu]nlock the root"):
                td[key].unlock_()


class TestRename:
    @pytest.mark.parametrize("kind", WRITABLE)
    @pytest.mark.parametrize("new", ["observation", ("next", "reward"), "next"], ids=str)
    def test_safe_names_the_one_that_is_there(self, kind, new):
        td = KINDS[kind]()
        with fails(td, KeyError, "already", new if isinstance(new, str) else new[-1]):
            td.rename_key_("action", new, safe=True)

    @pytest.mark.parametrize(
        "mapping", [{"action": "q", "observation": "q"}, {"action": "next"}], ids=str
    )
    def test_rename_keys(self, mapping):
        with fails(td := make(), ValueError, "q|next"):
            td.rename_keys(mapping)

    @pytest.mark.parametrize("kind", WRITABLE)
    def test_a_name_below_a_leaf_ours(self, kind):
        td = KINDS[kind]()
        with fails(td, KeyError, "action"):
            td.rename_key_("observation", ("action", "z"))
        with fails(td, KeyError, "reward"):
            td.rename_key_("observation", ("next", "reward", "z"))


class TestFlattenKeys:
    def test_collision(self):
        td = TensorDict({"b": {"c": 1}, "b.c": 2})
        for inplace in (False, True):
            with fails(td, KeyError, re.escape("b.c")):
                td.flatten_keys(inplace=inplace)

    def test_unflatten_collision(self):
        with fails(td := TensorDict({"b": 1, "b.c": 2}), KeyError, "b.*c"):
            td.unflatten_keys()

    @pytest.mark.parametrize(
        "source", [{"q.r": 1, "b": 1, "b.c": 2}, {"b.c": 1, "b.c.d": 2}], ids=str
    )
    def test_unflatten_collision_in_place_ours(self, source):
        with fails(td := TensorDict(source), KeyError, "b.*c"):
            td.unflatten_keys(inplace=True)

    @pytest.mark.parametrize("method", ["flatten_keys", "unflatten_keys"])
    def test_separator_ours(self, method):
        with fails(td := make(), TypeError, "3"):
            getattr(td, method)(3)


class TestPartlyDone_ours:
    """A call that names several entries does nothing where one of them is wrong."""

    def test_separates(self):
        with fails(td := make(), KeyError, "zz"):
            td.separates("action", "zz")

    @pytest.mark.parametrize("method", ["cat_tensors", "stack_tensors"])
    def test_join(self, method):
        td = make()
        with fails(td, RuntimeError):
            getattr(td, method)("action", "observation", out_key="q")
        with fails(td, KeyError, "action|present|already|Tensor"):
            getattr(td, method)("observation", "observation", out_key=("action", "q"))


class TestConstructor:
    @pytest.mark.parametrize("source", [[1, 2], torch.ones(2), "abc", 3, [("a", torch.ones(2))]])
    def test_source(self, source):
        with pytest.raises(
            (ValueError, TypeError), match=f"(Mapping|mapping|dict).*{type(source).__name__}"
        ):
            TensorDict(source, [2])

    def test_both(self):
        with pytest.raises(ValueError, match="not both"):
            TensorDict({"a": 1}, b=1)

    def test_device(self):
        with pytest.raises(RuntimeError, match="nowhere"):
            TensorDict({}, device="nowhere")

    def test_device_setter_tells_what_works(self):
        with fails(td := make(), (RuntimeError, AttributeError), r"\.to\("):
            td.device = "meta"

    def test_inside_itself(self):
        with fails(td := make(), (ValueError, RuntimeError), "itself", "'me'"):
            td["me"] = td

    def test_inside_its_own_child_ours(self):
        with fails(td := make(), (ValueError, RuntimeError), "itself"):
            td["next", "me"] = td


class TestProtocols:
    def test_truth_value(self):
        with fails(td := make(), RuntimeError, "bool", "is_empty"):
            bool(td)

    def test_iteration(self):
        with fails(td := TensorDict(a=1), TypeError, r"keys\(\)"):
            list(td)

    def test_hash(self):
        with fails(td := make(), TypeError, "unhashable"):
            hash(td)

    def test_attribute(self):
        with fails(td := make(), AttributeError, "action"):
            td.action  # noqa: B018

    def test_no_hook_slows_attributes_ours(self):
        """With a `__getattr__` each read of an attribute, found or not, takes a third longer."""
        assert not hasattr(TensorDict, "__getattr__")

    @pytest.mark.parametrize("bad", [3, [("z", torch.ones(B, T))]], ids=str)
    def test_update_source_ours(self, bad):
        for method in ("update", "update_"):
            with fails(td := make(), TypeError, type(bad).__name__):
                getattr(td, method)(bad)

    def test_keys_to_update_is_a_list_of_keys_ours(self):
        with fails(td := make(), TypeError, "str"):
            td.update({"z": torch.ones(B, T)}, keys_to_update="z")


class TestShapesInPlace:
    @pytest.mark.parametrize("kind", ["plain", "locked", "dressed"])
    def test_names_the_key_and_both_shapes(self, kind):
        td = KINDS[kind]()
        for write in (
            lambda: td.set_("observation", torch.ones(B, T, 6)),
            lambda: td.update_({"observation": torch.ones(B, T, 6)}),
        ):
            with fails(td, RuntimeError, "observation", r"\[2, 3, 6\]", r"\[2, 3, 5\]"):
                write()

    @pytest.mark.parametrize("kind", KINDS)
    def test_everywhere_ours(self, kind):
        td = KINDS[kind]()
        for write in (
            lambda: td.set_("observation", torch.ones(B, T, 6)),
            lambda: td.set_(("next", "info", "lives"), torch.ones(B, T, 6)),
            lambda: td.update_({"observation": torch.ones(B, T, 6)}),
            lambda: td.set_at_("observation", torch.ones(T, 6), 0),
            lambda: td.update_at_({"observation": torch.ones(T, 6)}, 0),
        ):
            with fails(td, RuntimeError, "observation|lives", "6"):
                write()

    def test_a_tensor_is_no_container(self):
        td = make()
        with fails(td, (RuntimeError, ValueError, TypeError), "next"):
            td.set_("next", torch.ones(B, T))
        with fails(td, (RuntimeError, ValueError, TypeError), "action"):
            td.set_("action", {"c": torch.ones(B, T)})


class TestNames:
    @pytest.mark.parametrize("names", [["p"], ["p", "q", "r"], ["p", "p"]], ids=str)
    def test_setter_shows_them(self, names):
        td = make(names=["x", "y"])
        with fails(td, (ValueError, RuntimeError), re.escape(str(names))):
            td.names = names
        with pytest.raises((ValueError, RuntimeError), match=re.escape(str(names))):
            make(names=names)

    def test_rename_shows_the_names_that_are_there(self):
        td = make(names=["x", "y"])
        for method in (td.rename, td.rename_):
            with fails(td, (ValueError, RuntimeError), "q", re.escape("['x', 'y']")):
                method(q="w")
            with fails(td, (ValueError, RuntimeError), "list|both"):
                method("p", "q", x="w")

    def test_refine(self):
        td = make(names=["x", "y"])
        with fails(td, (ValueError, RuntimeError), "refine_names", re.escape("['x', 'y']"), "q"):
            td.refine_names("x", "q")

    @pytest.mark.parametrize("args", [("a", "b", "c"), ("a", "a"), (..., "a", ...)], ids=str)
    def test_refine_ours(self, args):
        td = make()
        with fails(td, (ValueError, RuntimeError), "name"):
            td.refine_names(*args)


class TestIndexOfAKey_ours:
    @pytest.mark.parametrize("index", [("action", 0), (0, "action")], ids=str)
    def test_key_and_index_at_once(self, index):
        with fails(td := make(), (TypeError, KeyError, IndexError), "action"):
            td[index]


class TestStackAndCat:
    def other(self, **changes):
        td = make().exclude(*[k for k, v in changes.items() if v is None])
        return td.update({k: v for k, v in changes.items() if v is not None})

    @pytest.mark.parametrize("join", [torch.stack, torch.cat], ids=["stack", "cat"])
    def test_keys_differ(self, join):
        td = make()
        for other in (self.other(action=None), self.other(z=torch.ones(B, T))):
            with fails(td, (RuntimeError, KeyError), "keys"):
                join([td, other])

    @pytest.mark.parametrize("join", [torch.stack, torch.cat], ids=["stack", "cat"])
    def test_keys_differ_names_them_ours(self, join):
        td = make()
        for key, other in (
            ("action", self.other(action=None)),
            ("zz", self.other(zz=torch.ones(B, T))),
        ):
            with fails(td, (RuntimeError, KeyError), f"'{key}'"):
                join([td, other])

    def test_shapes_differ(self):
        td, other = make(), self.other(observation=torch.ones(B, T, 6))
        with fails(td, RuntimeError, "observation", "6", "5"):
            torch.stack([td, other])

    def test_shapes_differ_ours(self):
        td, other = make(), make()
        other["next", "info", "lives"] = torch.ones(B, T, 6)
        for join in (torch.stack, torch.cat):
            with fails(td, RuntimeError, "lives", "6", "4"):
                join([td, other])

    def test_batch_sizes_differ(self):
        td, other = make(), make()[0]
        for join in (torch.stack, lazy_stack):
            with fails(td, RuntimeError, "batch", r"\[2, 3\]", r"\[3\]"):
                join([td, other])

    @pytest.mark.parametrize(
        "join", [torch.stack, torch.cat, lazy_stack], ids=["stack", "cat", "lazy_stack"]
    )
    def test_nothing(self, join):
        with pytest.raises((RuntimeError, ValueError), match="empty"):
            join([])

    def test_a_ragged_entry_lists_the_ways_to_read_it(self):
        lazy = lazy_stack([TensorDict(a=torch.ones(3)), TensorDict(a=torch.ones(4))])
        with pytest.raises(
            RuntimeError, match="(?s)'a'.*(as_padded_tensor|as_list|as_nested_tensor)"
        ):
            lazy["a"]


class TestPlainMistakes:
    @pytest.mark.parametrize("modules", [[torch.nn.Linear(2, 2)], "layer"], ids=["list", "str"])
    def test_from_modules_of_what_is_no_module(self, modules):
        hint = r".*from_modules\(\*modules\)" if isinstance(modules, list) else ""
        with pytest.raises(TypeError, match=f"nn.Modules, got {type(modules).__name__}{hint}"):
            TensorDict.from_modules(modules)

    def test_a_list_of_keys_as_index(self):
        td = make()
        with fails(td, IndexError, r"td\.select\('action', 'next'\)"):
            td[["action", "next"]]

    @pytest.mark.parametrize("what", ["tensor", "container"])
    def test_an_operand_that_does_not_broadcast(self, what):
        td = make()
        other = {
            "tensor": lambda: torch.ones(T + 4),
            "container": lambda: TensorDict(batch_size=[T + 4]),
        }[what]()
        with fails(td, RuntimeError, what, r"\(7,\)", r"batch size \(2, 3\)"):
            td + other
