"""Random operations on random containers: each leaves every container in it sound.

What an operation gives may be right where it is looked at and wrong below: `sound` looks at all of
it. An operation that is refused must leave the container sound too.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import raffia
from raffia import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    tensorclass,
)
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


def nested(batch, names=None):
    inner = TensorDict(b=tensor(*batch, 2, 3), word="w", batch_size=[*batch, 2])
    deep = TensorDict(c=tensor(*batch), inner=inner, batch_size=batch)
    return TensorDict(deep=deep, other=TensorDict(batch_size=[*batch, 2]), batch_size=batch)


PARTS = {
    "a": lambda batch: tensor(*batch),
    "wide": lambda batch: tensor(*batch, 4),
    "integer": lambda batch: tensor(*batch).long(),
    "text": lambda batch: NonTensorData("x", batch),
    "words": lambda batch: (
        NonTensorStack(*[NonTensorData(str(i), batch[1:]) for i in range(batch[0])])
        if batch
        else NonTensorData("y", batch)
    ),
    "nested": nested,
    "longer": lambda batch: TensorDict(
        {"d": tensor(*batch, 5, 2), "note": NonTensorData("n", [*batch, 5])}, [*batch, 5]
    ),
    "lazy": lambda batch: lazy_stack(
        [TensorDict(e=tensor(*batch), f="f", batch_size=batch) for _ in range(2)], len(batch)
    ),
    "rows": lambda batch: (
        lazy_stack(
            [TensorDict(g=tensor(*batch[1:]), batch_size=batch[1:]) for _ in range(batch[0])], 0
        )
        if batch
        else TensorDict()
    ),
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


def mask(td):
    return torch.arange(td.batch_size.numel()).reshape(td.batch_size) % 2 == 0


def first_key(td):
    return next(iter(td.keys()), "none")


def doubled(leaf):
    return leaf * 2


def entered(method, *args):
    """A `with` block over a shape operation, in which an entry is added."""

    def run(td):
        with getattr(td, method)(*args) as view:
            view["added"] = torch.zeros(*view.batch_size)
        return td

    return run


def written(index, value):
    def run(td):
        td[index] = value(td[index])
        return td

    return run


def opened(td):
    with td.unlock_():
        td["added"] = torch.zeros(td.batch_size)
        all_sound(td)
    return td


def resized(td):
    td.batch_size = td.batch_size[:1]
    return td


def renamed(td):
    td.names = [f"n{i}" for i in range(td.batch_dims)]
    return td


def mapped(in_dim, out_dim):
    def run(td):
        return torch.vmap(lambda row: row, (in_dim,), out_dim)(td)

    return run


def grown(td):
    return torch.vmap(lambda row: row.apply(lambda x: x + 1), (0,), 1)(td)


def gathered(td):
    index = torch.zeros(td.batch_size, dtype=torch.int64)
    return td.gather(0, index)


def appended(td):
    td.append(td[0].clone())
    return td


def stored(td):
    outer = TensorDict(batch_size=td.batch_size[:1])
    outer["held"] = td
    outer.lock_()
    sound(outer)
    return outer


def removed(td):
    del td[first_key(td)]
    return td


OPS = {
    "view": lambda td: td.view(-1),
    "reshape": lambda td: td.reshape(-1),
    "flatten": lambda td: td.flatten(0, -1),
    "unflatten": lambda td: td.unflatten(0, (1, -1)),
    "unsqueeze 0": lambda td: td.unsqueeze(0),
    "unsqueeze -1": lambda td: td.unsqueeze(-1),
    "squeeze": lambda td: td.squeeze(),
    "squeeze 0": lambda td: td.squeeze(0),
    "permute": lambda td: td.permute(*reversed(range(td.ndim))),
    "transpose": lambda td: td.transpose(0, -1),
    "expand": lambda td: td.expand(2, *td.batch_size),
    "repeat": lambda td: td.repeat(*[2] * td.ndim),
    "repeat_interleave": lambda td: td.repeat_interleave(2, dim=0),
    "roll": lambda td: td.roll(1, 0),
    "flip": lambda td: td.flip(0),
    "narrow": lambda td: td.narrow(0, 0, 1),
    "pad": lambda td: td.pad([0, 1] * td.ndim),
    "split": lambda td: td.split(1, 0),
    "chunk": lambda td: td.chunk(2, -1),
    "unbind": lambda td: td.unbind(0),
    "unbind -1": lambda td: td.unbind(-1),
    "gather": gathered,
    "row": lambda td: td[0],
    "rows": lambda td: td[:1],
    "ellipsis": lambda td: td[..., 0],
    "new dim": lambda td: td[None],
    "list": lambda td: td[[0, 0]],
    "mask": lambda td: td[mask(td)],
    "no rows": lambda td: td[:0],
    "masked_select": lambda td: td.masked_select(mask(td)),
    "masked_fill": lambda td: td.masked_fill(mask(td), 1),
    "where": lambda td: td.where(mask(td), td.clone()),
    "where 0": lambda td: td.where(mask(td), 0),
    "clone": lambda td: td.clone(),
    "copy": lambda td: td.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "to": lambda td: td.to("cpu"),
    "to dtype": lambda td: td.to(torch.float64),
    "double": lambda td: td.double(),
    "detach": lambda td: td.detach(),
    "data": lambda td: td.data,
    "contiguous": lambda td: td.contiguous(),
    "densify": lambda td: td.densify(),
    "to_tensordict": lambda td: td.to_tensordict(),
    "to_lazystack": lambda td: td.to_lazystack(),
    "empty": lambda td: td.empty(),
    "empty recurse": lambda td: td.empty(recurse=True),
    "apply": lambda td: td.apply(doubled),
    "apply lock": lambda td: td.apply(doubled, propagate_lock=True),
    "apply size": lambda td: td.apply(lambda x: x.sum(), batch_size=[]),
    "apply_": lambda td: td.apply_(doubled),
    "named_apply": lambda td: td.named_apply(lambda name, x: x if name != "a" else None),
    "add": lambda td: td + 1,
    "add td": lambda td: td + td,
    "eq": lambda td: td == td.clone(),
    "neg": lambda td: -td,
    "add_": lambda td: td.add_(1),
    "exp": lambda td: td.exp(),
    "sum": lambda td: td.sum(),
    "sum 0": lambda td: td.sum(0),
    "sum keepdim": lambda td: td.sum(keepdim=True),
    "sum 0 keepdim": lambda td: td.sum(0, keepdim=True),
    "sum feature": lambda td: td.sum(dim="feature"),
    "mean feature keepdim": lambda td: td.mean(dim="feature", keepdim=True),
    "max": lambda td: td.max(0),
    "amax": lambda td: td.amax(-1),
    "cummax": lambda td: td.cummax(0),
    "quantile": lambda td: td.quantile(torch.tensor([0.2, 0.8]), dim=0),
    "quantile all": lambda td: td.quantile(torch.tensor([0.2, 0.8])),
    "softmax": lambda td: td.softmax(0),
    "norm": lambda td: td.norm(),
    "all": lambda td: td.all(0),
    "logsumexp": lambda td: td.logsumexp(0),
    "stack": lambda td: torch.stack([td, td.clone()], 0),
    "stack -1": lambda td: torch.stack([td, td.clone()], -1),
    "cat": lambda td: torch.cat([td, td.clone()], 0),
    "lazy_stack": lambda td: lazy_stack([td, td.clone()], 0),
    "lazy_stack -1": lambda td: lazy_stack([td, td.clone()], -1),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda td: td.new_zeros(4),
    "new_full": lambda td: td.new_full([1, 2], 3),
    "new_tensor": lambda td: td.new_tensor(td),
    "select": lambda td: td.select(first_key(td)),
    "select inplace": lambda td: td.select(first_key(td), inplace=True),
    "exclude": lambda td: td.exclude(first_key(td)),
    "exclude inplace": lambda td: td.exclude(first_key(td), inplace=True),
    "split_keys": lambda td: td.split_keys([first_key(td)]),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "flatten_keys inplace": lambda td: td.flatten_keys(".", inplace=True),
    "unflatten_keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "filter_non_tensor_data": lambda td: td.filter_non_tensor_data(),
    "rename_key_": lambda td: td.rename_key_(first_key(td), ("moved", "here")),
    "rename_keys": lambda td: td.rename_keys({first_key(td): "moved"}),
    "replace": lambda td: td.replace(a=torch.zeros(td.batch_size)),
    "set": lambda td: td.set("added", torch.ones(td.batch_size)),
    "set nested": lambda td: td.set(("nested", "added"), torch.ones(td.batch_size)),
    "set text": lambda td: td.set("words", "text"),
    "set container": lambda td: td.set("held", TensorDict(a=torch.ones(td.batch_size))),
    "set_": lambda td: td.set_("a", torch.ones(td.batch_size)),
    "set_at_": lambda td: td.set_at_("a", 7, 0),
    "set_at_ text": lambda td: td.set_at_("text", "new", 0),
    "del": removed,
    "pop": lambda td: (td, td.pop(first_key(td))),
    "popitem": lambda td: (td, td.popitem()),
    "clear": lambda td: td.clear(),
    "create_nested": lambda td: td.create_nested("fresh"),
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
    "lock_": lambda td: td.lock_(),
    "unlock_": lambda td: td.unlock_(),
    "with unlock_": opened,
    "batch_size": resized,
    "auto_batch_size_": lambda td: td.auto_batch_size_(),
    "auto_batch_size_ 1": lambda td: td.auto_batch_size_(1, keep_compliant_size=True),
    "names": renamed,
    "rename": lambda td: td.rename(*[f"r{i}" for i in range(td.ndim)]),
    "refine_names": lambda td: td.refine_names(..., "last"),
    "consolidate": lambda td: td.consolidate(),
    "consolidate metadata": lambda td: td.consolidate(metadata=True),
    "consolidate inplace": lambda td: td.consolidate(inplace=True, metadata=True),
    "to inplace": lambda td: td.to(torch.float64, inplace=True),
    "share_memory_": lambda td: td.share_memory_(),
    "memmap": lambda td: td.memmap(),
    "memmap_": lambda td: td.memmap_(),
    "memmap_like": lambda td: td.memmap_like(),
    "make_memmap": lambda td: (td.make_memmap("added", (*td.batch_size, 2)), td),
    "state_dict": lambda td: td.clone().load_state_dict(td.state_dict()),
    "load_state_dict": lambda td: TensorDict().load_state_dict(td.state_dict(), strict=False),
    "tree_map": lambda td: pytree.tree_map(doubled, td),
    "tree_map shape": lambda td: pytree.tree_map(lambda x: x.sum(), td),
    "vmap 0": mapped(0, 0),
    "vmap 1": mapped(1, 0),
    "vmap 0 1": mapped(0, 1),
    "vmap -1": mapped(-1, 0),
    "vmap 2": mapped(2, 0),
    "vmap apply": grown,
    "view with": entered("view", -1),
    "unsqueeze with": entered("unsqueeze", 0),
    "permute with": entered("transpose", 0, -1),
    "flatten_keys with": entered("flatten_keys", "."),
    "get": lambda td: td.get(first_key(td)),
    "get nested": lambda td: td.get("nested"),
    "get longer": lambda td: td.get("longer"),
    "get lazy": lambda td: td.get("lazy"),
    "get pair": lambda td: td.get("pair"),
    "get words": lambda td: td.get("words"),
    "append": appended,
    "insert": lambda td: (td.insert(0, td[0].clone()), td)[1],
    "extend": lambda td: (td.extend([td[0].clone()]), td)[1],
    "store": stored,
    "requires_grad_": lambda td: td.requires_grad_(),
    "device": lambda td: td.clear_device_(),
    "auto_device_": lambda td: td.auto_device_(),
    "items": lambda td: [list(td.items(True, True)), list(td.keys(True)), td][-1],
    "from_any": lambda td: TensorDict.from_any({"a": td}),
    "from_dict": lambda td: TensorDict.from_dict(td.to_dict(), auto_batch_size=True),
    "params": lambda td: raffia.TensorDictParams(td),
    "fill_": lambda td: td.fill_("a", 1),
    "zero_": lambda td: td.zero_(),
    "cat_tensors": lambda td: td.cat_tensors("wide", out_key="joined", dim=-1),
    "stack_tensors": lambda td: td.stack_tensors("a", "a", out_key="joined", dim=-1),
    "separates": lambda td: (td, td.separates(first_key(td))),
    "filter_empty_": lambda td: td.filter_empty_(),
    "tensor_split": lambda td: td.tensor_split(2),
    "swapaxes": lambda td: td.swapaxes(0, -1),
    "atleast_2d": lambda td: td.atleast_2d(),
    "rot90": lambda td: td.rot90(),
    "tile": lambda td: td.tile((2,)),
    "bool": lambda td: td.bool(),
    "grad": lambda td: td.grad,
    "numpy": lambda td: td.numpy(),
    "as_tensor": lambda td: td.as_tensor(),
}


def follow(td, steps):
    """Do the steps one after the other, each on the result of the last; all stays sound."""
    sound(td)
    for step in steps:
        try:
            result = OPS[step](td)
        except REFUSED:
            result = td
        assert all_sound(result) and all_sound(td)
        if isinstance(result, raffia.TensorCollection):
            td = result


@examples
@given(containers(), st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4))
def test_operations_leave_containers_sound(td, steps):
    follow(td, steps)


class TestTheCheck:
    """`sound` finds what is broken on purpose."""

    def make(self):
        inner = TensorDict(b=tensor(2, 3), word="w", batch_size=[2])
        return TensorDict(a=tensor(2), inner=inner, batch_size=[2])

    def test_whole(self):
        assert problems(self.make()) == []
        assert problems(self.make().lock_()) == []
        assert problems(self.make().consolidate(metadata=True)) == []
        assert problems(lazy_stack([self.make(), self.make()], 1)) == []

    @pytest.mark.parametrize("key", ["a", "inner", ("inner", "b"), ("inner", "word")])
    def test_batch_size(self, key):
        td = self.make()
        node = td if isinstance(key, str) else td["inner"]
        last = key if isinstance(key, str) else key[-1]
        short = {
            "a": tensor(3),
            "inner": TensorDict(batch_size=[]),
            "b": tensor(1, 3),
            "word": NonTensorData("w", [3]),
        }[last]
        node._d[last] = short
        with pytest.raises(AssertionError, match=f"entry '{last}' has the shape"):
            sound(td)

    def test_device(self):
        td = self.make().to("cpu")
        td._d["a"] = torch.zeros(2, device="meta")
        with pytest.raises(AssertionError, match="it is on cpu, the entry 'a' on meta"):
            sound(td)

    def test_names(self):
        td = self.make()
        td.names = ["t"]
        td["inner"]._names = ["u"]
        with pytest.raises(AssertionError, match="its names are"):
            sound(td)

    def test_an_entry_that_is_none(self):
        td = self.make()
        td._d["x"] = 5
        with pytest.raises(AssertionError, match="the entry 'x' is a int"):
            sound(td)

    def test_locks(self):
        td = self.make().lock_()
        td["inner"]._locked = False
        with pytest.raises(AssertionError, match="a container in it is not"):
            sound(td)
        td = self.make().lock_()
        td["inner"]._parents = None
        with pytest.raises(AssertionError, match="a container in it says False"):
            sound(td)
        td = self.make().lock_()
        td._locked = False
        with pytest.raises(AssertionError, match="a container in it says True"):
            sound(td)

    def test_remembered_listings(self):
        td = TensorDict(a=tensor(2), inner=TensorDict(b=tensor(2))).lock_()
        assert list(td.keys(True)) and list(td.items(True, True))
        sound(td)
        td["inner"]._d["c"] = tensor(2)
        with pytest.raises(AssertionError, match="remembers a listing"):
            sound(td)

    def test_spans(self):
        td = self.make().consolidate(metadata=True)
        td._spans = [16, 0]
        with pytest.raises(AssertionError, match="its spans at"):
            sound(td)
        td = self.make().consolidate(metadata=True)
        td._d["a"] = tensor(2)
        with pytest.raises(AssertionError, match="does not lie in its buffer"):
            sound(td)

    def test_members_of_a_stack(self):
        td = lazy_stack([self.make(), self.make()], 1)
        td.tensordicts.append(self.make())
        with pytest.raises(AssertionError, match="it has 3 members"):
            sound(td)
        td = lazy_stack([self.make(), self.make()], 1)
        td.tensordicts[0].batch_size = []
        with pytest.raises(AssertionError, match="the members have the batch sizes"):
            sound(td)

    def test_an_operation_that_breaks_something_is_found(self, monkeypatch):
        def broken(td):
            td._batch_size = torch.Size((*td._batch_size, 9))
            return td

        monkeypatch.setitem(OPS, "broken", broken)
        with pytest.raises(AssertionError, match="has the shape"):
            follow(self.make(), ["clone", "broken"])

    def test_results_in_tuples_and_dicts_are_checked(self):
        td = self.make()
        td._d["a"] = tensor(3)
        with pytest.raises(AssertionError):
            all_sound({"x": [(1, td)]})


class TestConsolidated:
    """What is pickled is what is there, also after changes."""

    def make(self):
        inner = TensorDict(c=tensor(2, 3), word="w", batch_size=[2])
        return TensorDict(a=torch.ones(2), b=inner, batch_size=[2])

    @pytest.mark.parametrize("stack", [False, True])
    @pytest.mark.parametrize("inplace", [False, True])
    def test_changes_after_unlocking_are_pickled(self, stack, inplace):
        td = self.make() if not stack else lazy_stack([self.make(), self.make()], 0)
        td = td.consolidate(metadata=True, inplace=inplace)
        assert td.is_consolidated() and sound(td)
        assert pickle.loads(pickle.dumps(td)).is_consolidated()
        td.unlock_()
        assert not td.is_consolidated()
        a = td["a"] + 6
        td["a"] = a
        td.rename_key_(("b", "c"), "moved")
        td["added"] = torch.zeros(td.batch_size)
        got = pickle.loads(pickle.dumps(td))
        assert set(got.keys(True)) == set(td.keys(True))
        for key in ("a", "moved", "added"):
            assert torch.equal(got[key], td[key]), key
        del td["added"]
        assert "added" not in pickle.loads(pickle.dumps(td)).keys()

    def test_a_tensor_that_was_put_elsewhere_is_pickled_as_it_is(self):
        td = self.make().consolidate(metadata=True)
        td["a"].data = torch.full((2,), 9.0)
        assert torch.equal(pickle.loads(pickle.dumps(td))["a"], torch.full((2,), 9.0))

    def test_memory_mapped_afterwards(self):
        td = self.make().consolidate(metadata=True).memmap_()
        td["a"].fill_(4)
        assert sound(td) and not td.is_consolidated()
        assert torch.equal(torch.Tensor(pickle.loads(pickle.dumps(td))["a"]), torch.full((2,), 4.0))


class TestReductions:
    def make(self):
        inner = TensorDict(b=torch.rand(2, 3, 5, 6), batch_size=[2, 3, 5])
        return TensorDict(a=torch.rand(2, 3, 4), n=inner, text="x", batch_size=[2, 3])

    @pytest.mark.parametrize("name", ["sum", "mean", "std", "prod", "amax", "min", "nansum"])
    @pytest.mark.parametrize("keepdim", [False, True])
    def test_longer_nested_batches(self, name, keepdim):
        td = self.make()
        out = getattr(td, name)(dim="feature", keepdim=keepdim)
        one = (1,) if keepdim else ()
        assert sound(out)
        assert out["a"].shape == (2, 3, *one) and out["n", "b"].shape == (2, 3, 5, *one)
        assert out["n"].batch_size == (2, 3, 5)
        kept = getattr(td, name)(keepdim=True)
        assert sound(kept) and kept["n"].batch_size == (1, 1, 1)

    def test_sum_of_features_is_that_of_the_leaf(self):
        td = self.make()
        got = td.sum(dim="feature")["n", "b"]
        assert torch.allclose(got, td["n", "b"].sum(-1))

    @pytest.mark.parametrize("dim", [0, (0, 1), "feature"])
    def test_several_quantiles(self, dim):
        td, q = self.make(), torch.tensor([0.2, 0.8])
        td["rows"] = lazy_stack(
            [TensorDict(e=torch.rand(2, 3), batch_size=[2, 3]) for _ in range(2)], 2
        )
        out = td.quantile(q, dim=dim)
        assert sound(out) and out.batch_size[0] == 2
        for i in range(2):
            one = td.quantile(q[i].item(), dim=dim)
            assert torch.allclose(out[i]["rows", "e"], one["rows", "e"])
            assert torch.allclose(out[i]["n", "b"], one["n", "b"])


class TestWhereOfValues:
    condition = torch.tensor([True, False, True])

    @pytest.mark.parametrize("mine", [NonTensorStack("a", "b", "c"), NonTensorData("x", [3])])
    @pytest.mark.parametrize(
        "other",
        [NonTensorStack("d", "e", "f"), NonTensorData("z", [3]), NonTensorData("z"), "z", 0],
    )
    def test_rows_are_taken_of_both(self, mine, other):
        theirs = other.expand(3).tolist() if hasattr(other, "expand") else [other] * 3
        want = [
            a if c else b for c, a, b in zip(self.condition, mine.tolist(), theirs, strict=True)
        ]
        assert mine.where(self.condition, other).tolist() == want
        if hasattr(other, "expand"):
            assert torch.where(self.condition, mine, other.expand(3)).tolist() == want

    def test_out(self):
        out = NonTensorStack("l", "m", "n")
        NonTensorStack("a", "b", "c").where(self.condition, "z", out=out)
        assert out.tolist() == ["a", "z", "c"]

    def test_a_container_is_refused(self):
        with pytest.raises(TypeError, match="holds values"):
            NonTensorData("x", [3]).where(self.condition, TensorDict(batch_size=[3]))


class TestStateDict:
    def make(self, text, words, number):
        inner = TensorDict(t=words, b=torch.full((2,), number), batch_size=[2])
        return TensorDict(a=torch.full((2,), number), s=text, n=inner, batch_size=[2])

    @pytest.mark.parametrize("flatten", [False, True])
    @pytest.mark.parametrize("locked", [False, True])
    def test_values_are_saved_and_loaded(self, flatten, locked):
        state = self.make("x", ["u", "v"], 1.0).state_dict(flatten=flatten)
        td = self.make("y", ["U", "V"], 0.0)
        td = td.lock_() if locked else td
        td.load_state_dict(state)
        assert td["s"] == "x" and td["n", "t"] == ["u", "v"]
        assert torch.equal(td["n", "b"], torch.ones(2)) and sound(td)
        assert td.is_locked is locked

    def test_into_an_empty_container(self):
        state = self.make("x", ["u", "v"], 1.0).state_dict()
        td = TensorDict().load_state_dict(state, strict=False)
        assert td["s"] == "x" and td["n", "t"] == ["u", "v"] and sound(td)

    def test_one_value_becomes_several_and_back(self):
        one, several = self.make("x", "w", 1.0), self.make("x", ["u", "v"], 1.0)
        assert self.make("y", "z", 0.0).load_state_dict(several.state_dict())["n", "t"] == [
            "u",
            "v",
        ]
        assert self.make("y", ["z", "z"], 0.0).load_state_dict(one.state_dict())["n", "t"] == "w"

    def test_fields_of_a_tensorclass(self):
        state = Pair(first=torch.ones(2, 2), label="saved", batch_size=[2]).state_dict()
        into = Pair(first=torch.zeros(2, 2), label="other", batch_size=[2])
        assert into.load_state_dict(state).label == "saved"

    def test_a_stack(self):
        td = lazy_stack([self.make("x", ["u", "v"], 1.0), self.make("y", ["w", "z"], 2.0)])
        into = lazy_stack([self.make("", ["", ""], 0.0), self.make("", ["", ""], 0.0)])
        assert into.load_state_dict(td.state_dict()).tolist() == td.tolist()

    def test_a_state_dict_of_tensors_alone_leaves_the_values(self):
        td = self.make("y", ["U", "V"], 0.0)
        td.load_state_dict(dict(self.make("x", ["u", "v"], 1.0).state_dict()))
        assert td["s"] == "y" and torch.equal(td["a"], torch.ones(2))

    def test_the_file_of_torch(self, tmp_path):
        torch.save(self.make("x", ["u", "v"], 1.0).state_dict(), tmp_path / "state")
        td = self.make("y", ["U", "V"], 0.0)
        assert td.load_state_dict(torch.load(tmp_path / "state"))["n", "t"] == ["u", "v"]

    def test_names_that_meet_are_refused(self):
        td = TensorDict({"a.b": torch.ones(1), "a": TensorDict(b=torch.zeros(1))})
        with pytest.raises(KeyError, match="two entries would be named 'a.b'"):
            td.state_dict()
        assert set(td.state_dict(flatten=False)) == {"a.b", "a"}

    def test_rows_that_do_not_fit(self):
        state = self.make("x", ["u", "v"], 1.0).state_dict()
        state._metadata["n.t"]["batch_size"] = (3,)
        state._metadata["n.t"]["rows"] = ["u", "v", "w"]
        with pytest.raises(RuntimeError, match="the values of entry"):
            self.make("y", ["U", "V"], 0.0).load_state_dict(state)


class TestPytrees:
    def make(self):
        inner = TensorDict(b=tensor(2, 3), batch_size=[2])
        return TensorDict(a=tensor(2, 3), n=inner, batch_size=[2])

    def test_new_values_of_a_locked_container_are_not_locked(self):
        td = self.make().lock_()
        doubled_td = pytree.tree_map(doubled, td)
        assert not doubled_td.is_locked and not doubled_td["n"].is_locked and sound(doubled_td)
        gradient = torch.func.grad(lambda p: (p["a"] ** 2).sum() + p["n", "b"].sum())(td)
        assert not gradient.is_locked and sound(gradient)
        gradient["n", "b"] = gradient["n", "b"] + 1
        assert td.is_locked and sound(td)

    def test_a_row_is_as_locked_as_the_whole(self):
        def row(td):
            assert td.is_locked and td["n"].is_locked and sound(td)
            with pytest.raises(RuntimeError, match="locked graph"):
                td["n"].unlock_()
            return td

        assert sound(torch.vmap(row)(self.make().lock_()))

    @pytest.mark.parametrize("in_dim", [0, 1])
    @pytest.mark.parametrize("out_dim", [0, 1])
    def test_values_of_rows(self, in_dim, out_dim):
        words = NonTensorStack(
            NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f"), stack_dim=0
        )
        inner = TensorDict(b=tensor(2, 3, 5), words=words, text="x", batch_size=[2, 3])
        td = TensorDict(a=tensor(2, 3, 4), n=inner, batch_size=[2, 3])

        def row(td):
            assert sound(td)
            return td.clone()

        out = torch.vmap(row, (in_dim,), out_dim)(td)
        want = td.transpose(0, 1) if in_dim != out_dim else td
        assert sound(out) and out.batch_size == want.batch_size
        assert out["n", "words"] == want["n", "words"] and out["n", "text"] == "x"
        assert torch.equal(out["n", "b"], want["n", "b"])

    def test_values_of_rows_where_the_sizes_are_the_same(self):
        words = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
        td = TensorDict(a=tensor(2, 2, 4), words=words, batch_size=[2, 2])
        out = torch.vmap(lambda row: row)(td)
        assert sound(out) and out["words"] == [["a", "b"], ["c", "d"]]

    def test_a_value_per_row_made_inside(self):
        def row(td):
            return td.set("words", NonTensorStack("a", "b", "c"))

        td = TensorDict(a=tensor(2, 3), batch_size=[2, 3])
        assert torch.vmap(row)(td)["words"] == [["a", "b", "c"]] * 2
        assert torch.vmap(row, (0,), 1)(td)["words"] == [["a", "a"], ["b", "b"], ["c", "c"]]

    @pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
    @pytest.mark.parametrize("out_dim", [0, 1, 2])
    def test_dims_beyond_the_batch(self, in_dim, out_dim):
        inner = TensorDict(b=tensor(2, 4, 5), batch_size=[2, 4])
        td = TensorDict(a=tensor(2, 4, 5), n=inner, batch_size=[2])

        def row(td):
            assert sound(td)
            return td

        out = torch.vmap(row, (in_dim,), out_dim)(td)
        assert sound(out)
        assert torch.equal(out["n", "b"], td["n", "b"].movedim(in_dim, out_dim))


class TestLocksAndNames:
    def test_a_value_that_is_replaced_in_a_locked_container_is_locked(self):
        td = TensorDict(a=tensor(2), text="x", batch_size=[2]).lock_()
        td[0] = TensorDict(a=5, text="y")
        assert td["text"] == ["y", "x"] and td.get("text").is_locked and sound(td)

    def test_and_in_a_stack(self):
        td = lazy_stack([TensorDict(text=NonTensorData("x", [2]), batch_size=[2])] * 1, 0).lock_()
        td[0, 1] = TensorDict(text="y")
        assert td["text"] == [["x", "y"]] and sound(td)

    @pytest.mark.parametrize(
        "operation",
        [
            lambda td: td,
            lambda td: td.clone(),
            lambda td: td[:1],
            lambda td: torch.cat([td, td]),
            lambda td: td.split(1)[0],
            lambda td: td.gather(0, torch.tensor([0])),
            lambda td: td.flip(0),
            lambda td: td.update({"text": "new", "words": ["c", "d"]}),
            lambda td: td.set_non_tensor("more", [1]),
            lambda td: td.densify(),
            lambda td: pytree.tree_map(doubled, td),
        ],
    )
    def test_names_of_everything_nested(self, operation):
        inner = TensorDict(text="y", batch_size=[2])
        rows = lazy_stack([TensorDict(b=tensor(3)), TensorDict(b=tensor(3))])
        td = TensorDict(text="x", words=["a", "b"], inner=inner, rows=rows, batch_size=[2])
        td["pair"] = pair((2,))
        td.names = ["time"]
        out = operation(td)
        assert sound(out) and out.names == ["time"]
        for name in out.keys():
            assert out.get(name).names == ["time"], name
        assert out.get(("inner", "text")).names == ["time"]
