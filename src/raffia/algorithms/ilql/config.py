"""The settings of ILQL, with the paper's numbers. Imports no torch, so that `--help` is fast.

What ILQL is compared with is ILQL with other numbers: see `method`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, get_args

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
from raffia.lm.decoding.config import DecodeConfig as DecodeConfig

HYPER = {  # part of the config -> fields in which the members of a population may differ
    "optimizer": "learning_rate value_rate weight_decay",
    "target": "alpha",
    "loss": "gamma tau beta awac_weight v_weight q_weight cql_weight dm_weight",
    "decode": "temperature adv_weight",  # at which only `raffia.recipes` looks
}


@dataclass(frozen=True, kw_only=True)
class TrunkConfig(Checked):
    """A causal language model, by default of the shape of the small GPT-2.

    >>> TrunkConfig(n_layer=2, n_head=2, n_embd=32).block_size
    1024
    """

    # Raffia's GPT, or a model of `transformers` as its folder defines it, of which only the sizes
    # that it has are used.
    kind: Literal["gpt", "transformers"] = "gpt"
    vocab_size: PositiveInt = 50257  # number of tokens in the vocabulary
    n_layer: PositiveInt = 12  # number of layers
    n_head: PositiveInt = 12  # attention heads in each layer
    n_embd: PositiveInt = 768  # width of the hidden states
    block_size: PositiveInt = 1024  # longest context in tokens
    dim_feedfwd: PositiveInt | None = None  # width of the feed-forward layers; None: 4 n_embd
    dropout: FractionBelowOne = 0.0  # dropout in training; GPT-2's is 0.1
    layer_norm_eps: PositiveFloat = 1e-5  # epsilon of the layer normalisations
    bias: bool = True  # biases in linear layers and layer normalisations
    # Learned position embeddings, or rotary ones.
    positions: Literal["learned", "rotary"] = "learned"
    # Activation of the feed-forward layers.
    activation: Literal["GELU", "ReLU", "SiLU", "LeakyReLU", "Tanh"] = "GELU"
    # Recompute activations in the backward pass: less memory, more time.
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            heads = [n for n in range(1, min(self.n_head, self.n_embd) + 1) if self.n_embd % n == 0]
            raise ValueError(
                f"n_embd={self.n_embd} cannot be divided by n_head={self.n_head}; n_head can be "
                f"one of {heads}"
            )


@dataclass(frozen=True, kw_only=True)
class ILQLModelConfig(Checked):
    """The networks: which trunks there are, and the heads on them.

    Trunk passes of one update, a backward pass counted as two: 7 with a target trunk and a separate
    policy, 4 with a target trunk alone, 3 where all is shared.

    >>> ILQLModelConfig(trunk=TrunkConfig(vocab_size=35, n_embd=64, n_head=4)).policy
    'shared'
    """

    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    # The trunk of the policy's logits: the one that the values share, or a separate one.
    policy: Literal["shared", "separate"] = "shared"
    # What the target network holds: Q heads on the online trunk's hidden states, or a trunk too.
    target: Literal["heads", "trunk"] = "heads"
    double_q: bool = True  # two Q heads, with the smaller of their targets
    detach_v: bool = False  # stop the gradient from the V head into the trunk
    detach_q: bool = False  # stop the gradient from the Q heads into the trunk
    # Stop the gradient from the logits into the trunk; tied output weights still learn.
    detach_pi: bool = False
    # An action is a token; else it is a whole utterance, whose Q is one number.
    per_token: bool = True
    # Heads whose form a population can mutate (`activation`, `architecture`); they start with a
    # layer of 2 n_embd nodes.
    evolvable_heads: bool = False
    max_head_layers: PositiveInt = 3  # maximal number of layers of an evolvable head
    # Maximal number of nodes in each layer of an evolvable head; None: 4 n_embd.
    max_head_nodes: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class ILQLLossConfig(Checked):
    """The weights of the loss terms. A term of weight 0 costs nothing."""

    gamma: Fraction = 0.99  # discount per token of the agent
    # Expectile of V: 0.5 is the mean of the data's values, towards 1 the best of them.
    tau: Fraction = 0.6
    # Inverse temperature of advantage weights in the policy loss; 0: all tokens count equally.
    beta: NonNegativeFloat = 0.0
    exp_weights: bool = True  # weights exp(beta A); else beta where A > 0 and 1 - beta elsewhere
    # Weight in the policy loss of tokens that are not the agent's.
    transition_weight: NonNegativeFloat = 0.0
    clip_weight: PositiveFloat | None = None  # maximum of the advantage weights; None: no maximum
    value_min: float | None = None  # minimum of target Q values; None: no minimum
    value_max: float | None = None  # maximum of target Q values; None: no maximum
    awac_weight: NonNegativeFloat = 1.0  # weight of the policy loss
    v_weight: NonNegativeFloat = 1.0  # weight of the V loss
    q_weight: NonNegativeFloat = 1.0  # weight of the Q loss
    cql_weight: NonNegativeFloat = 0.01  # weight of the conservative (CQL) loss
    cql_temp: PositiveFloat = 1.0  # temperature of the CQL loss
    dm_weight: NonNegativeFloat = 0.0  # weight of the margin loss
    dm_margin: NonNegativeFloat = 0.0  # margin of that loss
    mc_returns: bool = False  # train V on the returns of the data instead of on Q
    # The backup of Q after the reward: V of the next state, or the largest target Q.
    backup: Literal["expectile", "max"] = "expectile"
    # Which slots of the batch count: real actions; or all not marked terminal, as in the paper's
    # code, which includes one slot of padding of each unfinished row.
    mask: Literal["strict", "published"] = "strict"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.exp_weights and not 0 <= self.beta <= 1:
            raise ValueError(
                f"beta={self.beta} must be in 0..1: without exp_weights it is used as a weight "
                "itself"
            )
        if not self.needs_values and self.awac_weight == 0:
            raise ValueError(
                "all weights are 0, so nothing would be learnt: set awac_weight=1.0 for a policy, "
                "or v_weight=1.0 and q_weight=1.0 for values"
            )
        low, high = self.value_min, self.value_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"value_min={low} must not be greater than value_max={high}")

    @property
    def needs_advantage(self) -> bool:
        """Whether the policy's loss looks at the values.

        >>> ILQLLossConfig(beta=0.0).needs_advantage, ILQLLossConfig(beta=1.0).needs_advantage
        (False, True)
        """
        return self.awac_weight > 0 and (self.beta != 0 or not self.exp_weights)

    @property
    def needs_values(self) -> bool:
        """Whether the heads are computed at all.

        >>> ILQLLossConfig().needs_values, method("bc", ILQLConfig()).loss.needs_values
        (True, False)
        """
        weights = (self.v_weight, self.q_weight, self.cql_weight, self.dm_weight)
        return any(weight > 0 for weight in weights) or self.needs_advantage


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Checked):
    """How the target network follows: target <- (1 - alpha) target + alpha online.

    >>> TargetConfig(alpha=0.05).interval
    1
    """

    # Fraction that the target network moves towards the online one; 1: a copy.
    alpha: Fraction = 0.005
    interval: PositiveInt = 1  # updates between moves


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """How parameters follow their gradients: AdamW, or Adam where nothing decays.

    >>> OptimizerConfig(learning_rate=1e-3, warmup_updates=100).decay
    'constant'
    """

    learning_rate: NonNegativeFloat = 1e-5  # learning rate of the trunk, after the warm-up
    # Learning rate of the V and Q heads, as a multiple of the trunk's.
    value_rate: NonNegativeFloat = 1.0
    weight_decay: NonNegativeFloat = 0.0  # decoupled weight decay; 0: Adam
    beta1: FractionBelowOne = 0.9  # decay of the mean of gradients
    beta2: FractionBelowOne = 0.999  # decay of the mean of squared gradients
    max_grad_norm: PositiveFloat | None = 1.0  # gradients are clipped to this norm; None: never
    warmup_updates: NonNegativeInt = 0  # updates in which the learning rate rises from 0
    # How the learning rate falls over the run.
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_share: Fraction = 0.1  # learning rate at the end of the run, as a fraction of the highest


@dataclass(frozen=True, kw_only=True)
class ILQLConfig(Checked):
    """The agent; how long it trains, and on what, is in the config of the run.

    >>> ILQLConfig(loss=ILQLLossConfig(tau=0.9)).target.alpha
    0.005
    """

    model: ILQLModelConfig = field(default_factory=ILQLModelConfig)
    loss: ILQLLossConfig = field(default_factory=ILQLLossConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    # Precision of matrix products, by autocast.
    precision: Literal["float32", "bfloat16"] = "float32"
    keep_best: PositiveFraction = 1.0  # fraction of the dialogues, the best by return, to train on

    def __post_init__(self) -> None:
        super().__post_init__()
        loss = self.loss
        if self.model.per_token:
            return
        for name in ("cql_weight", "dm_weight"):
            if getattr(loss, name) > 0:
                raise ValueError(
                    f"{name}={getattr(loss, name)} compares Q across tokens, but with "
                    f"per_token=False Q is one number for a whole utterance: set {name}=0"
                )
        if loss.backup == "max":
            raise ValueError(
                'backup="max" takes the maximum over tokens: with per_token=False use '
                'backup="expectile"'
            )


def hyper_numbers(config: ILQLConfig) -> dict[str, float]:
    """The numbers that may differ between members of a population.

    >>> hyper_numbers(ILQLConfig())["alpha"]
    0.005
    """
    return {
        name: getattr(getattr(config, part), name)
        for part, names in HYPER.items()
        for name in names.split()
    }


Config = TypeVar("Config", bound=ILQLConfig)  # a run's config is one, too
Method = Literal["ilql", "bc", "filtered_bc", "single_step", "cql"]


def method(name: Method, config: Config) -> Config:
    """The settings of a method that ILQL is compared with: same networks and data, other numbers.

    ilql         as it is
    bc           behaviour cloning: the policy alone, all of the agent's tokens equally
    filtered_bc  ... of the best dialogues, by return: a tenth, unless `keep_best` is given
    single_step  values of the policy that made the data (SARSA, tau 0.5); they act when decoding,
                 which is one step of policy improvement
    cql          conservative Q-learning (Kumar et al. 2020): the largest target Q as backup, held
                 down by the CQL term with weight 1 (unless `cql_weight` is above); no V, no policy

    >>> config = method("filtered_bc", ILQLConfig())
    >>> config.keep_best, config.loss.q_weight, config.decode.include_adv
    (0.1, 0.0, False)
    """
    check_choice("method", name, get_args(Method))
    loss, decode = config.loss, config.decode
    cloning = replace(
        loss, beta=0.0, exp_weights=True, v_weight=0.0, q_weight=0.0, cql_weight=0.0, dm_weight=0.0,
        awac_weight=loss.awac_weight or 1.0,
    )  # fmt: skip
    by_logits = replace(decode, include_logits=True, include_adv=False)
    match name:
        case "ilql":
            return config
        case "bc":
            return replace(config, loss=cloning, decode=by_logits)
        case "filtered_bc":
            fraction = config.keep_best if config.keep_best < 1 else 0.1
            return replace(config, loss=cloning, decode=by_logits, keep_best=fraction)
        case "single_step":
            return replace(config, loss=replace(loss, tau=0.5))
        case "cql":
            only_q = replace(
                loss, backup="max", v_weight=0.0, awac_weight=0.0, beta=0.0, exp_weights=True,
                q_weight=loss.q_weight or 1.0, cql_weight=max(1.0, loss.cql_weight),
            )  # fmt: skip
            by_values = replace(
                decode, include_logits=False, include_adv=True, exp_adv=True,
                adv_weight=decode.adv_weight or 1.0,
            )  # fmt: skip
            return replace(config, loss=only_q, decode=by_values)
