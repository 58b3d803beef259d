"""The settings of decoding, with the paper's formulas. Imports no torch: help comes quickly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raffia.envs.checked import (
    check_above_zero,
    check_choices,
    check_fraction,
    check_least,
    check_types,
)

SUPPORT = 0.95  # probability of the policy that values choose within


@dataclass(frozen=True, kw_only=True)
class TokenPlanConfig:
    """How far planning over tokens looks: a search before each token.

    >>> TokenPlanConfig(num_simulations=32).num_candidates
    8
    """

    num_simulations: int = 16  # per token; 0: no search
    num_candidates: int = 8  # tokens tried at each node: the likeliest ones
    max_depth: int = 8  # tokens looked ahead
    discount: float = 0.99  # per token, as in training
    policy: Literal["muzero", "gumbel"] = "gumbel"
    # Rewards before the utterance's end: none, or those that the values imply, Q - discount V'.
    inner_reward: Literal["none", "implied"] = "none"
    noise: float = 0.0  # gumbel: scale of the noise; muzero: temperature of the visits; 0: the best

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_least(self, 1, "max_depth")
        check_least(self, 2, "num_candidates")
        check_fraction(self, "discount")
        check_least(self, 0, "num_simulations", "noise")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How the agent decodes: the policy's logits, moved by the advantage of each next token.

    >>> DecodeConfig(num_beams=8, adv_weight=4.0).needs_values
    True
    >>> DecodeConfig(include_adv=False).needs_values
    False
    """

    temperature: float = 1.0  # divides the policy's logits, not the advantage's part
    top_k: int | None = None  # of the logits: only the k likeliest tokens; above all: all
    # Of the logits: only the likeliest tokens that reach this probability; 1: all. None: 0.95 where
    # values choose beside the logits, else all. Values of tokens that the data lack are noise.
    top_p: float | None = None
    include_logits: bool = True
    include_adv: bool = True
    exp_adv: bool = True  # adds adv_weight A; else log(adv_weight) or log(1 - adv_weight), by sign
    adv_weight: float = 1.0
    adv_clip: float | None = None  # the advantage's part is never above
    num_beams: int | None = None  # None: sampling; else beam search, 1 of which is greedy
    num_generations: int = 1  # texts for each prompt; of beam search the best of the beams
    # The order of a prompt's texts, the best first; None: as they come.
    rerank: Literal["log_prob", "advantage", "value"] | None = None
    max_new_tokens: int | None = None  # None: as many as the context holds
    # KL, advantages and values are reported even where nothing above needs their networks.
    report_all: bool = False
    # A tree search before each token, whose prior is all of the above.
    plan: TokenPlanConfig = field(default_factory=lambda: TokenPlanConfig(num_simulations=0))

    def __post_init__(self) -> None:
        check_types(self)
        if self.rerank not in (None, "log_prob", "advantage", "value"):
            raise ValueError(
                f"rerank={self.rerank!r} is none of 'log_prob', 'advantage', 'value', None"
            )
        if self.temperature == 0:
            raise ValueError(
                "temperature=0 would divide by 0: for the best token each time pass num_beams=1, "
                "or top_k=1 for the policy's likeliest one whatever the advantage"
            )
        check_above_zero(self, "temperature")
        check_least(self, 0, "adv_weight")
        check_least(self, 1, "num_generations")
        for name in ("top_k", "num_beams", "max_new_tokens"):
            if getattr(self, name) is not None:
                check_least(self, 1, name)
        if self.top_p is not None:
            check_fraction(self, "top_p")
        if self.include_adv and not self.exp_adv and not 0 < self.adv_weight < 1:
            raise ValueError(
                f"adv_weight={self.adv_weight} must lie between 0 and 1 with exp_adv=False, where "
                "tokens get log(adv_weight) or log(1 - adv_weight): for example adv_weight=0.9"
            )
        if not (self.include_logits or self.shifts):
            raise ValueError(
                f"include_logits=False and include_adv={self.include_adv} with adv_weight="
                f"{self.adv_weight} leave nothing to choose tokens by: set include_logits=True, or "
                "include_adv=True and adv_weight=1.0"
            )
        if self.plans and (self.num_beams is not None or self.rerank is not None):
            raise ValueError(
                f"num_beams={self.num_beams}, rerank={self.rerank!r}: a plan chooses the tokens by "
                "itself; leave both None, or set plan.num_simulations=0"
            )
        if self.num_beams is not None and self.num_generations > self.num_beams:
            raise ValueError(
                f"num_generations={self.num_generations} of num_beams={self.num_beams}: a beam "
                f"search ends with as many texts as beams; pass num_beams={self.num_generations}"
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
        """`top_p`, or its default where it is None.

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
