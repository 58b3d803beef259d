"""SipHash, RandomProjectionHash and BinaryToDecimal as modules."""

import copy
import multiprocessing

import pytest
import torch
from torch import nn

from raffia.data.hash import BinaryToDecimal, RandomProjectionHash, SipHash
from raffia.data.siphash import siphash

N, F, C = 6, 20, 4
BITS = torch.tensor([[0, 0, 0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 1]])


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def fitted(x, **options):
    module = RandomProjectionHash(n_components=C, **options)
    module.fit(x)
    return module


def test_siphash_as_a_module():
    x = torch.arange(24.0).view(2, 3, 4)
    options = {"key": (1, 2**64 - 2), "rounds": (2, 4), "normalize": False}
    assert SipHash()(x).equal(siphash(x))
    assert SipHash(**options)(-x).equal(siphash(-x, **options))
    assert not SipHash(**options)(x).equal(siphash(x))
    assert SipHash()(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    assert repr(SipHash(key=(5, 6), rounds=(2, 4))) == (
        "SipHash(as_tensor=True, key=(5, 6), rounds=(2, 4), normalize=True)"
    )
    x = torch.tensor([[1, -1], [2, 0]], dtype=torch.int16)
    assert SipHash(as_tensor=False)(x) == [b"\1\0\xff\xff", b"\2\0\0\0"]
    zeros = torch.tensor([[-0.0], [0.0]])
    assert len(set(SipHash(as_tensor=False)(zeros))) == 1
    assert len(set(SipHash(as_tensor=False, normalize=False)(zeros))) == 2


# RandomProjectionHash


def test_rows_of_other_shapes():
    x = draw(N, 2, F)
    module = RandomProjectionHash(n_components=C, dtype_cast=torch.float64)
    assert module(x).shape == (N,) and module.projection.shape == (F, C)
    assert module(x.transpose(0, 1).contiguous().transpose(0, 1)).equal(module(x))
    assert module(torch.zeros(0, F)).shape == (0,)
    for rows in (torch.arange(5), torch.tensor([[1j, 0], [0, 1j]])):
        assert RandomProjectionHash()(rows).unique().numel() == len(rows)


def test_a_seed_determines_the_projection_in_every_process():
    x, state = torch.arange(40.0).view(2, F), torch.random.get_rng_state()
    expected = RandomProjectionHash()(x)
    assert not RandomProjectionHash(seed=4)(x).equal(expected)
    one, two = (RandomProjectionHash(seed=torch.Generator().manual_seed(9)) for _ in range(2))
    assert one(x).equal(two(x)) and torch.random.get_rng_state().equal(state)
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(RandomProjectionHash(), (x,)).equal(expected)


def test_state_and_copies_before_and_after_fitting():
    x = draw(N, F)
    assert RandomProjectionHash().n_components == RandomProjectionHash._N_COMPONENTS_DEFAULT == 16
    unfit, other = (RandomProjectionHash(n_components=C, seed=seed) for seed in (1, 2))
    assert other.state_dict()["projection"].shape == (0, C)
    early = copy.deepcopy(unfit)
    expected = unfit(x)
    assert early(x).equal(expected) and copy.deepcopy(unfit)(x).equal(expected)
    again = nn.ModuleDict({"hash": fitted(x[:, :3], seed=5), "net": nn.Linear(2, 3)})
    again.load_state_dict(nn.ModuleDict({"hash": unfit, "net": nn.Linear(2, 3)}).state_dict())
    other.load_state_dict(unfit.state_dict())
    assert other.fitted and other(x).equal(expected) and again["hash"](x).equal(expected)
    assert unfit.bfloat16()(x).equal(expected) and unfit.projection.dtype == torch.float64
    other.load_state_dict(RandomProjectionHash(n_components=C).state_dict())
    assert not other.fitted
    with pytest.raises(RuntimeError, match="size mismatch for projection"):
        RandomProjectionHash(n_components=C + 1).load_state_dict(unfit.state_dict())


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


# BinaryToDecimal


def test_the_example_that_torchrl_documents():
    module = BinaryToDecimal(num_bits=4, device="cpu", dtype=torch.int32, convert_to_binary=True)
    binary = torch.Tensor([[0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 10, 0]])
    decimal = module(binary)
    assert decimal.shape == (2,) and decimal.dtype == torch.int32 and decimal.tolist() == [3, 2]
    assert BinaryToDecimal(4, sum_chunks=False)(BITS).tolist() == [[1, 2], [2, 1]]


@pytest.mark.parametrize("num_bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bfloat16])
def test_numbers_equal_python_s(num_bits, dtype):
    x = torch.randint(-3, 4, (5, 2, 8), generator=torch.Generator().manual_seed(0))
    x = x.abs().to(dtype) if dtype is torch.uint8 else x.to(dtype)
    for rows in (x, x.permute(1, 0, 2), x[0, 0], x[:0]):
        digits = ["".join(map(str, row)) for row in (rows > 0).reshape(-1, 8).int().tolist()]
        chunks = [[int(row[i : i + num_bits], 2) for i in range(0, 8, num_bits)] for row in digits]
        for bits, convert in ((rows, True), (rows > 0, False)):
            for sums, expected in ((True, [sum(chunk) for chunk in chunks]), (False, chunks)):
                module = BinaryToDecimal(num_bits, convert_to_binary=convert, sum_chunks=sums)
                assert module(bits).tolist() == expected


def test_the_weights_are_part_of_the_module():
    module = BinaryToDecimal(4)
    assert list(module.state_dict()) == ["weights"]
    assert BinaryToDecimal(4).half()(torch.ones(1, 4)).tolist() == [15]
    assert module.to("meta").weights.is_meta and BinaryToDecimal(3, device="meta").weights.is_meta
    assert repr(module) == (
        "BinaryToDecimal(num_bits=4, dtype=torch.int64, convert_to_binary=False, sum_chunks=True)"
    )


MISTAKES = [
    (lambda: SipHash(rounds=(1, 4)), ValueError, "rounds must be"),
    (lambda: SipHash(key=7), ValueError, "two 64-bit integers"),
    (lambda: SipHash()(torch.tensor(1.0)), ValueError, "has no rows"),
    (lambda: RandomProjectionHash(n_component=3), TypeError, "unexpected keyword .* 'n_component'"),
    (lambda: RandomProjectionHash(n_components=0), ValueError, "n_components .* positive; got 0"),
    (lambda: RandomProjectionHash(dtype_cast=torch.float16), ValueError, "dtype_cast must be"),
    (lambda: fitted(draw(N, F))(draw(N, 3)), ValueError, r"fitted to 20 features, but x \[6, 3\]"),
    (lambda: RandomProjectionHash()(torch.tensor(1.0)), ValueError, "has no rows"),
    (lambda: RandomProjectionHash()(torch.zeros(3, 0)), ValueError, "no features to project"),
    (lambda: BinaryToDecimal(4)(torch.zeros(2, 6)), ValueError, r"of x \[2, 6\] must be a mult"),
    (lambda: BinaryToDecimal(65), ValueError, r"num_bits=65 must be in 1\.\.64"),
    (lambda: BinaryToDecimal(0, dtype=torch.float32), ValueError, r"must be in 1\.\.24"),
    (lambda: BinaryToDecimal(2)(2 * BITS), ValueError, "num_bits=2, convert_to_binary=True"),
    (lambda: BinaryToDecimal(64)(torch.ones(1, 128)), ValueError, "the sum of 2 chunks of 64 bits"),
]


def test_invalid_calls_are_refused():
    for call, error, match in MISTAKES:
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("features", [1, 2, 3, 5, F])
def test_the_projection_is_a_matrix_product(features):
    x = draw(N, features)
    module = fitted(x, dtype_cast=torch.float64, as_tensor=False)
    rows = [torch.frombuffer(bytearray(row), dtype=torch.float64) for row in module(x)]
    torch.testing.assert_close(torch.stack(rows), x.double() @ module.projection)
