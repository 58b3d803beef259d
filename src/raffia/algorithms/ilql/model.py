"""ILQL's networks: a language model, and heads for the value of a state and of each next token.

Legend: B rows, T tokens of a row, A actions of a row, V tokens of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.lm.model import LanguageModel
from raffia.lm.transformer import CausalLM
from raffia.nn.evolvable import EvolvableMLP


class ILQLOutputs(NamedTuple):
    """The networks' outputs for whole rows, padding included.

    >>> zeros = torch.zeros(2, 3)
    >>> ILQLOutputs(zeros, (zeros,), (zeros,), zeros).v.shape
    torch.Size([2, 3])
    """

    v: Tensor  # [B, A + 1]
    q: tuple[Tensor, ...]  # each [B, A, V], or [B, A, 1] for whole utterances
    target_q: tuple[Tensor, ...]  # likewise, of the target; empty where none was given
    logits: Tensor | None  # [B, T, V], of the policy; None where they were not wanted


class ILQLModel(nn.Module):
    """The trunk, V and Q heads on it, and the policy, which may be a second language model.

    trunk, policy: other language models than the config's, such as one from a folder; their own
        sizes count, not those of the config.

    >>> from raffia.algorithms.ilql.config import TrunkConfig
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> tokens = torch.tensor([[1, 2, 3, 4]])
    >>> states, actions = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2]])
    >>> outputs = model(tokens, states, actions, target=make_target(model))
    >>> outputs.v.shape, outputs.q[1].shape, outputs.logits.shape
    (torch.Size([1, 3]), torch.Size([1, 2, 10]), torch.Size([1, 4, 10]))
    """

    trunk: LanguageModel
    policy: LanguageModel  # only where it is separate
    v: AnyHead
    q1: AnyHead
    q2: AnyHead  # only with double_q

    def __init__(
        self,
        config: ILQLModelConfig,
        trunk: LanguageModel | None = None,
        policy: LanguageModel | None = None,
    ) -> None:
        super().__init__()
        if policy is not None and config.policy != "separate":
            raise ValueError(
                'a separate policy trunk was given, but policy="shared" uses none: pass '
                'ILQLModelConfig(policy="separate")'
            )
        self.config = config
        self.trunk = make_trunk(config.trunk) if trunk is None else trunk
        if config.policy == "separate":  # a copy: both start as the same language model
            self.policy = copy.deepcopy(self.trunk) if policy is None else policy
        n_embd = self.trunk.n_embd
        num_values = self.trunk.vocab_size if config.per_token else 1
        self.v = _head(config, n_embd, 1)
        self.q1 = _head(config, n_embd, num_values)
        if config.double_q:
            self.q2 = _head(config, n_embd, num_values)

    @property
    def policy_trunk(self) -> LanguageModel:
        """The language model that computes the policy's logits.

        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> model = ILQLModel(ILQLModelConfig(trunk=small, policy="shared"))
        >>> model.policy_trunk is model.trunk
        True
        """
        return self.policy if self.config.policy == "separate" else self.trunk

    @property
    def q_heads(self) -> tuple[AnyHead, ...]:
        """The Q heads: one, or two.

        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> len(ILQLModel(ILQLModelConfig(trunk=small, double_q=False)).q_heads)
        1
        """
        return (self.q1, self.q2) if self.config.double_q else (self.q1,)

    def value(self, hidden: Tensor) -> Tensor:
        """V [*] of the trunk's hidden states [*, d].

        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> ILQLModel(ILQLModelConfig(trunk=small)).value(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 3])
        """
        return self.v.at(hidden.detach() if self.config.detach_v else hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The policy's logits [*, V] of `policy_trunk`'s hidden states [*, d].

        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> ILQLModel(ILQLModelConfig(trunk=small)).logits(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 3, 10])
        """
        return self.policy_trunk.logits(hidden.detach() if self.config.detach_pi else hidden)

    def q_input(self, hidden: Tensor) -> Tensor:
        """The Q heads' input from the trunk's hidden states: without gradient if `detach_q` is set.

        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> model = ILQLModel(ILQLModelConfig(trunk=small, detach_q=True))
        >>> model.q_input(torch.zeros(2, 8, requires_grad=True)).requires_grad
        False
        """
        return hidden.detach() if self.config.detach_q else hidden

    def forward(
        self,
        tokens: Tensor,  # int64 [B, T]
        state_idxs: Tensor,  # int64 [B, A + 1]
        action_idxs: Tensor,  # int64 [B, A]
        attn_mask: Tensor | None = None,  # bool [B, T]
        *,
        prefix_embs: Tensor | None = None,  # [B, P, d], put before the tokens
        prefix_attn_mask: Tensor | None = None,  # bool [B, P]
        remove_prefix_position_embs: bool = False,
        target: ILQLTarget | None = None,
        with_logits: bool = True,
        detach_policy: bool = False,  # no gradient at all comes of the logits
        trunk_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> ILQLOutputs:
        """Compute every output at all positions; `Loss` computes only what it needs.

        trunk_kwargs: what else "trunk", "policy" and "target" are called with, such as a cache.
        """
        more = {} if trunk_kwargs is None else dict(trunk_kwargs)
        prefix: dict[str, Any] = {
            "prefix_embs": prefix_embs,
            "prefix_attn_mask": prefix_attn_mask,
            "remove_prefix_position_embs": remove_prefix_position_embs,
        }

        def states(name: str, trunk: LanguageModel) -> Tensor:
            return trunk(tokens, attn_mask, **prefix, **more.get(name, {}))

        hidden = states("trunk", self.trunk)
        at_actions = _gather(hidden, action_idxs)
        target_q: tuple[Tensor, ...] = ()
        if target is not None:
            with torch.no_grad():
                at = at_actions
                if target.trunk is not None:
                    at = _gather(states("target", target.trunk), action_idxs)
                target_q = tuple(head(at.detach()) for head in target.q_heads)
        logits = None
        if with_logits:
            separate = self.config.policy == "separate"
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_policy):
                logits = self.logits(states("policy", self.policy) if separate else hidden)
        return ILQLOutputs(
            v=self.value(_gather(hidden, state_idxs)),
            q=tuple(head(self.q_input(at_actions)) for head in self.q_heads),
            target_q=target_q,
            logits=logits,
        )


