"""Random operations on random containers: each keeps every container in it sound.

What an operation gives may be right where it is looked at and wrong below: `sound` looks at all of
it. An operation that is refused must leave the container sound too.
"""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import raffia
from raffia import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass
from tests.tensordict.invariants import all_sound, problems, sound

examples = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
REFUSED = (RuntimeError, KeyError, ValueError, IndexError, TypeError, AttributeError)


@tensorclass
class Pair:
    first: torch.Tensor
    label: str = "none"


def tensor(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def pair(batch):
    return Pair(first=tensor(*batch, 2), label="p", batch_size=batch)


def nested(batch):
    inner = TensorDict(b=tensor(*batch, 2, 3), word="w", batch_size=[*batch, 2])
    deep = TensorDict(c=tensor(*batch), inner=inner, batch_size=batch)
    return TensorDict(deep=deep, other=TensorDict(batch_size=[*batch, 2]), batch_size=batch)


def words(batch):
    if not batch:
        return NonTensorData("y", batch)
    return NonTensorStack(*[NonTensorData(str(i), batch[1:]) for i in range(batch[0])])


def rows(batch):
    if not batch:
        return TensorDict()
    return lazy_stack(
        [TensorDict(g=tensor(*batch[1:]), batch_size=batch[1:])] * batch[0], 0
    ).clone()


PARTS = {
    "a": lambda batch: tensor(*batch),
    "wide": lambda batch: tensor(*batch, 4),
    "integer": lambda batch: tensor(*batch).long(),
    "text": lambda batch: NonTensorData("x", batch),
    "words": words,
    "nested": nested,
    "longer": lambda batch: TensorDict(
        {"d": tensor(*batch, 5, 2), "note": NonTensorData("n", [*batch, 5])}, [*batch, 5]
    ),
    "lazy": lambda batch: lazy_stack(
        [TensorDict(e=tensor(*batch), f="f", batch_size=batch) for _ in range(2)], len(batch)
    ),
    "rows": rows,
    "pair": pair,
}
BATCHES = st.sampled_from([(), (2,), (2, 3), (1, 2), (3, 1, 2)])


@st.composite
def containers(draw):
    batch = draw(BATCHES)
    kind = draw(st.sampled_from(["plain", "plain", "lazy", "pair", "mixed"]))
    names = draw(st.lists(st.sampled_from(sorted(PARTS)), unique=True, max_size=5))

    def plain(batch):
        return TensorDict({name: PARTS[name](batch) for name in names}, batch)

    if kind == "plain" or not batch:
        td = plain(batch)
    elif kind == "pair":
        td = pair(batch)
    else:
        dim = draw(st.integers(0, len(batch) - 1))
        rest = (*batch[:dim], *batch[dim + 1 :])
        members = [plain(rest) for _ in range(batch[dim])]
        if kind == "mixed":
            members[0]["only"] = tensor(*rest)
            members[-1]["wide"] = tensor(*rest, 7)
        td = lazy_stack(members, dim)
    if draw(st.booleans()):
        td.names = [f"t{i}" for i in range(len(batch))]
    state = draw(st.sampled_from(["open", "open", "locked", "consolidated", "device"]))
    if state == "locked":
        td.lock_()
    elif state == "consolidated":
        td = td.consolidate(metadata=True)
    elif state == "device":
        td = td.to("cpu")
    return td


# --------------------------------------------------------------------- operations

PLAIN = """
    squeeze unbind clone copy double detach contiguous densify to_tensordict to_lazystack empty exp
    neg sum norm clear lock_ unlock_ auto_batch_size_ consolidate share_memory_ memmap memmap_
    memmap_like requires_grad_ clear_device_ auto_device_ zero_ filter_non_tensor_data
    filter_empty_ atleast_2d rot90 bool numpy as_tensor popitem
""".split()
DIMS = [
    *("unbind", "squeeze", "unsqueeze", "softmax", "all", "logsumexp", "flip", "sum", "max"),
    *("cummax", "amax", "mean", "std", "prod"),
]
METHODS = [
    *((name,) for name in PLAIN),
    *((name, dim) for name in DIMS for dim in (0, -1)),
    *(("get", name) for name in ("nested", "longer", "lazy", "pair", "words")),
    *(("view", -1), ("reshape", -1), ("flatten", 0, -1), ("unflatten", 0, (1, -1)), ("tile", (2,))),
    *(("transpose", 0, -1), ("swapaxes", 0, -1), ("roll", 1, 0), ("narrow", 0, 0, 1)),
    *(("split", 1, 0), ("chunk", 2, -1), ("tensor_split", 2), ("to", "cpu"), ("to", torch.float64)),
    *(("flatten_keys", "."), ("create_nested", "fresh"), ("new_zeros", 4), ("new_full", [1, 2], 3)),
    *(("set", "words", "text"), ("set_at_", "a", 7, 0), ("set_at_", "text", "new", 0)),
    *(("fill_", "a", 1), ("add", 1), ("add_", 1), ("refine_names", ..., "last")),
]
OPTIONS = [
    *(("empty", dict(recurse=True)), ("sum", dict(keepdim=True)), ("sum", dict(dim="feature"))),
    *(("sum", dict(dim=0, keepdim=True)), ("mean", dict(dim="feature", keepdim=True))),
    *(("repeat_interleave", dict(repeats=2, dim=0)), ("consolidate", dict(metadata=True))),
    *(("consolidate", dict(inplace=True, metadata=True)), ("state_dict", dict(flatten=False))),
    *(
        ("flatten_keys", dict(separator=".", inplace=True)),
        ("auto_batch_size_", dict(batch_dims=1)),
    ),
    *(("auto_batch_size_", dict(batch_dims=1, keep_compliant_size=True)),),
    *(("to", dict(dtype=torch.float64, inplace=True)),),
]


def mask(td):
    return torch.arange(td.batch_size.numel()).reshape(td.batch_size) % 2 == 0


def first_key(td):
    return next(iter(td.keys()), "none")


def doubled(leaf):
    return leaf * 2


def done(change):
    """An operation that changes the container, which is its result."""
    return lambda td: (change(td), td)[1]


def entered(method, *args):
    """A `with` block over a shape operation, in which an entry is added."""

    def run(td):
        with getattr(td, method)(*args) as view:
            view["added"] = torch.zeros(*view.batch_size)

    return done(run)


def written(index, value):
    return done(lambda td: td.__setitem__(index, value(td[index])))


def opened(td):
    with td.unlock_():
        td["added"] = torch.zeros(td.batch_size)
        all_sound(td)


def stored(td):
    outer = TensorDict(batch_size=td.batch_size[:1])
    outer["outer"] = td
    sound(outer.lock_())
    return outer


VMAPS = [(0, 0), (1, 0), (0, 1), (-1, 0), (2, 0)]
QUANTILES = torch.tensor([0.2, 0.8])
OPS = {
    **{f"{name}{args}": lambda td, n=name, a=args: getattr(td, n)(*a) for name, *args in METHODS},
    **{f"{name}{opts}": lambda td, n=name, o=opts: getattr(td, n)(**o) for name, opts in OPTIONS},
    **{f"vmap {d}": lambda td, d=d: torch.vmap(lambda row: row, d[:1], d[1])(td) for d in VMAPS},
    **{f"[{i}]": lambda td, i=i: td[i] for i in (0, slice(1), (..., 0), None, [0, 0], slice(0))},
    **{f.__name__: f for f in (copy.deepcopy, torch.zeros_like)},
    **{name: lambda td, n=name: getattr(td, n) for name in ("data", "grad")},
    **{
        f"{join.__name__} {dim}": lambda td, j=join, dim=dim: j([td, td.clone()], dim)
        for join in (torch.stack, torch.cat, lazy_stack)
        for dim in (0, -1)
    },
    **{
        f"{name} {inplace}": lambda td, n=name, i=inplace: getattr(td, n)(first_key(td), inplace=i)
        for name in ("select", "exclude")
        for inplace in (False, True)
    },
    "permute": lambda td: td.permute(*reversed(range(td.ndim))),
    "expand": lambda td: td.expand(2, *td.batch_size),
    "repeat": lambda td: td.repeat(*[2] * td.ndim),
    "pad": lambda td: td.pad([0, 1] * td.ndim),
    "gather": lambda td: td.gather(0, torch.zeros(td.batch_size, dtype=torch.int64)),
    "mask": lambda td: td[mask(td)],
    "masked_select": lambda td: td.masked_select(mask(td)),
    "masked_fill": lambda td: td.masked_fill(mask(td), 1),
    "where": lambda td: td.where(mask(td), td.clone()),
    "where 0": lambda td: td.where(mask(td), 0),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "apply": lambda td: td.apply(doubled),
    "apply lock": lambda td: td.apply(doubled, propagate_lock=True),
    "apply_": lambda td: td.apply_(doubled),
    "apply size": lambda td: td.apply(lambda x: x.sum(), batch_size=[]),
    "named_apply": lambda td: td.named_apply(lambda name, x: x if name != "a" else None),
    "add td": lambda td: td + td,
    "eq": lambda td: td == td.clone(),
    "quantile": lambda td: td.quantile(QUANTILES, dim=0),
    "new_tensor": lambda td: td.new_tensor(td),
    "split_keys": lambda td: td.split_keys([first_key(td)]),
    "unflatten_keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "rename_key_": lambda td: td.rename_key_(first_key(td), ("moved", "here")),
    "rename_keys": lambda td: td.rename_keys({first_key(td): "moved"}),
    "replace": lambda td: td.replace(a=torch.zeros(td.batch_size)),
    "set": lambda td: td.set("added", torch.ones(td.batch_size)),
    "set nested": lambda td: td.set(("nested", "added"), torch.ones(td.batch_size)),
    "set container": lambda td: td.set("new", TensorDict(a=torch.ones(td.batch_size))),
    "set_": lambda td: td.set_("a", torch.ones(td.batch_size)),
    "del": done(lambda td: td.__delitem__(first_key(td))),
    "pop": lambda td: (td, td.pop(first_key(td))),
    "update": lambda td: td.update({"a": torch.zeros(td.batch_size), "text": "changed"}),
    "update td": lambda td: td.update(td.clone().apply(doubled)),
    "update inplace": lambda td: td.update(td.clone(), inplace=True),
    "update size": lambda td: td.update(td.clone()[:1], update_batch_size=True),
    "update_": lambda td: td.update_(td.clone()),
    "update_at_": lambda td: td.update_at_(td.clone()[0], 0),
    "copy_at_": lambda td: td.copy_at_(td.clone()[0], 0),
    "set row": written(0, lambda row: row.clone()),
    "set rows": written(slice(1), lambda rows: rows.apply(doubled)),
    "set row 0": written(0, lambda row: 0),
    "set row dict": written(0, lambda row: {"a": torch.zeros(row.batch_size), "text": "one"}),
    "set last": written((Ellipsis, -1), lambda rows: rows.clone()),
    "with unlock_": done(opened),
    "batch_size": done(lambda td: setattr(td, "batch_size", td.batch_size[:1])),
    "names": done(lambda td: setattr(td, "names", [f"n{i}" for i in range(td.batch_dims)])),
    "rename": lambda td: td.rename(*[f"r{i}" for i in range(td.ndim)]),
    "make_memmap": lambda td: (td.make_memmap("added", (*td.batch_size, 2)), td),
    "state_dict": lambda td: td.clone().load_state_dict(td.state_dict()),
    "load_state_dict": lambda td: TensorDict().load_state_dict(td.state_dict(), strict=False),
    "tree_map": lambda td: pytree.tree_map(doubled, td),
    "tree_map shape": lambda td: pytree.tree_map(lambda x: x.sum(), td),
    "vmap apply": lambda td: torch.vmap(lambda row: row.apply(lambda x: x + 1), (0,), 1)(td),
    "view with": entered("view", -1),
    "unsqueeze with": entered("unsqueeze", 0),
    "permute with": entered("transpose", 0, -1),
    "flatten_keys with": entered("flatten_keys", "."),
    "append": done(lambda td: td.append(td[0].clone())),
    "insert": done(lambda td: td.insert(0, td[0].clone())),
    "extend": done(lambda td: td.extend([td[0].clone()])),
    "store": stored,
    "items": lambda td: [list(td.items(True, True)), list(td.keys(True)), td][-1],
    "from_any": lambda td: TensorDict.from_any({"a": td}),
    "from_dict": lambda td: TensorDict.from_dict(td.to_dict(), auto_batch_size=True),
    "params": lambda td: raffia.TensorDictParams(td),
    "cat_tensors": lambda td: td.cat_tensors("wide", out_key="joined", dim=-1),
    "stack_tensors": lambda td: td.stack_tensors("a", out_key="joined", dim=-1),
    "separates": lambda td: (td, td.separates(first_key(td))),
}


def follow(td, steps):
    """Runs the steps, each on the result of the last; everything stays sound."""
    sound(td)
    for step in steps:
        try:
            result = OPS[step](td)
        except REFUSED:
            result = td
        assert all_sound(result) and all_sound(td)
        if isinstance(result, raffia.TensorCollection):
            td = result


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")  # of one row
@examples
@given(containers(), st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4))
def test_operations_leave_containers_sound(td, steps):
    follow(td, steps)


