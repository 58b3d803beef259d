"""One layer of a causal language model: attention, then two dense layers, each on the norm of x.

GELU is as GPT-2 has it; on the CPU it is four times as fast as torch's, whose tanh is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout as drop
from torch.nn.functional import gelu as torch_gelu
from torch.utils.checkpoint import checkpoint

from raffia.functional.trees import is_traced
from raffia.lm.attention import View, attend

Result = TypeVar("Result")

LEAST = 4096  # numbers, below which torch's is called for less
MOST_THREADS = 4  # torch's uses all of its threads, the compiled one a single one


def gelu(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

    >>> x = torch.linspace(-3, 3, 8192)
    >>> torch.allclose(gelu(x), torch_gelu(x, approximate="tanh"), atol=1e-6)
    True
    """
    if not _compiles(x):
        return torch_gelu(x, approximate="tanh")
    if x.requires_grad and torch.is_grad_enabled():
        return _Gelu.apply(x)
    return _forward(x)


def _compiles(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.is_contiguous()
        and x.numel() >= LEAST
        and x.numel() % 16 == 0
        and not is_traced()
        and torch.get_num_threads() <= MOST_THREADS
    )


def _forward(x: Tensor) -> Tensor:
    from raffia.lm.kernels import gelu_forward

    out = torch.empty_like(x)
    gelu_forward(x.numel(), x.data_ptr(), out.data_ptr())
    return out


class _Gelu(torch.autograd.Function):
    """GELU with a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: torch's can be differentiated again
            y = torch_gelu(x, approximate="tanh")
            return torch.autograd.grad(y, x, grad, create_graph=True)[0]
        from raffia.lm.kernels import gelu_backward

        grad = grad.contiguous()
        out = torch.empty_like(x)
        gelu_backward(x.numel(), x.data_ptr(), grad.data_ptr(), out.data_ptr())
        return out


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "GELU": gelu,  # GPT-2's, by tanh
        "ReLU": torch.relu,
        "SiLU": nn.functional.silu,
        "LeakyReLU": nn.functional.leaky_relu,
        "Tanh": torch.tanh,
    }
)


class Block(nn.Module):
    """x + attention(norm(x)), then that + dense(norm(that)); GPT-2's arrangement.

    Linear weights are [out, in]; the rows of `qkv` are queries, keys, values, heads contiguous in
    each. Source: Radford et al. (2019), "Language Models are Unsupervised Multitask Learners", 2.3.

    >>> Block(8, 2, 32)(torch.zeros(1, 3, 8), View()).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        dim_feedfwd: int,
        *,
        layer: int = 0,  # which one of the model's: where a cache keeps its keys
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        bias: bool = True,
        activation: str = "GELU",  # one of `ACTIVATIONS`
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self._activate = activation, ACTIVATIONS[activation]
        where: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.n_head, self.layer, self.dropout = n_head, layer, dropout
        self.ln1 = nn.LayerNorm(n_embd, layer_norm_eps, **where)
        self.qkv = nn.Linear(n_embd, 3 * n_embd, **where)
        self.proj = nn.Linear(n_embd, n_embd, **where)
        self.ln2 = nn.LayerNorm(n_embd, layer_norm_eps, **where)
        self.fc = nn.Linear(n_embd, dim_feedfwd, **where)
        self.out = nn.Linear(dim_feedfwd, n_embd, **where)

    def forward(self, x: Tensor, view: View) -> Tensor:
        """[N, d] or [B, T, d] to the same, or [N, d] to [M, d] where the view has chosen tokens."""
        rate = self.dropout if self.training else 0.0
        qkv = self.qkv(self.ln1(x))
        gathered = attend(qkv, view, num_heads=self.n_head, layer=self.layer, dropout=rate)
        if view.chosen is not None:
            x, gathered = x.index_select(0, view.chosen), gathered.index_select(0, view.chosen)
        x = x + self._dropped(self.proj(gathered))
        inner = self._activate(self.fc(self.ln2(x)))
        return x + self._dropped(self.out(inner))

    def _dropped(self, x: Tensor) -> Tensor:
        # A call for nothing would be felt where one token is read at a time.
        return drop(x, self.dropout) if self.dropout and self.training else x


def recomputed(module: Callable[..., Result], *inputs: object, **options: object) -> Result:
    """module(*inputs, **options), which keeps only the inputs for the backward pass and recomputes
    the rest there.

    The parameters are those of now: `torch.func.functional_call` puts others in for the time of the
    forward pass alone, and the backward pass would find those of the module.

    >>> block, x = Block(8, 2, 32), torch.ones(1, 3, 8)
    >>> torch.equal(recomputed(block, x, View()), block(x, View()))
    True
    """
    assert isinstance(module, nn.Module)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(*inputs: object) -> Result:
        return functional_call(module, named, inputs, options)

    return checkpoint(run, *inputs, use_reentrant=False)
