"""Properties that hold for any container.

The model is a plain nested dict of arrays. A container made from it must do to every leaf what
plain torch (or plain dict code) does to it. `rows` is the batch as a tensor of row numbers: an
operation on it gives the rows of each leaf that the result must have.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from raffia import TensorDict, is_tensor_collection, lazy_stack
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import apply_op, rows_of

examples = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DEEP = 2  # a nested container called "deep" has one more batch dim, of this size


# --- the model ---------------------------------------------------------------------------------


def numbered(shape, dtype, start=0):
    return (torch.arange(math.prod(shape)).reshape(shape) + start).to(dtype)


def is_node(value):
    return isinstance(value, dict)


def plain_leaves(plain, path=()):
    """{tuple key: tensor} of a nested dict."""
    found = {}
    for key, value in plain.items():
        if is_node(value):
            found |= plain_leaves(value, (*path, key))
        else:
            found[(*path, key)] = torch.as_tensor(value)
    return found


def plain_nodes(plain, path=()):
    found = set()
    for key, value in plain.items():
        if is_node(value):
            found |= {(*path, key)} | plain_nodes(value, (*path, key))
    return found


def build(plain, batch):
    """The container of a nested dict; "deep" has the longer batch size."""
    td = TensorDict({}, batch)
    for key, value in plain.items():
        if is_node(value):
            td[key] = build(value, (*batch, DEEP) if key == "deep" else batch)
        else:
            td[key] = value
    return td


def leaves(td):
    """{tuple key: tensor} of a container, which is sound."""
    assert sound(td)
    items = td.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, tuple) else (key,): value for key, value in items}


def check(td, plain, batch, rows):
    """td is the container of `plain`, with these rows."""
    assert is_tensor_collection(td)
    assert td.batch_size == rows.shape
    want = plain_leaves(plain)
    got = leaves(td)
    assert set(got) == set(want)
    for key, value in want.items():
        flat = value.reshape(math.prod(batch), *value.shape[len(batch) :])
        assert got[key].dtype == value.dtype, key
        assert got[key].shape == (*rows.shape, *flat.shape[1:]), key
        assert torch.equal(got[key], flat[rows]), key
    for key in plain_nodes(plain):
        assert td[key].batch_size == (*rows.shape, *[DEEP] * key.count("deep")), key


def same(one, other):
    """Two containers of any class have equal content."""
    assert one.batch_size == other.batch_size
    got, want = leaves(one), leaves(other)
    assert set(got) == set(want)
    for key, value in want.items():
        assert torch.equal(got[key], value), key
        assert got[key].dtype == value.dtype, key


# --- strategies --------------------------------------------------------------------------------

SIZES = st.integers(0, 3)
BATCHES = st.lists(SIZES, max_size=3).map(tuple)
FULL_BATCHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32])
LEAF_NAMES, NODE_NAMES = "abc", ("x", "y", "deep")


@st.composite
def plain_dicts(draw, batch, depth=2, min_size=0):
    plain = {}
    for key in draw(st.lists(st.sampled_from(LEAF_NAMES), unique=True, min_size=min_size)):
        shape = (*batch, *draw(st.lists(st.integers(0, 2), max_size=2)))
        value = numbered(shape, draw(DTYPES), draw(st.integers(0, 50)))
        plain[key] = value.numpy() if draw(st.booleans()) else value
    if depth:
        for key in draw(st.lists(st.sampled_from(NODE_NAMES), unique=True, max_size=2)):
            plain[key] = draw(plain_dicts((*batch, DEEP) if key == "deep" else batch, depth - 1))
    return plain


@st.composite
def cases(draw, batches=BATCHES):
    """A batch size, a nested dict and its container."""
    batch = draw(batches)
    plain = draw(plain_dicts(batch))
    return batch, plain, build(plain, batch)


@st.composite
def arrays(draw, size, length, repeats):
    """An integer array for a dim of this size, as a list, a tensor or an array."""
    choice = st.integers(-size, size - 1) if repeats else st.integers(0, size - 1)
    numbers = st.lists(choice, min_size=length, max_size=length)
    array = draw(numbers if repeats else st.lists(choice, unique=True))
    return draw(st.sampled_from([list, long_tensor, np.array]))(array or np.zeros(0, np.int64))


def long_tensor(array):
    return torch.tensor(array, dtype=torch.long)


@st.composite
def masks(draw, shape):
    n = math.prod(shape)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    return mask.reshape(shape).numpy() if draw(st.booleans()) else mask.reshape(shape)


@st.composite
def indices(draw, shape, repeats=True):
    """An index that is valid for a tensor of this shape.

    At most one dim-consuming mask or several integer arrays of one length; at most one ellipsis.
    """
    items, dim, length, used = [], 0, draw(st.integers(0, 3)), None
    while dim < len(shape):
        size = shape[dim]
        kind = draw(st.sampled_from(["slice", "slice", "int", "array", "mask", "none", "stop"]))
        if kind == "stop":
            break
        if kind == "none":
            items.append(None)
            continue
        if kind == "int" and size:
            i = draw(st.integers(-size, size - 1))
            items.append(draw(st.sampled_from([i, np.int64(i), torch.tensor(i)])))
        elif kind == "array" and size and used != "mask" and (repeats or used is None):
            used = "array"
            items.append(draw(arrays(size, length, repeats)))
        elif kind == "mask" and used is None:
            used, span = "mask", draw(st.integers(1, len(shape) - dim))
            items.append(draw(masks(shape[dim : dim + span])))
            dim += span - 1
        else:
            bound = st.none() | st.integers(-4, 4)
            items.append(slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3))))
        dim += 1
    if draw(st.booleans()):
        items.append(...)
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


def factors(draw, numel, most=3):
    """A shape with this number of elements."""
    shape = []
    for _ in range(draw(st.integers(0, most - 1))):
        n = draw(st.sampled_from([n for n in range(1, max(numel, 1) + 1) if numel % n == 0]))
        shape.append(n)
        numel //= n
    return (*shape, numel)


def op_reshape(draw, shape):
    new = factors(draw, math.prod(shape))
    if math.prod(shape) and draw(st.booleans()):
        i = draw(st.integers(0, len(new) - 1))
        new = (*new[:i], -1, *new[i + 1 :])
    return (new,)


def op_expand(draw, shape):
    lead = draw(st.lists(st.integers(1, 2), max_size=1))
    return ((*lead, *[draw(st.sampled_from([-1, n] + [2] * (n == 1))) for n in shape]),)


def op_permute(draw, shape):
    dims = draw(st.permutations(range(len(shape))))
    return (tuple(d - len(shape) if draw(st.booleans()) else d for d in dims),)


def op_flatten(draw, shape):
    ends = st.integers(0, len(shape) - 1)
    start, end = sorted((draw(ends), draw(ends)))
    return start, end - len(shape) if draw(st.booleans()) else end


def op_narrow(draw, shape):
    dim = a_dim(draw, shape)
    start = draw(st.integers(0, shape[dim]))
    return dim, start, draw(st.integers(0, shape[dim] - start))


def op_unflatten(draw, shape):
    dim = a_dim(draw, shape)
    return dim, factors(draw, shape[dim])


def a_dim(draw, shape):
    return draw(st.integers(-len(shape), len(shape) - 1))


# strategies of arguments of a shape operation, for shapes of some dims
OPS = {
    "permute": op_permute,
    "transpose": lambda draw, shape: (a_dim(draw, shape), a_dim(draw, shape)),
    "flatten": op_flatten,
    "unflatten": op_unflatten,
    "flip": lambda draw, shape: (a_dim(draw, shape),),
    "roll": lambda draw, shape: (draw(st.integers(-3, 3)), a_dim(draw, shape)),
    "narrow": op_narrow,
    "repeat": lambda draw, shape: tuple(draw(st.integers(1, 2)) for _ in shape),
    "repeat_interleave": lambda draw, shape: (draw(st.integers(1, 2)), a_dim(draw, shape)),
}
ALWAYS = {
    "reshape": op_reshape,
    "unsqueeze": lambda draw, shape: (draw(st.integers(-len(shape) - 1, len(shape))),),
    "squeeze": lambda draw, shape: (a_dim(draw, shape),) if shape and draw(st.booleans()) else (),
    "expand": op_expand,
}


@st.composite
def shape_ops(draw, shape):
    """A shape operation, (name, args), that is valid for this shape."""
    table = {**OPS, **ALWAYS} if shape else ALWAYS
    name = draw(st.sampled_from(sorted(table)))
    return name, table[name](draw, shape)


# --- indexing ----------------------------------------------------------------------------------


@examples
@given(st.data())
def test_index(data):
    batch, plain, td = data.draw(
        cases(FULL_BATCHES | st.lists(SIZES, min_size=1, max_size=3).map(tuple))
    )
    index = data.draw(indices(batch))
    rows = rows_of(batch)
    check(td[index], plain, batch, rows[index])
    check(td, plain, batch, rows)
    assert td.numel() == max(1, math.prod(batch))  # never 0, even where a batch dim is


@examples
@given(st.data())
def test_assign_container(data):
    batch, plain, td = data.draw(cases(FULL_BATCHES))
    index = data.draw(indices(batch, repeats=False))
    td = td.clone()
    other = td.apply(lambda x: x + 1000)
    before = leaves(td)
    rows, numel = rows_of(batch), math.prod(batch)
    rows[index] = rows[index] + numel
    td[index] = other[index]
    for key, value in plain_leaves(plain).items():
        flat = value.reshape(numel, *value.shape[len(batch) :])
        assert torch.equal(td[key], torch.cat([flat, flat + 1000])[rows]), key
        assert td[key] is before[key]


# --- shape -------------------------------------------------------------------------------------


@examples
@given(st.data())
def test_chain_of_shape_operations(data):
    batch, plain, td = data.draw(cases())
    rows = rows_of(batch)
    for _ in range(data.draw(st.integers(1, 3))):
        op = data.draw(shape_ops(tuple(rows.shape)))
        rows, td = apply_op(rows, op), apply_op(td, op)
        check(td, plain, batch, rows)


@examples
@given(st.data())
def test_parts(data):
    batch, plain, td = data.draw(cases(FULL_BATCHES))
    rows, ndim = rows_of(batch), len(batch)
    dim = data.draw(st.integers(-ndim, ndim - 1))
    size = batch[dim]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=2)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    for op in (
        ("split", (data.draw(st.integers(1, size + 1)), dim)),
        ("split", (sizes, dim)),
        ("chunk", (data.draw(st.integers(1, 4)), dim)),
        ("tensor_split", (tuple(cuts), dim)),
    ):
        got, want = apply_op(td, op), apply_op(rows, op)
        assert len(got) == len(want)
        for one, part_rows in zip(got, want, strict=True):
            check(one, plain, batch, part_rows)
        check(torch.cat(list(got), dim), plain, batch, rows)
    for one, part_rows in zip(td.unbind(dim), rows.unbind(dim), strict=True):
        check(one, plain, batch, part_rows)
    check(torch.stack(td.unbind(dim), dim), plain, batch, rows)


@examples
@given(st.data())
def test_stack_and_cat(data):
    batch, plain, td = data.draw(cases())
    rows, ndim = rows_of(batch), len(batch)
    count = data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(-ndim - 1, ndim))
    tds = [td.apply(lambda x, i=i: x + 100 * i) for i in range(count)]
    out = torch.stack(tds, dim)
    assert out.batch_size == torch.stack([rows] * count, dim).shape
    for key, value in leaves(out).items():
        at = dim % (ndim + 1)
        assert torch.equal(value, torch.stack([one[key] for one in tds], at)), key
    if ndim:
        dim = data.draw(st.integers(-ndim, ndim - 1))
        out = torch.cat(tds, dim)
        assert out.batch_size == torch.cat([rows] * count, dim).shape
        for key, value in leaves(out).items():
            assert torch.equal(value, torch.cat([one[key] for one in tds], dim % ndim)), key


# --- keys --------------------------------------------------------------------------------------


def plain_get(plain, key):
    for name in key:
        plain = plain[name]
    return plain


def plain_set(plain, key, value):
    for name in key[:-1]:
        plain = plain.setdefault(name, {})
    plain[key[-1]] = value


def plain_copy(plain):
    return {key: plain_copy(value) if is_node(value) else value for key, value in plain.items()}


def plain_merge(plain, new):
    for key, value in new.items():
        if is_node(value) and is_node(plain.get(key)):
            plain_merge(plain[key], value)
        else:
            plain[key] = plain_copy(value) if is_node(value) else value


def plain_select(plain, keys):
    out = {}
    for key in keys:
        value = plain_get(plain, key)
        new = {}
        plain_set(new, key, plain_copy(value) if is_node(value) else value)
        plain_merge(out, new)
    return out


def plain_exclude(plain, keys):
    out = plain_copy(plain)
    for key in keys:
        try:
            del plain_get(out, key[:-1])[key[-1]]
        except KeyError:
            pass
    return out


PATHS = st.builds(
    lambda nodes, leaf: (*nodes, leaf),
    st.lists(st.sampled_from("xy"), max_size=2),
    st.sampled_from(LEAF_NAMES),
)
NODE_PATHS = st.lists(st.sampled_from("xy"), min_size=1, max_size=2).map(tuple)


def short(key):
    return key[0] if len(key) == 1 else key


def check_keys(td, plain):
    """The same tree: keys of every kind, and the same tensor objects."""
    want, nodes = plain_leaves(plain), plain_nodes(plain)
    assert set(td.keys()) == set(plain)
    assert set(td.keys(True, True)) == {short(key) for key in want}
    assert set(td.keys(True)) == {short(key) for key in want} | {short(key) for key in nodes}
    assert set(td.keys(leaves_only=True)) == {
        key for key, value in plain.items() if not is_node(value)
    }
    for key, value in want.items():
        assert td.get(key) is value, key
        assert key in td.keys(True)
    for key in nodes:
        assert is_tensor_collection(td.get(key))


@st.composite
def tree(draw, batch=(2,)):
    """A nested dict of tensors, with leaves called a, b, c and nodes called x, y."""
    plain = {}
    for key in draw(st.lists(PATHS, unique=True, max_size=5)):
        plain_set(plain, key, torch.zeros(*batch, draw(st.integers(1, 3))))
    return plain


def plain_del(plain, key):
    return plain_get(plain, key[:-1]).pop(key[-1])


def plain_rename(plain, key, new):
    plain_set(plain, new, plain_del(plain, key))


# calls of (td, key, value, new key, tree), and their effect on the dict
FREE = {
    "set": (lambda td, k, v, n, t: td.set(k, v), lambda p, k, v, n, t: plain_set(p, k, v)),
    "update": (lambda td, k, v, n, t: td.update(t), lambda p, k, v, n, t: plain_merge(p, t)),
}
PRESENT = {
    "del": (lambda td, k, v, n, t: td.del_(k), lambda p, k, v, n, t: plain_del(p, k)),
    "pop": (lambda td, k, v, n, t: td.pop(k), lambda p, k, v, n, t: plain_del(p, k)),
    "rename": (
        lambda td, k, v, n, t: td.rename_key_(k, n),
        lambda p, k, v, n, t: plain_rename(p, k, n),
    ),
    "read": (lambda td, k, v, n, t: td[k], lambda p, k, v, n, t: None),
}


@examples
@given(tree(), st.data())
def test_programs_of_key_operations(plain, data):
    td = TensorDict(plain, [2])
    plain = plain_copy(plain)
    for _ in range(data.draw(st.integers(1, 6))):
        name = data.draw(st.sampled_from([*FREE, *PRESENT, "setdefault"]))
        key, new, more = data.draw(PATHS), data.draw(PATHS), data.draw(tree())
        value = torch.ones(2, data.draw(st.integers(1, 3)))
        present = key in plain_leaves(plain)
        assert (key in td) is (key in td.keys(True)) is present
        assert td.get(key) is (plain_get(plain, key) if present else None)
        if name == "setdefault":
            if not present:
                plain_set(plain, key, value)
            assert td.setdefault(key, value) is plain_get(plain, key)
        elif name in PRESENT and not present:
            with pytest.raises(KeyError):
                PRESENT[name][0](td, key, value, new, more)
        else:
            for act, on in zip({**FREE, **PRESENT}[name], (td, plain), strict=True):
                act(on, key, value, new, more)
        check_keys(td, plain)


@examples
@given(tree(), st.data())
def test_select_and_exclude(plain, data):
    td = TensorDict(plain, [2])
    keys_of_all = sorted(plain_leaves(plain)) + sorted(plain_nodes(plain))
    keys = data.draw(st.lists(st.sampled_from(keys_of_all), unique=True)) if keys_of_all else []
    keys = [
        key for key in keys if not any(key != other and key == other[: len(key)] for other in keys)
    ]
    check_keys(td.select(*keys), plain_select(plain, keys))
    more = keys + data.draw(st.lists(PATHS | NODE_PATHS, max_size=2))
    check_keys(td.exclude(*more), plain_exclude(plain, more))
    check_keys(td.select(*keys, "zz", strict=False).select(*keys), plain_select(plain, keys))
    check_keys(td, plain)
    for missing in more:
        if missing not in keys_of_all:
            with pytest.raises(KeyError):
                td.select(missing)
    assert td.exclude(*keys, inplace=True) is td
    check_keys(td, plain_exclude(plain, keys))


# --- a lazy stack is the dense stack -----------------------------------------------------------


@st.composite
def stacks(draw):
    """The same parts stacked lazily and densely."""
    batch = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    plain = draw(plain_dicts(batch, depth=1, min_size=1))
    td = build(plain, batch)
    parts = [td.apply(lambda x, i=i: x + 100 * i) for i in range(draw(st.integers(1, 3)))]
    dim = draw(st.integers(-len(batch) - 1, len(batch)))
    return lazy_stack([part.clone() for part in parts], dim), torch.stack(parts, dim)


@examples
@given(st.data())
def test_lazy_rows_as_dense(data):
    lazy, dense = data.draw(stacks())
    same(lazy, dense)
    same(lazy.contiguous(), dense)
    assert set(lazy.keys(True)) == set(dense.keys(True))
    index = data.draw(indices(tuple(dense.batch_size)))
    got, want = lazy[index], dense[index]
    assert got.batch_size == want.batch_size
    if 0 not in want.batch_size:  # a stack of no parts knows no keys
        same(got, want)
    index = data.draw(indices(tuple(dense.batch_size), repeats=False))
    for new in (dense.apply(lambda x: x + 1000)[index], -1):
        lazy[index] = dense[index] = new
        same(lazy, dense)


@examples
@given(st.data())
def test_lazy_shape_as_dense(data):
    lazy, dense = data.draw(stacks())
    for _ in range(data.draw(st.integers(1, 2))):
        op = data.draw(shape_ops(tuple(dense.batch_size)))
        lazy, dense = apply_op(lazy, op), apply_op(dense, op)
        assert lazy.batch_size == dense.batch_size
        if 0 in dense.batch_size:
            return
        same(lazy, dense)


@examples
@given(st.data())
def test_lazy_parts_and_keys_as_dense(data):
    lazy, dense = data.draw(stacks())
    dim = data.draw(st.integers(-dense.ndim, dense.ndim - 1))
    size = data.draw(st.integers(1, 3))
    for op in (("unbind", (dim,)), ("split", (size, dim))):
        for one, other in zip(apply_op(lazy, op), apply_op(dense, op), strict=True):
            same(one, other)
    for join in (torch.cat, torch.stack):
        same(join([lazy, lazy], dim), join([dense, dense], dim))
    same(lazy_stack([lazy, lazy], dim), torch.stack([dense, dense], dim))
    keys = data.draw(st.lists(st.sampled_from(sorted(leaves(dense))), unique=True))
    same(lazy.select(*keys), dense.select(*keys))
    same(lazy.exclude(*keys), dense.exclude(*keys))
    value = numbered(dense.batch_size, torch.float32)
    for td in (lazy, dense):
        td.set("zz", value).update({"yy": value})
        for key in keys:
            del td[key]
    same(lazy, dense)


# --- the tests can fail ------------------------------------------------------------------------


def wrong_index(data):
    batch, plain, td = data.draw(cases(FULL_BATCHES))
    rows = rows_of(batch)[data.draw(indices(batch))]
    check(td[data.draw(indices(batch))], plain, batch, rows)


def wrong_update(data):
    plain, more = data.draw(tree()), data.draw(tree())
    td = TensorDict(plain, [2]).update(more)
    check_keys(td, {**plain, **more})  # replaces nested containers instead of merging into them


def wrong_stack(data):
    lazy, dense = data.draw(stacks())
    same(lazy.flip(0), dense)


@pytest.mark.parametrize("wrong", [wrong_index, wrong_update, wrong_stack])
def test_properties_can_fail(wrong):
    """The property must be refuted by some example."""
    search = settings(
        examples, max_examples=200, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        search(given(st.data())(wrong))()