def test_no_operation_is_always_refused():
    """A wrong name or argument would be refused too, and test nothing."""
    whole = TensorDict({name: PARTS[name]((2, 3)) for name in PARTS}, [2, 3])
    few = TensorDict(a=tensor(2, 3), batch_size=[2, 3])
    tensors = few.clone().update({"wide": tensor(2, 3, 4)})
    lazy = lazy_stack([few.clone(), few.clone()])
    mapped = TensorDict(a=tensor(2, 3), batch_size=[2, 3]).memmap()
    never = []
    for name, operation in OPS.items():
        for td in (whole, tensors, few, lazy, mapped, whole[0], few[:1], lazy[..., 0]):
            try:
                operation(td.clone() if td is not mapped else td)
                break
            except REFUSED:
                pass
        else:
            never.append(name)
    assert not never


# -------------------------------------------------------------- the check itself


def sample():
    inner = TensorDict(b=tensor(2, 3), word="w", batch_size=[2])
    return TensorDict(a=tensor(2), inner=inner, text="x", batch_size=[2])


BROKEN = {
    "has the shape": lambda td: td["inner"]._d.update(b=tensor(3)),
    "the batch size is a tuple": lambda td: setattr(td, "_batch_size", (2,)),
    "its names are": lambda td: setattr(td.refine_names("t")["inner"], "_names", ["u"]),
    "a name occurs twice": lambda td: setattr(td, "_names", ["t", "t"]),
    "a container in it is not": lambda td: setattr(td.lock_()["inner"], "_locked", False),
    "a container in it says True": lambda td: setattr(td.lock_(), "_locked", False),
    "remembers a listing": lambda td: (
        td.exclude("text", ("inner", "word"), inplace=True).lock_(),
        list(td.items(True, True)),
        td["inner"]._d.update(c=tensor(2)),
    ),
}
BROKEN_BLOCK = {
    "does not lie in its buffer": lambda td: td._d.update(a=tensor(2)),
}
BROKEN_STACK = {
    "it has 3 members": lambda td: td.tensordicts.append(sample()),
    "the members have the batch sizes": lambda td: setattr(td.tensordicts[0], "batch_size", []),
}


