"""ILQL's learner: gradients of a batch of dialogues, and an update by them.

Its state is a tree of tensors, which networks can share: `networks_state`, `load_networks`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raffia.algorithms.ilql.config import ILQLConfig, hyper_numbers
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.functional.gradients import clip_by_global_norm, global_norm, value_and_grad
from raffia.functional.optim import adamw, cosine_decay, linear, warmup
from raffia.functional.seeds import derive_seed, global_draws
from raffia.functional.trees import is_traced
from raffia.learner import module_names, module_tree
from raffia.nn.params import update_target
from raffia.tensordict.tensordict import TensorDict

ModelFactory = Callable[[], ILQLModel]
LANGUAGE, VALUES = ("trunk", "policy"), ("v", "q1", "q2")  # each with a learning rate


class ILQLLearner:
    """Learns from the batches that `Loss` describes.

    A state's "params" are "trunk", "policy" (where separate), "v", "q1" and "q2" (with double_q),
    its "target" has "q1", "q2" and, where the config has it, "trunk". What does not learn (a frozen
    language model under small changes) is among "buffers", unless it is given as `fixed`.

    num_updates: of the whole run; a falling learning rate follows it.
    model_factory: makes the networks, with fresh weights at each call; None for the config's.
    fixed: weights that do not learn, {"trunk": ...}, where the batches are. They are then no part
        of a state: stored once, for any number of states and checkpoints.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
    >>> state = learner.init(seed=0)
    >>> sorted(state["params"].keys()), sorted(state["target"].keys())
    (['q1', 'q2', 'trunk', 'v'], ['q1', 'q2'])
    """

    applies_stacks = applies_shards = True
    # What a program of all members does without on a CPU (rows without padding, attention and
    # activations that are compiled) is worth more there than what it saves.
    learns_faster_alone = True

    def __init__(
        self,
        config: ILQLConfig,
        *,
        num_updates: int | None = None,
        model_factory: ModelFactory | None = None,
        fixed: TensorDict | None = None,
    ) -> None:
        if config.optimizer.decay != "constant" and num_updates is None:
            raise ValueError(
                f"decay={config.optimizer.decay!r} needs the length of the run: pass "
                "ILQLLearner(config, num_updates=...)"
            )
        self.config, self.num_updates = config, num_updates
        self._fixed = TensorDict() if fixed is None else fixed
        self._make = (lambda: ILQLModel(config.model)) if model_factory is None else model_factory
        # The module's own weights are never used: on this device they take no memory.
        model = _on_meta(self.make_model(0))
        self._drops = max([config.model.trunk.dropout, *_rates(model)]) > 0
        self._loss = Loss(model, config.loss, precision=config.precision).train()
        self._optimizer = adamw(config.optimizer.beta1, config.optimizer.beta2)

    def make_model(self, seed: int) -> ILQLModel:
        """Networks as this learner trains, with fresh weights; torch's own generator stays.

        >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
        >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
        >>> first, second = learner.make_model(0), learner.make_model(0)
        >>> torch.equal(first.v[0].weight, second.v[0].weight)
        True
        """
        with global_draws(seed):
            return self._make()

    def init(self, seed: int) -> TensorDict:
        """The state before the first update."""
        return self.state_of(self.make_model(seed), seed)

    def state_of(self, model: ILQLModel, seed: int = 0) -> TensorDict:
        """The state before the first update of these networks, whose weights it copies.

        seed: of dropout.

        >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
        >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
        >>> int(learner.state_of(learner.make_model(0))["step"])
        0
        """
        state = networks_state(model, model, without=module_names("", self._fixed).keys())
        state["target"] = _subset(state["target"], self._target_names)
        state = state.clone()
        state["opt"] = TensorDict(
            language=self._optimizer.init(_subset(state["params"], LANGUAGE)),
            values=self._optimizer.init(_subset(state["params"], VALUES)),
        )
        state["hyper"] = hyper_of(self.config, next(model.parameters()))
        state["step"] = torch.tensor(0)
        if self._drops:
            state["dropout_seed"] = torch.tensor(seed)
        return state

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The gradients, and metrics: means [].

        "loss"; of the terms that have a weight "v_loss", "q_loss", "cql_loss", "dm_loss" and
        "token_loss"; over actions, where the heads are computed, "v_mean", "q_mean" and
        "advantage_mean"; "grad_norm"; and "num_tokens" of the batch, padding not counted.

        `Accumulate` gives the mean over the parts of a batch, which weighs the actions of parts
        that have fewer of them more; `with_row_means(batch)` corrects that for gradients and
        losses, to equal those of the whole batch. The other means, and num_tokens, are of a part.
        """

        def loss(params: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            # What does not learn, such as the form of heads, is the same in both.
            both = state["buffers"], self._fixed
            named = named_tensors(params, state["target"], *both, slow=self._target_names)
            return functional_call(self._loss, named, (batch, state["hyper"]))

        with self._draws(state, batch):
            grads, (_, metrics) = value_and_grad(loss, state["params"])
        metrics["grad_norm"] = global_norm(grads)
        return TensorDict(grads=grads, buffers=state["buffers"]), TensorDict(metrics)

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """The state after the update, in the memory of the one before where that is possible.

        Stacked states [P] of members are updated in one call, each with its learning rate.
        """
        config, hyper, step = self.config.optimizer, state["hyper"], state["step"] + 1
        grads, old, opt = update["grads"], state["params"], state["opt"]
        if config.max_grad_norm is not None:
            norm = update.get("grad_norm", None)  # where these are a part of the gradients
            grads, _ = clip_by_global_norm(grads, config.max_grad_norm, step.dim(), norm=norm)
        rate = hyper["learning_rate"] * self._schedule(step)
        params, new_opt = TensorDict(), TensorDict()
        for group, names, factor in (
            ("language", LANGUAGE, 1.0),
            ("values", VALUES, hyper["value_rate"]),
        ):
            moved, new_opt[group] = self._optimizer.update(
                _subset(old, names),
                _subset(grads, names),
                opt[group],
                learning_rate=rate * factor,
                weight_decay=hyper["weight_decay"],
            )
            params.update(moved)
        online = _subset(params, self._target_names)
        target = _moved(state["target"], online, step, hyper["alpha"], self.config.target.interval)
        new = {"params": params, "buffers": update["buffers"], "target": target, "opt": new_opt}
        return TensorDict({**dict(state.items()), **new, "step": step}, state.batch_size)

    def learning_rate(self, step: int) -> float:
        """The learning rate of this update, counted from 1, by the config.

        >>> from raffia.algorithms.ilql.config import *
        >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> optimizer = OptimizerConfig(learning_rate=0.5, warmup_updates=10)
        >>> config = ILQLConfig(model=ILQLModelConfig(trunk=trunk), optimizer=optimizer)
        >>> ILQLLearner(config).learning_rate(5)
        0.25
        """
        return self.config.optimizer.learning_rate * float(self._schedule(torch.tensor(step)))

    def _schedule(self, step: Tensor) -> Tensor:
        """The factor of the learning rate in this update, counted from 1."""
        config = self.config.optimizer
        factor = warmup(step, config.warmup_updates)
        if config.decay == "constant":
            return factor
        assert self.num_updates is not None
        falls = max(1, self.num_updates - config.warmup_updates)
        behind = step - config.warmup_updates
        if config.decay == "cosine":
            return factor * cosine_decay(behind, falls, config.final_share)
        return factor * linear(behind, falls, 1.0, config.final_share)

    @property
    def _target_names(self) -> tuple[str, ...]:
        return ("q1", "q2", "trunk") if self.config.model.target == "trunk" else ("q1", "q2")

    @contextmanager
    def _draws(self, state: TensorDict, batch: TensorDict) -> Iterator[None]:
        """Dropout's draws: of this part of this update of this run, whatever was drawn before."""
        if not self._drops:
            yield
            return
        if is_traced():
            raise ValueError(
                "dropout draws random numbers, which torch.vmap and torch.compile cannot repeat: "
                "set dropout=0.0"
            )
        seed, step = int(state["dropout_seed"]), int(state["step"])
        part = [int(batch["index"][0])] if "index" in batch.keys() else []
        seed = derive_seed(seed, "dropout", step, *part)
        with global_draws(seed, batch["tokens"].device):
            yield


def _moved(
    target: TensorDict, online: TensorDict, step: Tensor, alpha: Tensor, interval: int
) -> TensorDict:
    """The target network after an update: (1 - alpha) target + alpha online, each `interval`."""
    if is_traced():
        rate = torch.where(step % interval == 0, alpha, 0)
        return target.apply(lambda old, new: old + rate * (new - old), online)
    if bool((step % interval == 0).all()):
        update_target(target, online, alpha)
    return target


def hyper_of(config: ILQLConfig, like: Tensor) -> TensorDict:
    """The numbers of `hyper_numbers` as tensors, at least as precise as the weights.

    >>> hyper_of(ILQLConfig(), like=torch.zeros(()))["alpha"]
    tensor(0.0050)
    """
    numbers = hyper_numbers(config)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return TensorDict({name: torch.tensor(number, dtype=dtype) for name, number in numbers.items()})


def networks_state(
    model: ILQLModel, target: ILQLTarget | ILQLModel, *, without: Collection[str] = ()
) -> TensorDict:
    """The "params", "buffers" and "target" of a state, in the memory of these networks.

    without: ".trunk. ...", parameters that do not learn and are no part of the state.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> state = networks_state(model, make_target(model))
    >>> state["params", "v", "2", "bias"].fill_(5.0), model.v[2].bias.item()
    (tensor([5.]), 5.0)
    """
    named = dict(model.named_parameters())
    learns = {name for name, p in named.items() if p.requires_grad}
    fixed = [(n, p) for n, p in named.items() if n not in learns and f".{n}" not in without]
    return TensorDict(
        params=module_tree([(name, p) for name, p in named.items() if name in learns]),
        buffers=module_tree([*fixed, *model.named_buffers()]),
        target=module_tree([(n, p) for n, p in target.named_parameters() if n in learns]),
    )


@torch.no_grad()
def load_networks(networks: nn.Module, state: TensorDict, without: Collection[str] = ()) -> None:
    """Write a state into "model" and "target", except where it shares their memory already.

    networks: a module with these two in it, such as an agent or its loss.
    without: names of tensors that are no part of the state.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
    >>> networks, state = Loss(learner.make_model(0), learner.config.loss), learner.init(1)
    >>> load_networks(networks, state)
    >>> torch.equal(networks.model.v[0].weight, state["params", "v", "0", "weight"])
    True
    """
    named = named_tensors(state["params"], state["target"], state["buffers"])
    for name, own in chain(networks.named_parameters(), networks.named_buffers()):
        if name in without:
            continue
        if name not in named:
            raise ValueError(
                f"the state has no {name}, so it belongs to other networks. To build the networks "
                "of a run: Networks(config, making=making_of(config, folder))"
            )
        if named[name].data_ptr() != own.data_ptr():
            own.copy_(named[name])


def named_tensors(
    params: TensorDict,
    target: TensorDict,
    *both: TensorDict,
    slow: Iterable[str] = ("q1", "q2", "trunk"),
) -> dict[str, Tensor]:
    """The tensors of a state by their names in `Loss`.

    both: what the model and the target network have in common.
    slow: of which networks there is a target.

    >>> weight, bias = TensorDict(q1=TensorDict(w=torch.zeros(1))), TensorDict(v=torch.ones(1))
    >>> list(named_tensors(weight, weight, bias))
    ['model.v', 'model.q1.w', 'target.q1.w']
    """
    named: dict[str, Tensor] = {}
    for same in both:
        named |= module_names("model", same) | module_names("target", _subset(same, slow))
    return named | module_names("model", params) | module_names("target", target)


def _subset(tree: TensorDict, names: Iterable[str]) -> TensorDict:
    """Select those of the given networks that exist."""
    return TensorDict({name: tree[name] for name in names if name in tree.keys()})


def _on_meta(model: ILQLModel) -> ILQLModel:
    """The model without the memory of its tensors; what is one tensor stays one."""
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="meta")
            replaced = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, memo.setdefault(id(parameter), replaced))
    return model


def _rates(model: nn.Module) -> Iterator[float]:
    """The dropout rates, for our layers and those of other libraries."""
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            yield layer.p
        named = vars(layer).items()
        yield from (value for name, value in named if "drop" in name and type(value) is float)