class ILQLTarget(nn.Module):
    """The target network: of the Q heads, and of the trunk where the config has it.

    >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=small, target="heads"))
    >>> ILQLTarget(model).trunk is None
    True
    """

    trunk: LanguageModel | None
    q1: AnyHead
    q2: AnyHead | None

    def __init__(self, model: ILQLModel) -> None:
        super().__init__()
        with_trunk = model.config.target == "trunk"
        self.trunk = copy.deepcopy(model.trunk) if with_trunk else None
        self.q1 = copy.deepcopy(model.q1)
        self.q2 = copy.deepcopy(model.q2) if model.config.double_q else None
        self.requires_grad_(False).eval()

    @property
    def q_heads(self) -> tuple[AnyHead, ...]:
        """The Q heads: one, or two.

        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> len(ILQLTarget(ILQLModel(ILQLModelConfig(trunk=small))).q_heads)
        2
        """
        return (self.q1,) if self.q2 is None else (self.q1, self.q2)

    def train(self, mode: bool = True) -> ILQLTarget:
        """Keep evaluation mode: a target network has no dropout.

        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> ILQLTarget(ILQLModel(ILQLModelConfig(trunk=small))).train().training
        False
        """
        return super().train(False)


def make_target(model: ILQLModel) -> ILQLTarget:
    """The target network of a model: copies without gradients, which are in no optimiser.

    >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> target = make_target(ILQLModel(ILQLModelConfig(trunk=small)))
    >>> sorted(name for name, _ in target.named_children()), target.q1[0].weight.requires_grad
    (['q1', 'q2'], False)
    """
    return ILQLTarget(model)


def make_trunk(config: TrunkConfig) -> CausalLM:
    """The language model that a config describes, with fresh weights.

    Raises ValueError for a model of `transformers`, which a config alone does not describe.

    >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> make_trunk(small)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 8])
    """
    if config.kind != "gpt":
        raise ValueError(
            "trunk.kind='transformers' cannot be built from sizes alone: pass the model as "
            "ILQLModel(config, trunk=HFTrunk.from_folder(folder)). The functions of a run do this"
        )
    return CausalLM(**{name: entry for name, entry in asdict(config).items() if name != "kind"})