def test_the_check_finds_broken_containers(monkeypatch):
    for make, changes in (
        (sample, BROKEN),
        (lambda: sample().consolidate(metadata=True), BROKEN_BLOCK),
        (lambda: lazy_stack([sample(), sample()], 1), BROKEN_STACK),
    ):
        for what, change in changes.items():
            td = make()
            assert problems(td) == [] and sound(td)
            change(td)
            assert what in "".join(problems(td)), what
            with pytest.raises(AssertionError, match=what):
                all_sound({"x": [(1, td)]})
    broken = lambda td: setattr(td, "_batch_size", torch.Size([2, 9])) or td  # noqa: E731
    monkeypatch.setitem(OPS, "broken", broken)
    with pytest.raises(AssertionError, match="has the shape"):
        follow(sample(), ["clone", "broken"])


# ----------------------------------------------------- errors that were found by it


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_changes_of_a_consolidated_container_are_pickled(stack, inplace):
    td = sample() if not stack else lazy_stack([sample(), sample()], 0)
    td = td.consolidate(metadata=True, inplace=inplace)
    assert td.is_consolidated() and sound(td)
    assert pickle.loads(pickle.dumps(td)).is_consolidated()
    td.unlock_()
    assert not td.is_consolidated()
    td["a"] = td["a"] + 6
    td.rename_key_(("inner", "b"), "moved")
    td["added"] = torch.zeros(td.batch_size)
    got = pickle.loads(pickle.dumps(td))
    assert set(got.keys(True)) == set(td.keys(True)) and (got == td).all()
    del td["added"]
    assert "added" not in pickle.loads(pickle.dumps(td)).keys()
    if not stack:
        td = sample().consolidate(metadata=True)
        td["a"].data = torch.full((2,), 9.0)  # put elsewhere
        assert pickle.loads(pickle.dumps(td))["a"].tolist() == [9, 9]
        td = sample().consolidate(metadata=True).memmap_()
        td["a"].fill_(4)
        assert sound(td) and not td.is_consolidated()
        assert pickle.loads(pickle.dumps(td))["a"].tolist() == [4, 4]


