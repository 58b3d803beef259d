"""`BinaryToDecimal`: rows of zeros and ones as integers."""

import torch
from torch import Tensor, nn


class BinaryToDecimal(nn.Module):
    """The integer that zeros and ones write, the highest bit first: x [..., width] -> [rows].

    The last dimension is cut into chunks of `num_bits`, each an integer. All other dimensions are
    flattened into rows; the integers of a row are summed, so rows whose chunks are exchanged are
    given the same number. With `num_bits` equal to the width each row has a number of its own;
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
                f"num_bits={num_bits} must lie in 1..{_capacity(self.dtype)}, which is what "
                f"{self.dtype} holds"
            )
        self.num_bits = num_bits
        self.convert_to_binary = convert_to_binary
        self.sum_chunks = sum_chunks
        powers = torch.arange(num_bits - 1, -1, -1, device=device)
        self.register_buffer("weights", torch.ones_like(powers) << powers)

    @property
    def bases(self) -> Tensor:
        """What each bit counts, most significant first, as TorchRL names it: [num_bits]."""
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
                "x must hold zeros and ones; to count what is above 0 as 1, pass "
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
    """How many bits are an integer of their own in this dtype."""
    if dtype.is_floating_point:
        return _largest(dtype).bit_length()
    return torch.iinfo(dtype).bits


def _largest(dtype: torch.dtype) -> int:
    """The largest integer up to which all integers exist."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) - 1
    return torch.iinfo(dtype).max
