"""The settings of decoding, with the paper's formulas. Imports no torch, for a fast `--help`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from raffia.envs.checked import (
    Checked,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
)

SUPPORT = 0.95  # probability of the policy that values choose within


@dataclass(frozen=True, kw_only=True)
class TokenPlanConfig(Checked):
    """How far planning over tokens looks: a search before each token.

    >>> TokenPlanConfig(num_simulations=32).num_candidates
    8
    """

    num_simulations: NonNegativeInt = 16  # simulations for each token; 0: no search
    # Tokens tried at each node: the most likely ones.
    num_candidates: Annotated[int, at_least(2)] = 8
    max_depth: PositiveInt = 8  # number of tokens to look ahead
    discount: Fraction = 0.99  # discount per token, as in training
    policy: Literal["muzero", "gumbel"] = "gumbel"  # Gumbel MuZero's search, or MuZero's (PUCT)
    # Rewards before the utterance's end: none, or those implied by the values, Q - discount V'.
    inner_reward: Literal["none", "implied"] = "none"
    # Gumbel: scale of the noise; muzero: temperature of the visits; 0: take the best.
    noise: NonNegativeFloat = 0.0


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Checked):
    """How the agent decodes: the policy's logits, moved by the advantage of each next token.

    >>> DecodeConfig(num_beams=8, adv_weight=4.0).needs_values
    True
    >>> DecodeConfig(include_adv=False).needs_values
    False
    """

    temperature: PositiveFloat = 1.0  # divides the policy's logits, not the advantage's part
    top_k: PositiveInt | None = None  # keep only the k most likely tokens by the logits; None: all
    # Keep only the most likely tokens that reach this probability by the logits; 1: all. None: 0.95
    # where values choose, since values of tokens that the data lack are noise, else all.
    top_p: Fraction | None = None
    include_logits: bool = True  # score tokens by the policy's logits
    include_adv: bool = True  # score tokens by their advantage
    # Add adv_weight A; else log(adv_weight) or log(1 - adv_weight), by the sign of A.
    exp_adv: bool = True
    adv_weight: NonNegativeFloat = 1.0  # weight of the advantage
    adv_clip: float | None = None  # maximum of the advantage's part; None: no maximum
    num_beams: PositiveInt | None = None  # width of a beam search, 1 being greedy; None: sample
    num_generations: PositiveInt = 1  # texts for each prompt; of a beam search the best beams
    # Score by which a prompt's texts are sorted, best first; None: leave them in their order.
    rerank: Literal["log_prob", "advantage", "value"] | None = None
    # Maximal number of new tokens; None: as many as the context holds.
    max_new_tokens: PositiveInt | None = None
    # Compute KL, advantages and values for reports even if decoding does not need them.
    report_all: bool = False
    # A tree search before each token, whose prior is all of the above.
    plan: TokenPlanConfig = field(default_factory=lambda: TokenPlanConfig(num_simulations=0))

    def __post_init__(self) -> None:
        if self.temperature == 0:
            raise ValueError(
                "temperature=0 would divide by 0: to always choose the best token pass "
                "num_beams=1, or top_k=1 for the policy's likeliest token without regard to "
                "advantages"
            )
        super().__post_init__()
        if self.include_adv and not self.exp_adv and not 0 < self.adv_weight < 1:
            raise ValueError(
                f"adv_weight={self.adv_weight} must be between 0 and 1 with exp_adv=False, where "
                "tokens are weighted by log(adv_weight) or log(1 - adv_weight): for example "
                "adv_weight=0.9"
            )
        if not (self.include_logits or self.shifts):
            raise ValueError(
                f"include_logits=False and include_adv={self.include_adv} with adv_weight="
                f"{self.adv_weight} leave nothing to choose tokens by: set include_logits=True, or "
                "include_adv=True and adv_weight=1.0"
            )
        if self.plans and (self.num_beams is not None or self.rerank is not None):
            raise ValueError(
                f"num_beams={self.num_beams} and rerank={self.rerank!r} cannot be combined with "
                "planning, which chooses the tokens: leave both None, or set "
                "plan.num_simulations=0"
            )
        if self.num_beams is not None and self.num_generations > self.num_beams:
            raise ValueError(
                f"num_generations={self.num_generations} must equal num_beams={self.num_beams}, "
                "because a beam search returns one text for each beam: pass "
                f"num_beams={self.num_generations}"
            )

    @property
    def shifts(self) -> bool:
        """Whether advantages change what is chosen."""
        return self.include_adv and self.adv_weight > 0

    @property
    def plans(self) -> bool:
        """Whether tokens are chosen by a search."""
        return self.plan.num_simulations > 0

    @property
    def effective_top_p(self) -> float:
        """The value of `top_p`, or its default if it is None.

        >>> DecodeConfig().effective_top_p, DecodeConfig(include_adv=False).effective_top_p
        (0.95, 1.0)
        """
        if self.top_p is not None:
            return self.top_p
        by_values = self.shifts or self.plans or self.rerank in ("advantage", "value")
        return SUPPORT if by_values and self.include_logits else 1.0

    @property
    def needs_values(self) -> bool:
        """Whether the networks of Q and V are run."""
        by_values = self.shifts or self.plans or self.rerank in ("advantage", "value")
        return by_values or self.report_all

    @property
    def needs_policy(self) -> bool:
        """Whether the policy's network is run."""
        return self.include_logits or self.report_all