def longer():
    inner = TensorDict(b=torch.rand(2, 3, 5, 6), batch_size=[2, 3, 5])
    return TensorDict(a=torch.rand(2, 3, 4), n=inner, text="x", batch_size=[2, 3])


@pytest.mark.parametrize("dim", [0, (0, 1), "feature"])
def test_several_quantiles(dim):
    td = longer()
    members = [TensorDict(e=torch.rand(2, 3), batch_size=[2, 3]) for _ in range(2)]
    td["rows"] = lazy_stack(members, 2)
    out = td.quantile(QUANTILES, dim=dim)
    assert sound(out) and out.batch_size[0] == 2
    for i, q in enumerate(QUANTILES.tolist()):
        one = td.quantile(q, dim=dim)
        for key in (("rows", "e"), ("n", "b")):
            torch.testing.assert_close(out[i][key], one[key])


CONDITION = torch.tensor([True, False, True])


@pytest.mark.parametrize("mine", [NonTensorStack("a", "b", "c"), NonTensorData("x", [3])])
@pytest.mark.parametrize(
    "other", [NonTensorStack("d", "e", "f"), NonTensorData("z", [3]), NonTensorData("z"), "z", 0]
)
def test_where_of_values(mine, other):
    theirs = other.expand(3).tolist() if hasattr(other, "expand") else [other] * 3
    want = [a if c else b for c, a, b in zip(CONDITION, mine.tolist(), theirs, strict=True)]
    assert mine.where(CONDITION, other).tolist() == want
    if hasattr(other, "expand"):
        one, two = [TensorDict(v=v.expand(3), batch_size=[3], names=["t"]) for v in (mine, other)]
        assert sound(one.where(CONDITION, two))
        assert torch.where(CONDITION, mine, other.expand(3)).tolist() == want
    out = NonTensorStack("l", "m", "n")
    mine.where(CONDITION, other, out=out)
    assert out.tolist() == want
    with pytest.raises(TypeError, match="holds values"):
        mine.where(CONDITION, TensorDict(batch_size=[3]))


