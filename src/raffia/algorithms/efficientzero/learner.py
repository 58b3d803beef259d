"""EfficientZero's learner: gradients of a batch, and updates by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from raffia.algorithms.efficientzero.config import EfficientZeroConfig, hyper_numbers
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.loss import EfficientZeroLoss, LogDensity
from raffia.algorithms.efficientzero.model import make_model
from raffia.algorithms.efficientzero.observations import with_observations
from raffia.algorithms.efficientzero.planning import action_sampler
from raffia.envs.env import Box, EnvSpec
from raffia.functional.gradients import clip_by_global_norm, global_norm, value_and_grad
from raffia.functional.optim import adamw, sgd, step_decay, warmup
from raffia.functional.seeds import derive_seed, global_draws
from raffia.functional.trees import is_traced
from raffia.learner import module_names, module_tree
from raffia.tensordict.tensordict import TensorDict

ModelFactory = Callable[[], LatentModel]


class EfficientZeroLearner:
    """Learns from the batches that `raffia.algorithms.efficientzero.targets` makes.

    num_updates: of the whole run; the learning rate follows it.
    model_factory: makes the networks, with fresh weights at each call; None for `make_model`.
    frame_stack: how many observations the networks see together.

    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> learner = EfficientZeroLearner(spec, EfficientZeroConfig(), num_updates=1000)
    >>> state = learner.init(seed=0)
    >>> sorted(state.keys())
    ['buffers', 'hyper', 'opt', 'params', 'step', 'target']
    """

    applies_stacks = True
    read_by_grads = ("params", "buffers", "hyper")  # of a state

    def __init__(
        self,
        spec: EnvSpec,
        config: EfficientZeroConfig,
        *,
        num_updates: int,
        model_factory: ModelFactory | None = None,
        frame_stack: int = 1,
    ) -> None:
        self.spec, self.config, self.num_updates = spec, config, num_updates
        # A program of all members computes all activations, and layers that are not there: 8 of
        # CartPole's members took 310 ms, each by itself 170 ms, on a core.
        self.learns_faster_alone = config.model.evolvable_heads
        if config.loss.augmentation and len(spec.observation_shape) != 3:
            raise ValueError(
                f"augmentation={config.loss.augmentation} needs images [C, H, W], but "
                f"{spec.name or 'this environment'} has observations of shape "
                f"{list(spec.observation_shape)}: leave augmentation out"
            )
        self._frame_stack = frame_stack
        self._may_draw = model_factory is not None
        compares = config.loss.consistency_weight > 0
        self._make = model_factory or partial(
            make_model, spec, config.model, frame_stack=frame_stack, consistency=compares
        )
        self._loss = EfficientZeroLoss(
            self.make_model(0),
            config.loss,
            _log_density(spec, config),
            precision=config.precision,
        ).train()
        is_adam, momentum = config.optimizer.name == "adamw", config.optimizer.momentum
        self._optimizer = adamw() if is_adam else sgd(momentum=momentum)

    def make_model(self, seed: int) -> LatentModel:
        """New networks as this learner trains; torch's own generator stays as it is."""
        with global_draws(seed):
            return self._make()

    def init(self, seed: int) -> TensorDict:
        """The state before the first update."""
        return self.state_of(self.make_model(seed))

    def state_of(self, model: LatentModel) -> TensorDict:
        """The state before the first update, with the weights of a model of `make_model`."""
        weights = TensorDict(
            params=module_tree(model.named_parameters()),
            buffers=module_tree(model.named_buffers()),
        )
        return TensorDict(
            params=weights["params"],
            buffers=weights["buffers"],
            target=weights.clone(),
            opt=self._optimizer.init(weights["params"]),
            hyper=_hyper(self.config),
            step=torch.tensor(0),
        )

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The gradients, and BatchNorm's statistics after the batch; and the metrics.

        The metrics are means [] of "loss", "policy_loss", "value_loss", "value_prefix_loss",
        "consistency_loss" (sums over steps), "policy_entropy" (of one step) and "grad_norm"; and
        "priority" [B], the distance of the first value from its target.
        """

        batch = with_observations(batch, self.spec, self._frame_stack, self.config.model.flatten)

        def loss(params: TensorDict) -> tuple[Tensor, tuple[dict[str, Tensor], TensorDict]]:
            buffers = state["buffers"].clone()  # BatchNorm writes into them
            named = module_names("model", params) | module_names("model", buffers)
            value, metrics = functional_call(self._loss, named, (batch, state["hyper"]))
            return value, (metrics, buffers)

        with self._draws(state, batch):
            grads, (_, (metrics, buffers)) = value_and_grad(loss, state["params"])
        if self.config.precision != "float32" and not is_traced():
            # Convolutions in half precision give theirs in another order than the parameters'.
            grads = grads.apply(lambda grad: grad.clone(memory_format=torch.contiguous_format))
        metrics["grad_norm"] = global_norm(grads)
        return TensorDict(grads=grads, buffers=buffers), TensorDict(metrics)

    @contextmanager
    def _draws(self, state: TensorDict, batch: TensorDict) -> Iterator[None]:
        """Draws of custom networks, such as dropout's: of this batch of this update, whatever was
        drawn before.
        """
        if not self._may_draw or is_traced() or batch["index"].device.type != "cpu":
            yield
            return
        first = int(batch["index"][0])
        with global_draws(derive_seed(int(state["step"]), "networks", first)):
            yield

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """The state after the update, in the memory of the one before where that is possible.

        Stacked states [P] of members are updated in one call, each with its learning rate.
        """
        hyper, step = state["hyper"], state["step"] + 1
        rate = hyper["learning_rate"] * self._schedule(step)
        grads, _ = clip_by_global_norm(
            update["grads"], self.config.optimizer.max_grad_norm, num_batch_dims=step.dim()
        )
        params, opt = self._optimizer.update(
            state["params"],
            grads,
            state["opt"],
            learning_rate=rate,
            weight_decay=hyper["weight_decay"],
        )
        size = state.batch_size
        weights = TensorDict(params=params, buffers=update["buffers"], batch_size=size)
        target = _copied(weights, state["target"], step, self.config.targets.target_interval)
        entries = {"opt": opt, "target": target, "hyper": hyper, "step": step}
        return TensorDict({"params": params, "buffers": update["buffers"], **entries}, size)

    def learning_rate(self, step: int) -> float:
        """The learning rate of this update, counted from 1, by the config.

        >>> from raffia.envs.env import Discrete, EnvSpec
        >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
        >>> learner = EfficientZeroLearner(spec, EfficientZeroConfig(), num_updates=1000)
        >>> round(learner.learning_rate(5), 3), round(learner.learning_rate(500), 3)
        (0.1, 0.2)
        """
        return self.config.optimizer.learning_rate * float(self._schedule(torch.tensor(step)))

    def _schedule(self, step: Tensor) -> Tensor:
        """The factor of the learning rate in this update, counted from 1."""
        config = self.config.optimizer
        decayed = step_decay(step - 1, config.decay_updates, config.decay_rate)
        return warmup(step, config.warmup_fraction * self.num_updates) * decayed


def _copied(weights: TensorDict, target: TensorDict, step: Tensor, interval: int) -> TensorDict:
    """The target network: the weights after each `interval` updates, else as it was."""
    now = step % interval == 0
    if is_traced():
        return target.apply(lambda old, new: torch.where(now, new, old), weights)
    return target.copy_(weights) if bool(now.all()) else target


def _log_density(spec: EnvSpec, config: EfficientZeroConfig) -> LogDensity | None:
    if not isinstance(spec.action, Box):
        return None
    return action_sampler(spec.action, config.search.num_sampled_actions).log_density


def _hyper(config: EfficientZeroConfig) -> TensorDict:
    """The hyper-parameters that may differ between members of a population."""
    numbers = hyper_numbers(config)
    return TensorDict({name: torch.tensor(number) for name, number in numbers.items()})
