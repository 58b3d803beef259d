"""Settings of EfficientZero, with the paper's numbers. Imports no torch, so that help is quick.

MuZero is EfficientZero without value prefix (`lstm_hidden_size` 0 and `lstm_horizon` 1),
consistency and reanalyze; Gumbel MuZero is that with `search.policy="gumbel"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from raffia.envs.checked import (
    Checked,
    Fraction,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from raffia.hints import check_choice


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """The networks: residual convolutions for images, dense layers for vectors."""

    num_channels: PositiveInt = 64  # channels of the latent states of images
    num_res_blocks: NonNegativeInt = 1  # residual blocks in each network for images
    downsample: bool = True  # make images 16 times smaller (96x96 -> 6x6); not for boards
    flatten: bool = False  # treat images as vectors: best for boards of a few cells
    latent_state_dim: PositiveInt = 256  # width of the latent states of vectors
    res_connection: bool = True  # for vectors: the dynamics predict the change of the latent state
    # Normalisation of the latent states of vectors: layer normalisation, or a softmax over each
    # eight numbers.
    latent_norm: Literal["LN", "SimNorm"] = "LN"
    # Width of the value prefix's LSTM; 0 for MuZero's networks, which predict each step's reward.
    lstm_hidden_size: NonNegativeInt = 512
    head_hidden_channels: tuple[PositiveInt, ...] = (32,)  # widths of the heads' hidden layers
    # Activation of all networks but the representation of vectors, which has GELU.
    activation: Literal["relu", "gelu"] = "relu"
    # Heads whose form a population can mutate (`activation`, `architecture`); they start with
    # head_hidden_channels, and have no normalisation.
    evolvable_heads: bool = False
    max_head_layers: PositiveInt = 3  # maximal number of layers of an evolvable head
    max_head_nodes: PositiveInt = 128  # maximal number of nodes in each layer of an evolvable head
    # Categories of the transformed value prefix h(prefix): start, stop, step.
    reward_support_range: tuple[float, float, float] = (-300.0, 301.0, 1.0)
    # Categories of the transformed value h(value): start, stop, step.
    value_support_range: tuple[float, float, float] = (-300.0, 301.0, 1.0)
    # Batch or layer normalisation in all networks but the projection.
    norm_type: Literal["BN", "LN"] = "BN"
    # Normalisation in the projection; without BN all states may become equal.
    projection_norm_type: Literal["BN", "LN"] = "BN"
    state_norm: bool = False  # scale latent states to 0..1
    action_encoding: Literal["one_hot", "not_one_hot"] = "one_hot"  # encoding of discrete actions
    # Standard deviation of continuous actions: predicted from the state, or fixed.
    sigma_type: Literal["conditioned", "fixed"] = "conditioned"
    fixed_sigma: PositiveFloat = 0.3  # standard deviation with sigma_type "fixed"
    # Policy head of continuous actions: as the other heads; or DI-engine's ReparameterizationHead,
    # two hidden layers as wide as their input, with ReLU and without normalisation.
    gaussian_head: Literal["mlp", "reparameterization"] = "mlp"
    proj_hid: PositiveInt = 1024  # hidden width of the projection that consistency compares
    proj_out: PositiveInt = 1024  # output width of that projection
    pred_hid: PositiveInt = 512  # hidden width of the predictor of projections
    pred_out: PositiveInt = 1024  # output width of that predictor, equal to proj_out

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pred_out != self.proj_out:
            raise ValueError(
                f"pred_out={self.pred_out} and proj_out={self.proj_out} must be equal, because "
                "the consistency loss compares a prediction with a projection of the same size"
            )
        check_latent_norm(self.latent_norm, self.latent_state_dim)
        if self.evolvable_heads:
            if self.gaussian_head != "mlp":
                raise ValueError(
                    f"evolvable_heads=True needs gaussian_head='mlp'; it is {self.gaussian_head!r}"
                )
            check_heads(self.head_hidden_channels, self.max_head_layers, self.max_head_nodes)


def check_latent_norm(latent_norm: str, latent_state_dim: int) -> None:
    """Raise ValueError for an unknown normalisation of latent states, or a width that does not fit.

    >>> check_latent_norm("SimNorm", 20)
    Traceback (most recent call last):
    ...
    ValueError: latent_norm='SimNorm' works on groups of 8 numbers, and latent_state_dim=20 is not
    a multiple of 8: set it to 24
    """
    check_choice("latent_norm", latent_norm, ("LN", "SimNorm"))
    if latent_norm == "SimNorm" and latent_state_dim % 8:
        raise ValueError(
            f"latent_norm='SimNorm' works on groups of 8 numbers, and latent_state_dim="
            f"{latent_state_dim} is not a multiple of 8: set it to {latent_state_dim // 8 * 8 + 8}"
        )


def check_heads(hidden: Sequence[int], max_layers: int, max_nodes: int) -> None:
    """Raise ValueError if evolvable heads cannot begin with layers of this many nodes.

    >>> check_heads((32,), max_layers=3, max_nodes=128)
    >>> check_heads((32, 64), max_layers=3, max_nodes=128)
    Traceback (most recent call last):
    ...
    ValueError: head_hidden_channels=(32, 64): all hidden layers of an evolvable head must have
    the same number of nodes at the start, such as (32,)
    """
    shown = f"head_hidden_channels={tuple(hidden)}"
    if len(set(hidden)) != 1:
        first = max([1, *hidden[:1]])
        raise ValueError(
            f"{shown}: all hidden layers of an evolvable head must have the same number of nodes "
            f"at the start, such as ({first},)"
        )
    if len(hidden) > max_layers or not 1 <= hidden[0] <= max_nodes:
        raise ValueError(
            f"{shown} exceeds max_head_layers={max_layers} or max_head_nodes={max_nodes}: set "
            f"these to {max(len(hidden), max_layers)} and {max(*hidden, max_nodes)}, or more"
        )


@dataclass(frozen=True, kw_only=True)
class LossConfig(Checked):
    """The loss over a segment of steps."""

    unroll_steps: PositiveInt = 5  # steps K that the dynamics are unrolled
    lstm_horizon: PositiveInt = 5  # steps after which the value prefix restarts
    policy_weight: NonNegativeFloat = 1.0  # weight of the policy loss
    value_weight: NonNegativeFloat = 0.25  # weight of the value loss
    value_prefix_weight: NonNegativeFloat = 1.0  # weight of the value prefix loss
    consistency_weight: NonNegativeFloat = 2.0  # weight of the self-supervised consistency loss
    # Weight of an entropy bonus; 0.005 is common for continuous actions.
    entropy_weight: NonNegativeFloat = 0.0
    # Fraction of the gradient that passes to the previous latent state; 1: all of it.
    gradient_scale: Fraction = 0.5
    # Kinds of episode ends after which value 0 and a constant prefix are learnt; after other ends
    # nothing is learnt.
    absorb: tuple[Literal["terminated", "truncated"], ...] = ("terminated",)
    augmentation: tuple[Literal["shift", "intensity"], ...] = ()  # random changes of images


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Checked):
    """The targets of the networks' outputs."""

    discount: PositiveFraction = 0.997  # discount per step of the agent
    n_step: PositiveInt = 5  # number of rewards in the value target, before the bootstrap value
    # The bootstrap value: the target network's value, or the root value of the stored search.
    bootstrap: Literal["network", "search"] = "network"
    # Updates between copies of the weights into the target network.
    target_interval: PositiveInt = 200
    reanalyze_ratio: Fraction = 0.99  # fraction of a batch whose policy targets are searched again
    reanalyze_noise: bool = True  # reanalyze with exploration noise at the root, as when acting
    # Use a smaller n_step for older data, which another policy has played.
    correct_horizon: bool = True
    # Age, as a fraction of training, at which n_step decreases by one; 0: it never does.
    horizon_fraction: NonNegativeFloat = 0.3


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """The optimizer of the networks."""

    name: Literal["sgd", "adamw"] = "sgd"  # the optimizer: SGD with momentum, or AdamW
    learning_rate: NonNegativeFloat = 0.2  # learning rate after the warm-up
    momentum: FractionBelowOne = 0.9  # momentum of SGD
    weight_decay: NonNegativeFloat = 1e-4  # weight decay; decoupled from the gradient in AdamW
    max_grad_norm: PositiveFloat = 5.0  # gradients are clipped to this norm
    # Fraction of all updates in which the learning rate rises from 0.
    warmup_fraction: Fraction = 0.01
    # Updates after each of which the learning rate is multiplied by decay_rate.
    decay_updates: PositiveInt = 100_000
    # Factor of the learning rate after each decay_updates updates.
    decay_rate: NonNegativeFloat = 0.1


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Checked):
    """The search of the agent.

    >>> SearchConfig(num_simulations=25).policy
    'muzero'
    """

    # MuZero's search (PUCT), or Gumbel MuZero's (sequential halving).
    policy: Literal["muzero", "gumbel"] = "muzero"
    num_simulations: PositiveInt = 50  # simulations of each search
    # Muzero: concentration of the Dirichlet noise in the root's prior.
    dirichlet_alpha: PositiveFloat = 0.3
    # Muzero: fraction of noise in the root's prior; 0 when evaluating.
    dirichlet_fraction: Fraction = 0.25
    max_considered: PositiveInt = 16  # Gumbel: actions tried at the root
    num_sampled_actions: PositiveInt = 20  # continuous actions tried at each node
    # Muzero: temperatures T of action ~ visits^(1/T).
    temperatures: tuple[NonNegativeFloat, ...] = (1.0, 0.5, 0.25)
    # Fractions of training at which each of the temperatures begins.
    temperature_from: tuple[float, ...] = (0.0, 0.5, 0.75)

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = self.temperature_from
        if len(starts) != len(self.temperatures) or not starts or starts[0] != 0:
            raise ValueError(
                f"temperatures={self.temperatures} and temperature_from={starts} must have the "
                "same length: temperature_from holds the fraction of training at which each "
                "temperature starts, and begins with 0"
            )
        if list(starts) != sorted(starts):
            raise ValueError(f"temperature_from={starts} must be in increasing order")

    def temperature(self, fraction: float) -> float:
        """The temperature at this fraction of training, 0..1.

        >>> [SearchConfig().temperature(fraction) for fraction in (0.0, 0.49, 0.5, 1.0)]
        [1.0, 1.0, 0.5, 0.25]
        """
        pairs = zip(self.temperature_from, self.temperatures, strict=True)
        return [temperature for start, temperature in pairs if start <= fraction][-1]