# ------------------------------------------------------------------ values in state dicts


def valued(text, words, number):
    inner = TensorDict(t=words, b=torch.full((2,), number), batch_size=[2])
    return TensorDict(a=torch.full((2,), number), s=text, n=inner, batch_size=[2])


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("saved, now", [(["u", "v"], ["U", "V"]), (["u", "v"], "z"), ("w", "z")])
def test_values_are_saved_and_loaded(flatten, locked, saved, now, tmp_path):
    torch.save(valued("x", saved, 1.0).state_dict(flatten=flatten), tmp_path / "state")
    td = valued("y", now, 0.0)
    td = td.lock_() if locked and now != "z" else td
    td.load_state_dict(torch.load(tmp_path / "state"))
    assert td["s"] == "x" and td["n", "t"] == saved
    assert td["n", "b"].tolist() == [1, 1] and sound(td)
    assert td.is_locked is (locked and now != "z")


def test_other_values_are_loaded():
    state = valued("x", ["u", "v"], 1.0).state_dict()
    td = TensorDict().load_state_dict(state, strict=False)
    assert td["s"] == "x" and td["n", "t"] == ["u", "v"] and sound(td)
    td = valued("y", ["U", "V"], 0.0).load_state_dict(dict(state))  # of tensors alone
    assert td["s"] == "y" and td["a"].tolist() == [1, 1]
    td = valued("y", ["z", "z"], 0.0).load_state_dict(valued("x", "w", 1.0).state_dict())
    assert td["n", "t"] == "w"
    labelled = Pair(first=torch.ones(2, 2), label="saved", batch_size=[2]).state_dict()
    into = Pair(first=torch.zeros(2, 2), label="other", batch_size=[2])
    assert into.load_state_dict(labelled).label == "saved"
    td = lazy_stack([valued("x", ["u", "v"], 1.0), valued("y", ["w", "z"], 2.0)])
    into = lazy_stack([valued("", ["", ""], 0.0), valued("", ["", ""], 0.0)])
    assert into.load_state_dict(td.state_dict()).tolist() == td.tolist()
    td = TensorDict({"a.b": torch.ones(1), "a": TensorDict(b=torch.zeros(1))})
    with pytest.raises(KeyError, match="two entries would be named 'a.b'"):
        td.state_dict()
    assert set(td.state_dict(flatten=False)) == {"a.b", "a"}
    state._metadata["n.t"] |= {"batch_size": (3,), "rows": ["u", "v", "w"]}
    with pytest.raises(RuntimeError, match="the values of entry"):
        valued("y", ["U", "V"], 0.0).load_state_dict(state)