def _head(config: ILQLModelConfig, n_embd: int, num_outputs: int) -> AnyHead:
    if not config.evolvable_heads:
        return Head(n_embd, num_outputs)
    return EvolvableHead(
        n_embd,
        num_outputs,
        max_layers=config.max_head_layers,
        max_nodes=config.max_head_nodes,
    )


def _gather(
    hidden: Tensor,  # [B, T, d]
    index: Tensor,  # [B, K]
) -> Tensor:  # [B, K, d]
    return hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


class AnyHead(nn.Module):
    """A value head: it can also compute a single output of each hidden state."""

    @property
    def last(self) -> nn.Linear:
        """The layer that makes the outputs."""
        raise NotImplementedError

    def inner(self, hidden: Tensor) -> Tensor:
        """The input of the last layer, from hidden states [*, d]."""
        raise NotImplementedError

    def at(
        self,
        hidden: Tensor,  # [*, d]
        index: Tensor | None = None,  # int64 [*], the output that is wanted; None: the only one
    ) -> Tensor:  # [*]
        """One output of each hidden state; the others, of which there may be 50,000, are not made.

        Equals `self(hidden).gather(-1, index.unsqueeze(-1)).squeeze(-1)`, and is precise within
        autocast, too, where a matrix product would round values to three digits.
        """
        last = self.last
        inner = self.inner(hidden).to(last.weight.dtype)
        if index is None:
            return (inner * last.weight[0]).sum(-1) + last.bias[0]
        flat = index.flatten()
        weight = last.weight.index_select(0, flat).view(*index.shape, last.in_features)
        return (inner * weight).sum(-1) + last.bias.index_select(0, flat).view(index.shape)


class Head(AnyHead, nn.Sequential):
    """Two dense layers, the inner one twice as wide as the hidden state [*, d] that they read.

    >>> head = Head(4, 10)
    >>> h = torch.randn(2, 3, 4)
    >>> head(h).shape, head.at(h, torch.tensor([[0, 1, 2], [7, 8, 9]])).shape
    (torch.Size([2, 3, 10]), torch.Size([2, 3]))
    """

    def __init__(self, n_embd: int, num_outputs: int) -> None:
        super().__init__(
            nn.Linear(n_embd, 2 * n_embd), nn.ReLU(), nn.Linear(2 * n_embd, num_outputs)
        )

    @property
    def last(self) -> nn.Linear:
        """The layer that makes the outputs."""
        return cast(nn.Linear, self[2])

    def inner(self, hidden: Tensor) -> Tensor:
        """The input of the last layer, from hidden states [*, d].

        >>> Head(4, 10).inner(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 8])
        """
        found: Tensor = self[1](self[0](hidden))
        return found


class EvolvableHead(AnyHead, EvolvableMLP):
    """A head whose form can change: it begins with one layer, twice as wide as the hidden state.

    max_layers, max_nodes: of the largest that it may become; None: 4 d nodes in each layer.

    >>> head = EvolvableHead(4, 10)
    >>> h = torch.randn(2, 3, 4)
    >>> head(h).shape, head.at(h, torch.tensor([[0, 1, 2], [7, 8, 9]])).shape, head.num_nodes
    (torch.Size([2, 3, 10]), torch.Size([2, 3]), [8, 0, 0])
    """

    def __init__(
        self, n_embd: int, num_outputs: int, *, max_layers: int = 3, max_nodes: int | None = None
    ) -> None:
        nodes = 2 * n_embd
        if max_nodes is not None and max_nodes < nodes:
            raise ValueError(
                f"max_head_nodes={max_nodes} is too small: a head on hidden states of "
                f"n_embd={n_embd} starts with {nodes} nodes. Set max_head_nodes={nodes} or more, "
                "or None"
            )
        super().__init__(
            n_embd,
            num_outputs,
            width=n_embd,
            num_nodes=nodes,
            max_layers=max_layers,
            max_nodes=2 * nodes if max_nodes is None else max_nodes,
        )

    @property
    def last(self) -> nn.Linear:
        """The layer that makes the outputs."""
        return self.out

    def inner(self, hidden: Tensor) -> Tensor:
        """The input of the last layer, from hidden states [*, d].

        >>> EvolvableHead(4, 10).inner(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 4])
        """
        return self.features(hidden)
