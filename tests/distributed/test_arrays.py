"""Trees as bytes and back."""

import pytest
import torch

from raffia.distributed.arrays import pack, unpack
from raffia.tensordict.tensordict import TensorDict


def test_packing_keeps_the_order_of_entries_and_copies():
    """A norm sums in the order of entries."""
    tree = TensorDict(z=torch.zeros(1), nest=TensorDict(b=torch.ones(1), a=TensorDict()))
    tree["a"] = torch.zeros(())
    data = pack(tree)
    tree["a"].fill_(1)
    found = unpack(data)
    assert list(found.keys()) == ["z", "nest", "a"] and found["a"] == 0
    assert list(found.keys(True)) == list(tree.keys(True))
    assert unpack(pack(TensorDict())).is_empty()


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


def test_a_tree_round_trip():
    torch.manual_seed(0)
    tree = TensorDict(
        {
            "leaves": TensorDict(
                {str(dtype): (torch.randn(3, 2, 5) * 9).to(dtype) for dtype in DTYPES},
                batch_size=[3, 2],
            ),
            "empty": TensorDict(batch_size=[3]),
            "none": torch.empty(3, 0, 4),
            "turned": torch.arange(12.0).view(4, 3).t(),
            "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
            "negative": torch.randn(3, 2, dtype=torch.complex64).conj().imag,
        },
        batch_size=[3],
    )
    for room in (0, 5):
        found = unpack(pack(tree, room=room), room=room)
        assert set(found.keys(True)) == set(tree.keys(True))
        assert found.batch_size == tree.batch_size
        assert found["leaves"].batch_size == (3, 2) and found["empty"].batch_size == (3,)
        for key, value in tree.items(True, True):
            assert found[key].dtype is value.dtype and torch.equal(found[key], value), key


@pytest.mark.parametrize(
    "value", ["text", torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)]
)
def test_values_other_than_plain_tensors_are_refused(value):
    tree = TensorDict(a=TensorDict({"b": value}))
    with pytest.raises(TypeError, match=r"entry a\.b is a .*, but only trees of plain"):
        pack(tree)
