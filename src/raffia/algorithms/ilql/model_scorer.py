"""ILQL's networks as a scorer: each language model that is needed reads each token once.

On the CPU the outputs of the heads for the next token are one compiled call, where they can be.

Legend: R rows, T tokens or columns of a row, V tokens of the vocabulary, d numbers of a state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from raffia.algorithms.ilql.model import AnyHead, Head, ILQLModel, ILQLTarget
from raffia.functional.seeds import lock_of_threads
from raffia.lm.decoding.one_token import TokenReader, compiles, plain
from raffia.lm.decoding.scorer import Needs, NextToken
from raffia.lm.model import LanguageModel
from raffia.lm.transformer import CausalLM
from raffia.nn.blocks import has_hooks


class ModelScorer:
    """A scorer made of the model and of the target network of its Q heads.

    target: None where no values are wanted, as for behaviour cloning.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> scorer = ModelScorer(model, make_target(model))
    >>> rows, outputs = scorer.start([[1, 2, 3], [4]], Needs(policy=True, values=True), 5)
    >>> outputs.logits.shape, rows.advance(torch.tensor([5, 6])).target_q.shape
    (torch.Size([2, 10]), torch.Size([2, 10]))
    """

    def __init__(self, model: ILQLModel, target: ILQLTarget | None = None) -> None:
        self.model, self.target = model, target

    @property
    def vocab_size(self) -> int:
        return self.model.trunk.vocab_size

    @property
    def block_size(self) -> int:
        return self.model.trunk.block_size

    @property
    def device(self) -> torch.device:
        return next(self.model.v.parameters()).device

    def trunks(self, needs: Needs) -> dict[str, LanguageModel]:
        """The language models that are run, each one once; "policy" and "target" may be "trunk".

        >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> model = ILQLModel(ILQLModelConfig(trunk=small, policy="separate"))
        >>> list(ModelScorer(model).trunks(Needs(policy=True, values=False)))
        ['policy']
        """
        model, separate = self.model, self.model.config.policy == "separate"
        found: dict[str, Any] = {}
        if needs.values or (needs.policy and not separate):
            found["trunk"] = model.trunk
        if needs.policy and separate:
            found["policy"] = model.policy
        if needs.values and self._target().trunk is not None:
            found["target"] = self._target().trunk
        return found

    def start(
        self, prompts: Sequence[Sequence[int]], needs: Needs, max_new_tokens: int
    ) -> tuple[ModelRows, NextToken]:
        """Start one row for each prompt, with room for this many new tokens."""
        if needs.values and not self.model.config.per_token:
            raise ValueError(
                "with per_token=False Q is one number for a whole utterance, so it cannot score "
                "the next token: decode with include_adv=False, and rank whole utterances with "
                "score_utterances"
            )
        tokens, mask = padded_left(prompts, self.device)
        capacity = min(self.block_size, tokens.shape[1] + max_new_tokens)
        rows = ModelRows(self, needs, [len(prompt) for prompt in prompts], capacity)
        return rows, rows.read(tokens, mask)

    def read(
        self, tokens: Tensor, mask: Tensor | None, needs: Needs
    ) -> dict[str, Tensor]:  # each [B T, d]
        """Hidden states of whole rows [B, T], one after another; one pass of each network."""
        trunks = self.trunks(needs).items()
        return {name: trunk(tokens, mask).flatten(0, 1) for name, trunk in trunks}

    def next_token(
        self, hidden: dict[str, Tensor], needs: Needs, index: Tensor | None = None
    ) -> NextToken:
        """The heads' outputs for hidden states [*, d], by the names of `trunks`.

        index: int64 [M], which of them; None: all.

        >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
        >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> scorer = ModelScorer(ILQLModel(ILQLModelConfig(trunk=small)))
        >>> hidden = {"trunk": torch.zeros(3, 8)}
        >>> outputs = scorer.next_token(hidden, Needs(policy=True, values=False))
        >>> outputs.logits.shape, outputs.v
        (torch.Size([3, 10]), None)
        """
        model, logits, target_q, v = self.model, None, None, None
        if index is not None:
            hidden = {name: states[index] for name, states in hidden.items()}
        if needs.policy:
            separate = model.config.policy == "separate"
            logits = model.logits(hidden["policy" if separate else "trunk"])
        if needs.values:
            v = model.value(hidden["trunk"])
            target = self._target()
            states = hidden["trunk" if target.trunk is None else "target"]
            q_heads = QHeads(target.q_heads, states)
            if self.few_q(needs):
                return NextToken(logits, None, v, q_heads)
            target_q = q_heads.all()
        return NextToken(logits, target_q, v)

    def few_q(self, needs: Needs) -> bool:
        """Whether Q is asked for so few tokens that it is not computed for all.

        >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
        >>> small = TrunkConfig(vocab_size=50, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> scorer = ModelScorer(ILQLModel(ILQLModelConfig(trunk=small)))
        >>> scorer.few_q(Needs(True, True, num_candidates=5)), scorer.few_q(Needs(True, True, 20))
        (True, False)
        """
        return needs.num_candidates is not None and 8 * needs.num_candidates < self.vocab_size

    def _target(self) -> ILQLTarget:
        if self.target is None:
            raise ValueError(
                "values need a target network, and none was given: pass target=make_target(model) "
                "or the target of the learner's state, or decode with include_adv=False"
            )
        return self.target


class QHeads(NamedTuple):
    """The smaller Q of both heads, of all tokens or of some.

    >>> from raffia.algorithms.ilql.model import Head
    >>> q = QHeads((Head(4, 10), Head(4, 10)), torch.randn(2, 4))
    >>> tokens = torch.tensor([[1, 7, 3], [9, 0, 1]])
    >>> torch.allclose(q.of(tokens), q.all().gather(-1, tokens), atol=1e-6)
    True
    """

    heads: tuple[AnyHead, ...]
    states: Tensor  # [*, d]

    def all(self) -> Tensor:
        """The values of all tokens, [*, V]."""
        return reduce(torch.minimum, [head(self.states) for head in self.heads])

    def of(self, tokens: Tensor) -> Tensor:
        """The values of some tokens, int64 [R, K] -> [R, K]; other weights are not even read."""

        def some(head: AnyHead) -> Tensor:
            inner, last = head.inner(self.states).unsqueeze(-1), head.last
            return (last.weight[tokens] @ inner).squeeze(-1) + last.bias[tokens]

        return reduce(torch.minimum, [some(head) for head in self.heads])

    def at(self, rows: Tensor) -> QHeads:
        """Q of these rows alone: int64 [R']."""
        return QHeads(self.heads, self.states[rows])


class ModelRows:
    """Rows of text, and the cache of each language model for them.

    Rows of different lengths are padded at the left; padding that no row has any more is dropped.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> small = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> scorer = ModelScorer(ILQLModel(ILQLModelConfig(trunk=small)))
    >>> rows, _ = scorer.start([[1, 2, 3], [4]], Needs(policy=True, values=False), 5)
    >>> rows.reorder(torch.tensor([1]))
    >>> rows.num_rows, rows.num_passes, rows.room
    (1, 1, 7)
    """

    def __init__(
        self, scorer: ModelScorer, needs: Needs, lengths: list[int], capacity: int
    ) -> None:
        self._scorer, self._needs = scorer, needs
        self._trunks = scorer.trunks(needs)
        self._readers = {name: TokenReader(trunk) for name, trunk in self._trunks.items()}
        self._heads = None
        if not (needs.values and scorer.few_q(needs)):
            self._heads = CompiledHeads.of(scorer.model, scorer.target if needs.values else None)
        self._caches: dict[str, Any] = {
            name: trunk.new_cache(len(lengths), capacity=capacity)
            for name, trunk in self._trunks.items()
        }
        self._capacity = capacity
        longest = max(lengths)
        self._padding = [longest - length for length in lengths]  # columns before each row
        self._padding_tensor = self._as_tensor()
        self.num_passes = 0  # of one language model, over all rows

    @property
    def num_rows(self) -> int:
        return len(self._padding)

    @torch.no_grad()
    def read(self, tokens: Tensor, mask: Tensor | None = None) -> NextToken:
        """Append tokens [R, T], with their mask [R, T]; the outputs behind the last."""
        hidden: dict[str, Tensor] = {}
        for name, trunk in self._trunks.items():
            hidden[name] = trunk(tokens, mask, cache=self._caches[name])[:, -1]
            self.num_passes += 1
        return self._scorer.next_token(hidden, self._needs)

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> NextToken:
        """Append a token to each row: int64 [R]."""
        hidden: dict[str, Tensor] = {}
        for name, reader in self._readers.items():
            hidden[name] = reader.read(tokens, self._caches[name], self._padding_tensor)
            self.num_passes += 1
        if self._heads is not None:
            if all(reader.compiles(len(tokens)) for reader in self._readers.values()):
                return self._heads.next_token(hidden, self._needs)
        return self._scorer.next_token(hidden, self._needs)

    @property
    def room(self) -> int:
        """How many further tokens each row has room for."""
        return self._capacity - next(iter(self._caches.values())).length

    @torch.no_grad()
    def ahead(
        self,
        rows: Tensor,  # int64 [M]
        tokens: Tensor,  # int64 [M, T]
        lengths: Tensor,  # int64 [M], 1..T: how many of the tokens count
    ) -> NextToken:
        """The outputs behind further tokens of these rows, which stay unchanged."""
        num_tokens = tokens.shape[1]
        column = torch.arange(num_tokens, device=tokens.device)
        mask = None
        if int(lengths.min()) < num_tokens:
            mask = column < lengths.unsqueeze(-1)
        all_rows = rows.tolist() == list(range(self.num_rows))
        hidden: dict[str, Tensor] = {}
        for name, trunk in self._trunks.items():
            cache = self._caches[name] if all_rows else self._caches[name].select(rows)
            length = cache.length
            states = trunk(tokens, mask, cache=cache)
            cache.length = length  # what was read is forgotten, and written over
            last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, states.shape[-1])
            hidden[name] = states.gather(1, last).squeeze(1)
            self.num_passes += 1
        return self._scorer.next_token(hidden, self._needs)

    @torch.no_grad()
    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the text that row rows[i] was: int64 [R']."""
        chosen = rows.tolist()
        if chosen == list(range(self.num_rows)):
            return
        same_number = len(chosen) == self.num_rows
        padding = [self._padding[row] for row in chosen]
        unused = min(padding)
        self._padding = [columns - unused for columns in padding]
        self._padding_tensor = self._as_tensor()
        for name, cache in self._caches.items():
            if unused or not same_number:
                self._caches[name] = cache.select(rows, start=unused)
            else:
                cache.reorder(rows)

    def _as_tensor(self) -> Tensor | None:
        """The padding as int64 [R]; None without any."""
        if not any(self._padding):
            return None
        return torch.tensor(self._padding, device=self._scorer.device)


def padded_left(
    prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor | None]:  # int64 [R, T], bool [R, T]
    """Rows of tokens that end together, and which are tokens; None: all are.

    >>> padded_left([[1, 2], [3]])
    (tensor([[1, 2],
            [0, 3]]), tensor([[ True,  True],
            [False,  True]]))
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(row)) + [*row] for row in prompts], device=device)
    lengths = torch.tensor([len(row) for row in prompts], device=device)
    if min(map(len, prompts)) == longest:
        return tokens, None
    column = torch.arange(longest, device=device)
    return tokens, column >= longest - lengths.unsqueeze(1)


_EVALUATES = lock_of_threads()
# In how many blocks of `evaluating` modules are that were training before.
_evaluated: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@contextmanager
def evaluating(*modules: nn.Module | None) -> Iterator[None]:
    """Disable dropout of the modules within the block; their modes are restored after it, or after
    the last of several blocks, of other threads or of streams.

    >>> layer = nn.Dropout(0.5)
    >>> with evaluating(layer):
    ...     print(layer.training)
    False
    >>> layer.training
    True
    """
    parts = [part for module in modules if module is not None for part in module.modules()]
    with _EVALUATES:
        ours = [part for part in parts if part.training or _evaluated and part in _evaluated]
        for part in ours:
            _evaluated[part] = _evaluated.get(part, 0) + 1
            part.training = False
    try:
        yield
    finally:
        with _EVALUATES:
            for part in ours:
                _evaluated[part] -= 1
                if not _evaluated[part]:
                    del _evaluated[part]
                    part.training = True


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
        self._parameters = [output, *(p for head in self._heads for p in head.parameters())]
        self._addresses = array("q", [p.data_ptr() for p in self._parameters])
        self._num_tokens, self._size = output.shape
        self._inner = model.v.last.in_features

    @classmethod
    def of(cls, model: ILQLModel, target: ILQLTarget | None) -> CompiledHeads | None:
        """Compile heads and language model; None if these, or the output weights, have no plain
        form.
        """
        heads = (model.v, *(() if target is None else target.q_heads))
        fits = compiles(model.policy_trunk) and model.config.per_token and all(map(_plain, heads))
        return cls(model, target) if fits else None

    def next_token(self, hidden: dict[str, Tensor], needs: Needs) -> NextToken:
        """The scores of the next token for hidden states [R, d], contiguous, by names of
        `ModelScorer.trunks`.
        """
        from raffia.algorithms.ilql.heads_kernel import heads_step

        some = next(iter(hidden.values()))
        num_rows = len(some)
        logits = v = q = None
        if needs.policy:
            logits = some.new_empty(num_rows, self._num_tokens)
        if needs.values:
            v = some.new_empty(num_rows)
            q = some.new_empty(num_rows, self._num_tokens)
        room = some.new_empty(num_rows * (self._inner + self._num_tokens))
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
    if type(head) is not Head or any(map(has_hooks, head.modules())):
        return False
    first, last = head[0], head[2]
    layers = type(first) is nn.Linear and type(last) is nn.Linear
    return layers and len(list(head.parameters())) == 4 and all(map(plain, head.parameters()))