# ------------------------------------------------------------------------------ pytrees


def test_locks_of_unflattened_containers():
    td = TensorDict(a=tensor(2, 3), n=TensorDict(b=tensor(2, 3), batch_size=[2]), batch_size=[2])
    td.lock_()
    doubled_td = pytree.tree_map(doubled, td)
    gradient = torch.func.grad(lambda p: (p["a"] ** 2).sum() + p["n", "b"].sum())(td)
    for out in (doubled_td, gradient):
        assert not out.is_locked and not out["n"].is_locked and sound(out)
    gradient["n", "b"] = gradient["n", "b"] + 1
    assert td.is_locked and sound(td)

    def row(td):
        assert td.is_locked and td["n"].is_locked and sound(td)
        with pytest.raises(RuntimeError, match="locked graph"):
            td["n"].unlock_()
        return td

    assert sound(torch.vmap(row)(td))


def test_vmap_of_different_members_is_refused():
    read = torch.vmap(lambda td: td["b"] + 1)
    keys = lazy_stack([TensorDict(b=torch.ones(1)), TensorDict(b=torch.ones(1), c=torch.ones(1))])
    with pytest.raises(RuntimeError, match="can't map over a lazy stack .* td.unbind"):
        read(keys)
    shapes = lazy_stack([TensorDict(a=torch.ones(n), b=torch.ones(1)) for n in (2, 3)])
    with pytest.raises(ValueError):
        read(shapes)
    for td in (keys, shapes):
        assert read(td.select("b")).tolist() == [[2.0], [2.0]]


def texts(numbers):
    return [texts(row) for row in numbers] if isinstance(numbers, list) else str(int(numbers))


def cube():
    """A number and its text in each of 2 x 2 x 2 rows."""
    numbers = torch.arange(8).reshape(2, 2, 2)
    words = NonTensorStack.from_list(texts(numbers.tolist()))
    return TensorDict(a=numbers, words=words, batch_size=[2, 2, 2])


