"""Modules that turn the content of each row into one integer: `SipHash` and its neighbours."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raffia.data.rows import row_bytes
from raffia.data.siphash import checked_key, checked_rounds, hashed
from raffia.functional.seeds import global_draws

__all__ = ["BinaryToDecimal", "RandomProjectionHash", "SipHash"]


class SipHash(nn.Module):
    """The SipHash of the bytes of each row: x [N, ...] of any dtype -> int64 [N], on x's device.

    The same row has the same hash on every device, in every process and release. Equal numbers are
    equal content: -0.0 counts as 0.0, and all NaNs are one (`normalize=False` counts each bit).
    With the zero key and rounds (1, 3) these are the values of `hash(bytes)` in CPython under
    PYTHONHASHSEED=0; as there, a row without bytes is 0.

    Another `key` (two 64-bit integers) gives other, unrelated hashes; with a secret one nobody else
    can make rows that collide. `rounds=(2, 4)` is slower and what the authors advise against
    attackers. With `as_tensor=False` the result is what would be hashed: a list of N bytes.

    Dtype and shape do not count: an int32 row has the hash of a float32 row with the same bytes.
    `QueryModule` and `TensorDictMap` distinguish them.

    >>> from raffia.data.hash import SipHash
    >>> SipHash()(torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]))
    tensor([-4669941682990263259, -3778166555168484291, -9122128731510687521])
    >>> SipHash(as_tensor=False)(torch.tensor([[1.0], [-0.0]]))
    [b'\\x00\\x00\\x80?', b'\\x00\\x00\\x00\\x00']
    """

    def __init__(
        self,
        as_tensor: bool = True,
        *,
        key: tuple[int, int] = (0, 0),
        rounds: tuple[int, int] = (1, 3),
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.as_tensor = as_tensor
        self.key = checked_key(key)
        self.rounds = checked_rounds(rounds)
        self.normalize = normalize

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """Hash `x[0]`, `x[1]`, ..."""
        if not isinstance(x, Tensor):
            raise TypeError(f"SipHash accepts a tensor [N, ...]; got a {type(x).__name__}")
        if not self.as_tensor:
            return _bytes_of_rows(x, self.normalize)
        if not x.numel() and x.dim():
            return x.new_zeros(x.shape[:1], dtype=torch.int64)
        return hashed(x, *self.key, self.rounds[0], self.normalize)

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"as_tensor={self.as_tensor}, key={self.key}, rounds={self.rounds}, "
            f"normalize={self.normalize}"
        )


def _bytes_of_rows(x: Tensor, normalize: bool) -> list[bytes]:
    data = row_bytes(x, normalize=normalize).cpu()
    width, content = data.shape[1], data.numpy().tobytes()
    return [content[i * width : (i + 1) * width] for i in range(len(data))]


class RandomProjectionHash(SipHash):
    """SipHash of a random projection of each row: rows that lie close together may share a hash.

    The last dimension of x is multiplied by a random matrix [features, n_components], and the
    result rounded to `dtype_cast`. The coarser that dtype, the more rows share a hash: of pairs of
    rows of 17 standard normal numbers that differ by 1e-3 in one of them, one in twelve does with
    bfloat16. Where each row should have a separate hash, use `SipHash`, which is also faster.

    The matrix is a buffer, `projection`, drawn by the first call (or by `fit`) from `seed`, so two
    modules with the same arguments agree, in every process; it is saved with the module. An
    `init_method` fills the matrix that it is given; it gets a `generator=` if it takes one.
    Products are summed in float64 and in one fixed order, so a row has the same hash alone and in a
    batch.

    >>> from raffia.data.hash import RandomProjectionHash
    >>> hash_module = RandomProjectionHash(n_components=4)
    >>> x = torch.linspace(-1e5, 1e5, 60).view(3, 20)
    >>> hashes = hash_module(x)
    >>> hashes.unique().numel()
    3
    >>> bool(hash_module(x[1:2]) == hashes[1])
    True
    """

    _N_COMPONENTS_DEFAULT = 16  # TorchRL's name and number
    projection: Tensor

    def __init__(
        self,
        *,
        n_components: int | None = None,
        dtype_cast: torch.dtype = torch.bfloat16,
        as_tensor: bool = True,
        init_method: Callable[..., Any] | None = None,  # torch.nn.init.normal_
        seed: int | torch.Generator = 0,
        key: tuple[int, int] = (0, 0),
        rounds: tuple[int, int] = (1, 3),
        normalize: bool = True,
    ) -> None:
        super().__init__(as_tensor, key=key, rounds=rounds, normalize=normalize)
        self.n_components = self._N_COMPONENTS_DEFAULT if n_components is None else n_components
        if self.n_components < 1:
            raise ValueError(f"n_components must be positive; got {n_components}")
        if dtype_cast not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(
                f"dtype_cast must be bfloat16, float32 or float64; got {dtype_cast}: smaller "
                "formats cannot hold large sums, so all of those would have the same hash"
            )
        self.dtype_cast = dtype_cast
        self.init_method = nn.init.normal_ if init_method is None else init_method
        if isinstance(seed, torch.Generator):
            seed = int(torch.randint(2**63 - 1, (), generator=seed, device=seed.device))
        self.seed = seed
        self.register_buffer("projection", torch.empty(0, self.n_components, dtype=torch.float64))

    @property
    def transform(self) -> Tensor:
        """The matrix, as TorchRL names it: float64 [features, n_components]."""
        return self.projection

    @property
    def fitted(self) -> bool:
        """Whether the matrix has been drawn."""
        return self.projection.shape[0] > 0

    def fit(self, x: Tensor) -> None:
        """Draw the matrix for rows like those of x; what x holds does not matter.

        >>> from raffia.data.hash import RandomProjectionHash
        >>> hash_module = RandomProjectionHash(n_components=4)
        >>> hash_module.fit(torch.zeros(3, 20))
        >>> hash_module.projection.shape
        torch.Size([20, 4])
        """
        features = _features(x).shape[-1]
        if not features:
            raise ValueError(f"rows of shape {list(x.shape[1:])} have no features to project")
        size = features, self.n_components
        matrix = torch.empty(size, dtype=torch.float64, device="cpu")
        if "generator" in inspect.signature(self.init_method).parameters:
            self.init_method(matrix, generator=torch.Generator().manual_seed(self.seed))
        else:  # it draws from the global one, if at all, which stays as it was
            with global_draws(self.seed):
                self.init_method(matrix)
        self.projection = matrix.to(x.device)

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """Project and hash `x[0]`, `x[1]`, ..."""
        if not self.fitted:
            self.fit(x)
        rows = _features(x)
        if rows.shape[-1] != self.projection.shape[0]:
            raise ValueError(
                f"this module was fitted to {self.projection.shape[0]} features, but x "
                f"{list(x.shape)} has {rows.shape[-1]}; fit(x) draws a new matrix"
            )
        return super().forward(_projected(rows, self.projection).to(self.dtype_cast))

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"n_components={self.n_components}, dtype_cast={self.dtype_cast}, seed={self.seed}, "
            f"{super().extra_repr()}"
        )

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "RandomProjectionHash":
        # A model that is cast to bfloat16 keeps its hashes: the matrix moves but is not rounded.
        matrix = self.projection
        super()._apply(fn, recurse)
        if self.projection.dtype != matrix.dtype:
            self.projection = matrix.to(self.projection.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(f"{prefix}projection")
        if saved is not None:  # room for a matrix that was fitted elsewhere
            self.projection = self.projection.new_empty(saved.shape[0], self.n_components)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _features(x: Tensor) -> Tensor:
    """x [N, ..., features]; of x [N] each element is a row of one feature."""
    if x.dim() == 0:
        raise ValueError("a tensor without dimensions has no rows; pass x.unsqueeze(0) for one row")
    if x.is_complex():
        x = torch.view_as_real(x).flatten(-2)
    return x.unsqueeze(-1) if x.dim() == 1 else x


def _projected(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [..., F] @ matrix [F, C], where no result depends on how many rows there are.

    A matrix product sums in an order that depends on its size. Here halves are added to halves.
    """
    features, components = matrix.shape
    flat = rows.reshape(-1, features)
    out = torch.empty(len(flat), components, dtype=torch.float64, device=rows.device)
    chunk = max(1, (1 << 16) // (features * components))  # 512 KB of products, which fit the cache
    if not rows.is_cpu:
        chunk *= 1 << 8
    for part, projected in zip(flat.split(chunk), out.split(chunk), strict=True):
        products = part.to(torch.float64).unsqueeze(-1) * matrix
        remaining = features
        while remaining > 1:
            half = remaining // 2
            products[:, :half] += products[:, remaining - half : remaining]
            remaining -= half
        projected.copy_(products[:, 0])
    return out.view(*rows.shape[:-1], components)


class BinaryToDecimal(nn.Module):
    """The integer that zeros and ones write, the highest bit first: x [..., width] -> [rows].

    The last dimension is cut into chunks of `num_bits`, each an integer. All other dimensions are
    flattened into rows; the integers of a row are summed, so rows whose chunks are exchanged are
    given the same number. With `num_bits` equal to the width each row has a separate number;
    for rows of more than 64 bits pass `sum_chunks=False`, which gives [rows, chunks], and hash
    that. 64 bits are read as a signed integer (two's complement), so are n bits in an n-bit dtype.

    >>> from raffia.data.hash import BinaryToDecimal
    >>> to_decimal = BinaryToDecimal(num_bits=4, dtype=torch.int32, convert_to_binary=True)
    >>> x = torch.Tensor([[0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 10, 0]])
    >>> to_decimal(x)
    tensor([3, 2], dtype=torch.int32)
    >>> BinaryToDecimal(num_bits=8, convert_to_binary=True)(x)
    tensor([33,  2])
    >>> BinaryToDecimal(num_bits=4, convert_to_binary=True, sum_chunks=False)(x)
    tensor([[2, 1],
            [0, 2]])
    """

    weights: Tensor

    def __init__(
        self,
        num_bits: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,  # of the result; int64
        convert_to_binary: bool = False,  # count what is above 0 as 1, all else as 0
        *,
        sum_chunks: bool = True,
    ) -> None:
        super().__init__()
        self.dtype = torch.int64 if dtype is None else dtype
        if not 1 <= num_bits <= _capacity(self.dtype):
            raise ValueError(
                f"num_bits={num_bits} must be in 1..{_capacity(self.dtype)}, the number of bits "
                f"that {self.dtype} can hold"
            )
        self.num_bits = num_bits
        self.convert_to_binary = convert_to_binary
        self.sum_chunks = sum_chunks
        powers = torch.arange(num_bits - 1, -1, -1, device=device)
        self.register_buffer("weights", torch.ones_like(powers) << powers)

    @property
    def bases(self) -> Tensor:
        """The value of each bit, most significant first, named as in TorchRL: [num_bits]."""
        return self.weights.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The integers of the rows of x."""
        width = x.shape[-1] if x.dim() else 0
        if width < self.num_bits or width % self.num_bits:
            raise ValueError(
                f"the last dimension of x {list(x.shape)} must be a multiple of "
                f"num_bits={self.num_bits}"
            )
        chunks = width // self.num_bits
        largest = chunks * (2**self.num_bits - 1)
        if self.sum_chunks and chunks > 1 and largest > _largest(self.dtype):
            raise ValueError(
                f"the sum of {chunks} chunks of {self.num_bits} bits may exceed {self.dtype}; "
                "pass a wider dtype, or sum_chunks=False"
            )
        numbers = (self._bits(x).reshape(-1, chunks, self.num_bits) * self.weights).sum(-1)
        return (numbers.sum(-1) if self.sum_chunks else numbers).to(self.dtype)

    def _bits(self, x: Tensor) -> Tensor:
        if self.convert_to_binary:
            return (x > 0).long()
        if not torch.compiler.is_compiling() and not ((x == 0) | (x == 1)).all():
            raise ValueError(
                "x must contain only zeros and ones; to convert values above 0 to 1, pass "
                f"BinaryToDecimal(num_bits={self.num_bits}, convert_to_binary=True)"
            )
        return x.long()

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"num_bits={self.num_bits}, dtype={self.dtype}, "
            f"convert_to_binary={self.convert_to_binary}, sum_chunks={self.sum_chunks}"
        )


def _capacity(dtype: torch.dtype) -> int:
    """The number of bits of the largest integer that this dtype holds exactly."""
    if dtype.is_floating_point:
        return _largest(dtype).bit_length()
    return torch.iinfo(dtype).bits


def _largest(dtype: torch.dtype) -> int:
    """The largest integer up to which all integers exist."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) - 1
    return torch.iinfo(dtype).max
