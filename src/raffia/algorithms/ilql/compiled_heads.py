"""Outputs of ILQL's heads for the next token, by one compiled call on the CPU.

Legend: R rows, V tokens of the vocabulary, d numbers of a hidden state.
"""

from __future__ import annotations

from array import array
from typing import cast

import torch
from torch import Tensor, nn

from raffia.algorithms.ilql.heads import AnyHead, Head
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.lm.compiled import compiles, plain
from raffia.lm.decoding.scorer import Needs, NextToken
from raffia.lm.transformer import CausalLM


class CompiledHeads:
    """The heads of the model, and Q of its target network.

    target: None where no values are wanted.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=64, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> heads = CompiledHeads.of(model, make_target(model))
    >>> outputs = heads.next_token({"trunk": torch.zeros(3, 64)}, Needs(policy=True, values=True))
    >>> outputs.logits.shape, outputs.target_q.shape, outputs.v.shape
    (torch.Size([3, 10]), torch.Size([3, 10]), torch.Size([3]))
    """

    def __init__(self, model: ILQLModel, target: ILQLTarget | None) -> None:
        output = cast(CausalLM, model.policy_trunk).wte.weight
        self._q_heads = () if target is None else target.q_heads
        self._heads = (model.v, *self._q_heads)
        self._policy = "policy" if model.config.policy == "separate" else "trunk"
        self._slow = "trunk" if target is None or target.trunk is None else "target"
        self._kept = [output, *(p for head in self._heads for p in head.parameters())]
        self._addresses = array("q", [p.data_ptr() for p in self._kept])
        self._num_tokens, self._size = output.shape
        self._inner = model.v.last.in_features

    @classmethod
    def of(cls, model: ILQLModel, target: ILQLTarget | None) -> CompiledHeads | None:
        """None where the heads, or the language model with the output weights, are not plain."""
        heads = (model.v, *(() if target is None else target.q_heads))
        fits = compiles(model.policy_trunk) and model.config.per_token and all(map(_plain, heads))
        return cls(model, target) if fits else None

    def next_token(self, hidden: dict[str, Tensor], needs: Needs) -> NextToken:
        """Of hidden states [R, d], contiguous, by the names of `ModelScorer.trunks`."""
        from raffia.algorithms.ilql.kernels.heads_step import heads_step

        num_rows = len(next(iter(hidden.values())))
        logits = v = q = None
        if needs.policy:
            logits = torch.empty(num_rows, self._num_tokens)
        if needs.values:
            v = torch.empty(num_rows)
            q = torch.empty(num_rows, self._num_tokens)
        room = torch.empty(num_rows * (self._inner + self._num_tokens))
        heads_step(
            self._addresses.buffer_info()[0],
            len(self._q_heads),
            num_rows,
            self._size,
            self._inner,
            self._num_tokens,
            hidden[self._policy].data_ptr() if needs.policy else 0,
            hidden["trunk"].data_ptr() if needs.values else 0,
            hidden[self._slow].data_ptr() if needs.values else 0,
            room.data_ptr(),
            0 if logits is None else logits.data_ptr(),
            0 if v is None else v.data_ptr(),
            0 if q is None else q.data_ptr(),
        )
        return NextToken(logits, q, v)


def _plain(head: AnyHead) -> bool:
    if not isinstance(head, Head):
        return False
    first, last = head[0], head[2]
    layers = type(first) is nn.Linear and type(last) is nn.Linear
    return layers and len(list(head.parameters())) == 4 and all(map(plain, head.parameters()))