@pytest.mark.parametrize("dims", list(itertools.product(range(3), range(3), range(2), range(2))))
def test_values_of_rows_in_vmap_of_vmap(dims):
    """Sizes are equal, so that only in_dims and out_dims distinguish rows from columns."""
    in_dim, out_dim, inner_in, inner_out = dims

    def row(td):
        inner = torch.vmap(lambda x: x.clone(), inner_in, inner_out)(td)
        assert torch.utils._pytree.tree_map(lambda x: x * 2, td)["words"] == td["words"]
        return inner, torch.vmap(lambda y: td.set("a", td["a"] + y), 0, inner_out)(torch.zeros(2))

    moved, added = torch.vmap(row, in_dim, out_dim)(cube())
    for out in (moved, added):
        assert sound(out) and out["words"] == texts(out["a"].tolist())
    want = cube().movedim(in_dim, 0).movedim(inner_in + 1, inner_out + 1).movedim(0, out_dim)
    assert torch.equal(moved["a"], want["a"]) and added.batch_size == (2, 2, 2, 2)


def test_an_ambiguous_dimension_is_refused():
    td = TensorDict(a=tensor(2), words=NonTensorStack("a", "b"), batch_size=[2])
    with pytest.raises(RuntimeError, match=r"\(2,\) became one of \(2, 2\).*td.exclude"):
        torch.utils._pytree.tree_map(lambda x: torch.stack([x, x], 1), td)
    row = torch.utils._pytree.tree_map(lambda x: x[0], cube())  # of which dimension is not known
    with pytest.raises(RuntimeError, match="it is ambiguous which"):
        torch.utils._pytree.tree_map(lambda x: torch.stack([x, x], 1), row)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_values_of_rows_in_a_compiled_vmap(dims):
    """While torch compiles, dimensions cannot be queried: the result is right, or refused."""
    td = TensorDict(a=tensor(2, 2), words=NonTensorStack.from_list(texts([[0, 1], [2, 3]])))
    td.batch_size = [2, 2]
    rows = torch.compile(lambda td: torch.vmap(lambda row: row.clone(), *dims)(td), backend="eager")
    try:
        got = rows(td)
    except RuntimeError as error:
        assert "it is ambiguous which" in str(error)
    else:
        want = td if dims[0] == dims[1] else td.transpose(0, 1)
        assert got["words"] == want["words"] and torch.equal(got["a"], want["a"])


# -------------------------------------------------------------------------- locks and names


def test_names_of_everything_nested():
    for operation in (
        *(lambda td: td, lambda td: td.clone(), lambda td: td[:1], lambda td: td.split(1)[0]),
        *(lambda td: torch.cat([td, td]), lambda td: td.gather(0, torch.tensor([0]))),
        *(lambda td: td.flip(0), lambda td: td.update({"text": "new", "words": ["c", "d"]})),
        *(lambda td: td.set_non_tensor("more", [1]), lambda td: td.densify()),
        lambda td: pytree.tree_map(doubled, td),
    ):
        inner = TensorDict(text="y", batch_size=[2])
        members = lazy_stack([TensorDict(b=tensor(3)), TensorDict(b=tensor(3))])
        td = TensorDict(text="x", words=["a", "b"], inner=inner, rows=members, batch_size=[2])
        td["pair"] = pair((2,))
        td.names = ["time"]
        out = operation(td)
        assert sound(out) and out.names == ["time"]
        for key in [*out.keys(), ("inner", "text")]:
            assert out.get(key).names == ["time"], key


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch's own formulas
@pytest.mark.parametrize("call", ["update_", "copy_"])
def test_writes_pass_tangents_on(call):
    with forward_ad.dual_level():
        tangent = torch.full((3,), 5.0)
        source = TensorDict(a=forward_ad.make_dual(torch.ones(3), tangent), b=torch.ones(3))
        td = TensorDict(a=torch.zeros(3), b=torch.zeros(3))
        getattr(td, call)(source)
        assert forward_ad.unpack_dual(td["a"]).tangent.equal(tangent)
