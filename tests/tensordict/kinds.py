"""Kinds of container, and checks to compare them.

`make` numbers the rows: `op(arange(numel).reshape(batch))` gives the rows that the result of an
operation on the batch dims must hold, whatever the trailing dims of a leaf are.
"""

import pytest
import torch
from torch import Tensor

from raffia import (
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    TensorDictParams,
    is_tensor_collection,
    lazy_stack,
)
from raffia.tensordict.sub import SubTensorDict
from tests.tensordict.invariants import sound

BATCH = (4, 3)
ROWS = torch.arange(12).reshape(BATCH)
ORDER = torch.tensor([2, 0, 3, 1])


class Fields(TensorClass):
    """The entries of `make`, as fields."""

    a: Tensor
    b: Tensor
    n: TensorDict
    m: TensorDict


# from the dense container to one of another kind with the same rows
KINDS = {
    "dense": lambda td: td,
    "locked": lambda td: td.lock_(),
    "along 0": lambda td: lazy_stack(list(td.unbind(0)), 0, stack_dim_name=td.names[0]),
    "along 1": lambda td: lazy_stack(list(td.unbind(1)), 1, stack_dim_name=td.names[1]),
    "tensorclass": lambda td: Fields(**dict(td.items()), batch_size=td.shape, names=td.names),
    "parameters": lambda td: TensorDictParams(td, no_convert=True),
    "memory-mapped": lambda td: td.memmap(),
    "rows of another": lambda td: td[ORDER.argsort()]._get_sub_tensordict(ORDER),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def rows_of(batch):
    return torch.arange(torch.Size(batch).numel()).reshape(batch)


def make(batch=BATCH, names=None, shift=0):
    """Leaves [*batch], [*batch, 2]; a nested container one batch dim longer: [*batch, 5]."""
    rows = rows_of(batch)
    wide = torch.arange(10 * rows.numel()).reshape(*batch, 5, 2)
    entries = {
        "a": torch.arange(2.0 * rows.numel()).reshape(*batch, 2) + shift,
        "b": rows + shift,
        "n": TensorDict({"c": wide + shift}, [*batch, 5]),
        "m": {"k": {"d": rows % 5 == 0}},
    }
    return TensorDict(entries, batch, names=names)


def leaves(td):
    """{key: tensor}, nested ones too."""
    return dict(td.items(include_nested=True, leaves_only=True))


def check_rows(td, rows, source=None):
    """td has exactly the `rows` of source, and every nested batch size follows."""
    source = make() if source is None else source
    assert is_tensor_collection(td) and sound(td)
    assert td.batch_size == rows.shape
    got, want = leaves(td), leaves(source)
    assert set(got) == set(want)
    for key, value in want.items():
        flat = value.reshape(-1, *value.shape[source.ndim :])
        torch.testing.assert_close(got[key], flat[rows], rtol=0, atol=0)
    assert td.get("n").batch_size == (*rows.shape, 5)
    assert td.get("m").batch_size == td.get(("m", "k")).batch_size == rows.shape


def check_same(got, want):
    """Same batch sizes, keys and values, whatever the class."""
    assert is_tensor_collection(got) and sound(got)
    assert got.batch_size == want.batch_size
    assert set(leaves(got)) == set(leaves(want))
    for key, value in leaves(want).items():
        torch.testing.assert_close(leaves(got)[key], value, rtol=0, atol=0, equal_nan=True)
    for key in want.keys(include_nested=True):
        if is_tensor_collection(want.get(key)):
            assert got.get(key).batch_size == want.get(key).batch_size, key


def is_lazy(td, dim=None):
    return isinstance(td, LazyStackedTensorDict) and (dim is None or td.stack_dim == dim)


def is_rows(td):
    """Whether a container reads its entries, which are copies, from another one."""
    return isinstance(td, SubTensorDict)


def call(name, *args, **options):
    """A method call that can be applied to containers of several kinds."""
    return lambda td: getattr(td, name)(*args, **options)


def ops(**table):
    """[(name, args)]; a row of the table has the arguments of several calls of one method."""
    calls = [(name, args) for name, row in table.items() for args in row]
    return [(name, args if isinstance(args, tuple) else (args,)) for name, args in calls]


def apply_op(x, op, namespace=None):
    """Calls the method of that name, or the function of a namespace; a last dict has keywords."""
    name, args = op
    *args, options = args if args and isinstance(args[-1], dict) else (*args, {})
    if namespace is None:
        return getattr(x, name)(*args, **options)
    return getattr(namespace, name)(x, *args, **options)


def each(table, check):
    """Runs the check for every row of a table, and names those that fail."""
    failed, named = [], table if isinstance(table, dict) else dict(enumerate(table))
    for name, row in named.items():
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{name if isinstance(table, dict) else row}: {error!r}"[:300])
    assert not failed, "\n".join(failed)


def raises(row):
    """The check of (call, error, match) for calls without arguments."""
    function, error, match = row
    with pytest.raises(error, match=match or None):
        function()


def refused(make, unchanged=check_same):
    """The check of (call, error, match): the error is raised, and nothing has changed."""

    def check(row):
        function, error, match = row
        td = make()
        with pytest.raises(error, match=match or None):
            function(td)
        unchanged(td, make())
        assert td.is_locked is make().is_locked and td.names == make().names

    return check
