"""SipHash, RandomProjectionHash and BinaryToDecimal as modules."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from raffia.data.hash import BinaryToDecimal, RandomProjectionHash, SipHash
from raffia.data.siphash import siphash

N, F, C = 6, 20, 4


# SipHash


def test_a_module_hashes_rows():
    x = torch.arange(24.0).view(2, 3, 4)
    assert SipHash()(x).equal(siphash(x))
    options = {"key": (1, 2**64 - 2), "rounds": (2, 4), "normalize": False}
    assert SipHash(**options)(-x).equal(siphash(-x, **options))
    assert not SipHash(**options)(x).equal(siphash(x))


def test_rows_without_bytes_are_0():
    assert SipHash()(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    assert SipHash()(torch.zeros(0, 3)).shape == (0,)


def test_bytes_instead_of_integers():
    x = torch.tensor([[1, -1], [2, 0]], dtype=torch.int16)
    assert SipHash(as_tensor=False)(x) == [b"\1\0\xff\xff", b"\2\0\0\0"]
    assert SipHash(as_tensor=False)(torch.zeros(2, 0)) == [b"", b""]
    zeros = torch.tensor([[-0.0], [0.0]])
    first, second = SipHash(as_tensor=False)(zeros)
    assert first == second
    first, second = SipHash(as_tensor=False, normalize=False)(zeros)
    assert first != second


def test_options_are_shown():
    assert repr(SipHash(key=(5, 6), rounds=(2, 4))) == (
        "SipHash(as_tensor=True, key=(5, 6), rounds=(2, 4), normalize=True)"
    )


def test_mistakes_in_options():
    with pytest.raises(ValueError, match="rounds must be"):
        SipHash(rounds=(1, 4))
    with pytest.raises(ValueError, match="two 64-bit integers"):
        SipHash(key=7)
    with pytest.raises(ValueError, match="has no rows"):
        SipHash()(torch.tensor(1.0))


# RandomProjectionHash


def fitted(x, **options):
    module = RandomProjectionHash(n_components=C, **options)
    module.fit(x)
    return module


def test_a_row_hashes_alone_as_in_a_batch():
    x = torch.randn(64, F, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        module = RandomProjectionHash(dtype_cast=dtype)
        together = module(x)
        assert together.equal(torch.cat([module(row[None]) for row in x]))
        assert together[10:17].equal(module(x[10:17]))


def test_the_projection_is_a_matrix_product():
    x = torch.randn(N, F)
    module = fitted(x, dtype_cast=torch.float64, as_tensor=False)
    rows = [torch.frombuffer(bytearray(row), dtype=torch.float64) for row in module(x)]
    torch.testing.assert_close(torch.stack(rows), x.double() @ module.projection)
    for features in (1, 2, 3, 5):
        module = fitted(x[:, :features], dtype_cast=torch.float64, as_tensor=False)
        rows = [
            torch.frombuffer(bytearray(r), dtype=torch.float64) for r in module(x[:, :features])
        ]
        torch.testing.assert_close(torch.stack(rows), x[:, :features].double() @ module.projection)


def test_large_numbers_do_not_overflow():
    x = 1e5 * torch.randn(1000, 17, generator=torch.Generator().manual_seed(0))
    assert RandomProjectionHash()(x).unique().numel() == 1000


def test_a_finer_dtype_tells_near_rows_apart():
    x = torch.randn(500, 17, generator=torch.Generator().manual_seed(0))
    near = x.clone()
    near[:, 0] += 1e-3
    coarse, fine = RandomProjectionHash(), RandomProjectionHash(dtype_cast=torch.float64)
    assert 0.02 < (coarse(x) == coarse(near)).double().mean() < 0.2
    assert not (fine(x) == fine(near)).any()


def test_a_seed_is_the_whole_of_the_projection():
    x = torch.randn(N, F)
    state = torch.random.get_rng_state()
    assert RandomProjectionHash(seed=3)(x).equal(RandomProjectionHash(seed=3)(x))
    assert torch.random.get_rng_state().equal(state)
    assert not RandomProjectionHash(seed=3)(x).equal(RandomProjectionHash(seed=4)(x))
    one, two = (RandomProjectionHash(seed=torch.Generator().manual_seed(9)) for _ in range(2))
    assert one(x).equal(two(x))


def test_another_process_draws_the_same():
    program = (
        "import torch; from raffia.data.hash import RandomProjectionHash as R\n"
        "print(*R()(torch.arange(40.).view(2, 20)).tolist())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "5"}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    here = RandomProjectionHash()(torch.arange(40.0).view(2, 20)).tolist()
    assert list(map(int, output.stdout.split())) == here


def test_state_before_and_after_fitting():
    x = torch.randn(N, F)
    unfit = RandomProjectionHash(n_components=C, seed=1)
    assert copy.deepcopy(unfit)(x).equal(unfit(x))
    assert copy.deepcopy(unfit)(x).equal(unfit(x))
    other = RandomProjectionHash(n_components=C, seed=2)
    assert other.state_dict()["projection"].shape == (0, C)
    other.load_state_dict(unfit.state_dict())
    assert other.fitted and other(x).equal(unfit(x))
    again = fitted(x[:, :3], seed=5)
    again.load_state_dict(unfit.state_dict())
    assert again(x).equal(unfit(x))
    again.load_state_dict(RandomProjectionHash(n_components=C).state_dict())
    assert not again.fitted


def test_state_within_a_larger_module():
    x = torch.randn(N, F)
    whole, other = (
        nn.ModuleDict({"hash": RandomProjectionHash(seed=seed), "net": nn.Linear(2, 3)})
        for seed in (0, 1)
    )
    expected = whole["hash"](x)
    other.load_state_dict(whole.state_dict())
    assert other["hash"](x).equal(expected)


def test_a_state_of_other_size_is_refused():
    saved = fitted(torch.zeros(N, F)).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for projection"):
        RandomProjectionHash(n_components=C + 1).load_state_dict(saved)


def test_casting_a_model_keeps_its_hashes():
    x = torch.randn(N, F)
    module = fitted(x, dtype_cast=torch.float32)
    expected = module(x)
    assert module.bfloat16()(x).equal(expected)
    assert module.projection.dtype == torch.float64


def test_an_init_method():
    module = fitted(torch.zeros(N, F), init_method=nn.init.uniform_)
    assert 0 <= module.projection.min() and module.projection.max() <= 1

    def plain(matrix):  # takes no generator, as TorchRL calls it
        matrix.copy_(torch.randn(matrix.shape))

    before = torch.random.get_rng_state()
    one, other = (fitted(torch.zeros(N, F), init_method=plain, seed=3) for _ in range(2))
    assert torch.equal(one.projection, other.projection) and one.projection.count_nonzero() > 0
    assert torch.equal(one.transform, one.projection)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rows_of_other_shapes():
    x = torch.randn(N, 2, F)
    module = RandomProjectionHash(n_components=C, dtype_cast=torch.float64)
    assert module(x).shape == (N,) and module.projection.shape == (F, C)
    assert module(x.transpose(0, 1).contiguous().transpose(0, 1)).equal(module(x))
    assert RandomProjectionHash()(torch.arange(5)).unique().numel() == 5
    assert RandomProjectionHash()(torch.tensor([[1j, 0], [0, 1j]])).unique().numel() == 2
    assert RandomProjectionHash()(torch.eye(3, dtype=torch.bool)).unique().numel() == 3
    assert module(torch.zeros(0, F)).shape == (0,)


def test_equal_content_is_as_in_siphash():
    module = RandomProjectionHash()
    assert module(torch.tensor([[0.0, 1.0]])) == module(torch.tensor([[-0.0, 1.0]]))
    x = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan]])
    assert module(x)[0] == module(x)[1]  # a NaN leaves nothing of the rest


def test_mistakes_with_projections():
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_component'"):
        RandomProjectionHash(n_component=3)
    with pytest.raises(ValueError, match="n_components must be positive, not 0"):
        RandomProjectionHash(n_components=0)
    with pytest.raises(ValueError, match="dtype_cast must be bfloat16, float32 or float64"):
        RandomProjectionHash(dtype_cast=torch.float16)
    with pytest.raises(ValueError, match=r"was fitted to 20 features, but x \[6, 3\] has 3"):
        fitted(torch.zeros(N, F))(torch.zeros(N, 3))
    with pytest.raises(ValueError, match="has no rows"):
        RandomProjectionHash()(torch.tensor(1.0))
    with pytest.raises(ValueError, match="no features to project"):
        RandomProjectionHash()(torch.zeros(3, 0))


# BinaryToDecimal


def test_the_example_that_torchrl_documents():
    module = BinaryToDecimal(num_bits=4, device="cpu", dtype=torch.int32, convert_to_binary=True)
    binary = torch.Tensor([[0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 10, 0]])
    decimal = module(binary)
    assert decimal.shape == (2,) and decimal.dtype == torch.int32
    assert decimal.tolist() == [3, 2]


def test_chunks_can_be_told_apart():
    x = torch.tensor([[0, 0, 0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 1]])
    assert BinaryToDecimal(4, sum_chunks=False)(x).tolist() == [[1, 2], [2, 1]]
    assert BinaryToDecimal(8)(x).tolist() == [18, 33]


def test_other_dimensions_become_rows():
    bits = torch.tensor([[int(bit) for bit in f"{i:04b}"] for i in range(6)]).view(2, 3, 4)
    assert BinaryToDecimal(4)(bits).tolist() == [0, 1, 2, 3, 4, 5]
    assert BinaryToDecimal(4)(bits.permute(1, 0, 2)).tolist() == [0, 3, 1, 4, 2, 5]
    assert BinaryToDecimal(4)(bits[1, 2]).tolist() == [5]
    assert BinaryToDecimal(2, sum_chunks=False)(bits).shape == (6, 2)
    assert BinaryToDecimal(4)(torch.zeros(0, 4)).shape == (0,)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.float32, torch.bfloat16]
)
def test_what_is_positive_counts(dtype):
    x = torch.tensor([[3, 0, 7, 1]]).to(dtype)
    assert BinaryToDecimal(4, convert_to_binary=True)(x).tolist() == [11]
    if dtype not in (torch.uint8,):
        assert BinaryToDecimal(4, convert_to_binary=True)(-x).tolist() == [0]
    assert BinaryToDecimal(4)(x > 0).tolist() == [11]


def test_64_bits_are_twos_complement():
    x = torch.zeros(4, 64, dtype=torch.int64)
    x[1] = 1
    x[2, 0] = 1
    x[3, 1:] = 1
    assert BinaryToDecimal(64)(x).tolist() == [0, -1, -(2**63), 2**63 - 1]
    unsigned = BinaryToDecimal(64, dtype=torch.uint64)(x)
    assert unsigned.tolist() == [0, 2**64 - 1, 2**63, 2**63 - 1]
    assert BinaryToDecimal(8, dtype=torch.int8)(x[1:2, :8]).tolist() == [-1]


def test_the_weights_are_part_of_the_module():
    module = BinaryToDecimal(4)
    assert list(module.state_dict()) == ["weights"]
    assert module.to("meta").weights.is_meta
    assert BinaryToDecimal(3, device="meta").weights.is_meta
    assert BinaryToDecimal(4).half()(torch.ones(1, 4)).tolist() == [15]
    assert repr(module) == (
        "BinaryToDecimal(num_bits=4, dtype=torch.int64, convert_to_binary=False, sum_chunks=True)"
    )


def test_mistakes_with_bits():
    with pytest.raises(ValueError, match=r"last dimension of x \[2, 3\] must be a multiple"):
        BinaryToDecimal(4)(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"last dimension of x \[2, 6\] must be a multiple"):
        BinaryToDecimal(4)(torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"last dimension of x \[\] must"):
        BinaryToDecimal(1)(torch.tensor(1))
    with pytest.raises(ValueError, match=r"num_bits=65 must lie in 1\.\.64"):
        BinaryToDecimal(65)
    with pytest.raises(ValueError, match=r"num_bits=0 must lie in 1\.\.24"):
        BinaryToDecimal(0, dtype=torch.float32)
    with pytest.raises(ValueError, match="pass BinaryToDecimal.num_bits=2, convert_to_binary=True"):
        BinaryToDecimal(2)(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="the sum of 2 chunks of 8 bits may exceed torch.uint8"):
        BinaryToDecimal(8, dtype=torch.uint8)(torch.ones(1, 16))
    with pytest.raises(ValueError, match="may exceed torch.int64"):
        BinaryToDecimal(64)(torch.ones(1, 128))