@dataclass(frozen=True, kw_only=True)
class EfficientZeroConfig(Checked):
    """The settings of an agent; the run's settings add its length and environment.

    >>> EfficientZeroConfig(search=SearchConfig(num_simulations=25)).targets.n_step
    5
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    targets: TargetConfig = field(default_factory=TargetConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    # Precision of convolutions and matrix products. Parameters, and searches on a CPU, stay in
    # float32.
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model.lstm_hidden_size and self.loss.lstm_horizon != 1:
            raise ValueError(
                f"lstm_hidden_size=0 and lstm_horizon={self.loss.lstm_horizon}: without an LSTM "
                "the networks predict the reward of one step, so set loss.lstm_horizon to 1"
            )
        if self.model.flatten and self.loss.augmentation:
            raise ValueError(
                f"augmentation={self.loss.augmentation} needs images, but model.flatten turns "
                "them into vectors: remove one of the two"
            )


def acting_numbers(config: EfficientZeroConfig) -> dict[str, float]:
    """The numbers of acting and search that may differ between members of a population.

    "temperature" is what the temperatures of the config are multiplied by.

    >>> acting_numbers(EfficientZeroConfig())["temperature"]
    1.0
    """
    return {
        "discount": config.targets.discount,
        "dirichlet_fraction": config.search.dirichlet_fraction,
        "temperature": 1.0,
    }


def hyper_numbers(config: EfficientZeroConfig) -> dict[str, float]:
    """The numbers that may differ between members of a population.

    >>> hyper_numbers(EfficientZeroConfig())["weight_decay"]
    0.0001
    """
    numbers = {name: getattr(config.optimizer, name) for name in ("learning_rate", "weight_decay")}
    weights = [name for name in vars(config.loss) if name.endswith("_weight")]
    return numbers | {name: getattr(config.loss, name) for name in weights} | acting_numbers(config)
