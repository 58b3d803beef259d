"""Planning over tokens: a tree search before each token, with ILQL's networks as its model.

The actions of a node are the likeliest tokens of the perturbed policy, which is the prior; the
value of a node is V, and what ends the utterance is worth its target Q.

Legend: R rows of text, K candidates, D tokens looked ahead at most, M rows of a simulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.functional.draws import child_seed, seeded_gumbel
from raffia.lm.decoding.config import TokenPlanConfig
from raffia.lm.decoding.generations import Request
from raffia.lm.decoding.sampling import Choose, Moment
from raffia.lm.decoding.scorer import Choice, Rows
from raffia.search.base import RecurrentOutput, RootOutput
from raffia.search.policies import PolicyOutput, gumbel_policy, muzero_policy


def planned(
    request: Request,
    seeds: Tensor,  # int64 [N], of the noise of each text
) -> Choose:
    """Chooses tokens by a search.

    Source of the searches: Danihelka et al. (2022), Schrittwieser et al. (2020).

    >>> from raffia.lm.decoding.config import DecodeConfig
    >>> planned(Request(None, [], DecodeConfig()), torch.tensor([3])).__name__
    'choose'
    """

    def choose(now: Moment) -> Tensor:
        text_model = TextModel(now.rows, request)
        root = text_model.root(now.choice)
        step = torch.full_like(now.text, now.step)
        gumbel = seeded_gumbel(child_seed(seeds[now.text], step), root.prior_logits.shape[1])
        return _search(root, text_model, request.config.plan, gumbel).action

    return choose


def _search(
    root: RootOutput, text_model: TextModel, plan: TokenPlanConfig, gumbel: Tensor
) -> PolicyOutput:
    if plan.policy == "gumbel":
        return gumbel_policy(
            *(root, text_model, plan.num_simulations),
            discount=plan.discount,
            max_considered=min(plan.num_candidates, plan.num_simulations),
            root_gumbel=plan.noise * gumbel,
            max_depth=text_model.depth,
        )
    return muzero_policy(
        *(root, text_model, plan.num_simulations),
        discount=plan.discount,
        dirichlet_fraction=0.0,
        temperature=plan.noise,
        action_gumbel=gumbel if plan.noise > 0 else None,
        max_depth=text_model.depth,
    )


class TextModel:
    """The recurrent function of a search over texts.

    A node is known by the tokens that lead to it from the text so far, which its networks keep;
    those few tokens are read again, in one step.

    >>> TextModel.__call__.__name__
    '__call__'
    """

    def __init__(self, rows: Rows, request: Request) -> None:
        self.rows, self.request, self.plan = rows, request, request.config.plan
        self.depth = max(1, min(self.plan.max_depth, rows.room))

    def root(self, choice: Choice) -> RootOutput:
        """The root of the search: the text up to now."""
        logits, tokens, q = self._candidates(choice)
        num, device = len(tokens), tokens.device
        assert choice.v is not None
        embedding = {
            "row": torch.arange(num, device=device),
            "path": torch.zeros((num, self.depth), dtype=torch.int64, device=device),
            "length": torch.zeros(num, dtype=torch.int64, device=device),
            "tokens": tokens,
            "q": q,
        }
        mask = logits > -torch.inf  # filters may leave fewer tokens than candidates
        return RootOutput(logits, choice.v.float(), embedding, mask=mask, actions=tokens)

    def __call__(
        self, embedding: dict[str, Tensor], token: Tensor
    ) -> tuple[RecurrentOutput, dict[str, Tensor]]:
        """Evaluate the state after a token: embedding [M], int64 [M]."""
        at = embedding["length"].unsqueeze(-1)
        # Branches that have come to the end are asked for again, and their answer is left.
        path = embedding["path"].scatter(1, at.clamp_max(self.depth - 1), token.unsqueeze(-1))
        length = (embedding["length"] + 1).clamp_max(self.depth)
        outputs = self.rows.ahead(embedding["row"], path[:, : int(length.max())], length)
        choice = self.request.choice(outputs)
        logits, tokens, q = self._candidates(choice)
        of_token = (embedding["q"] * (embedding["tokens"] == token.unsqueeze(-1))).sum(-1)
        assert choice.v is not None
        v = choice.v.float()
        ended = self.request.stop.ended_by_token(token)
        reward = torch.zeros_like(v)
        if self.plan.inner_reward == "implied":
            reward = of_token - self.plan.discount * v
        output = RecurrentOutput(
            reward=torch.where(ended, of_token, reward),
            value=v.masked_fill(ended, 0.0),
            prior_logits=logits,
            mask=(logits > -torch.inf) & ~ended.unsqueeze(-1),
            actions=tokens,
        )
        after = {"row": embedding["row"], "path": path, "length": length, "tokens": tokens, "q": q}
        return output, after

    def _candidates(self, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens: log-probability, token, target Q, each [., K]."""
        num = min(self.plan.num_candidates, choice.log_probs.shape[-1])
        logits, tokens = choice.log_probs.topk(num, -1)
        assert choice.target_q is not None
        return logits.float(), tokens, choice.target_q.gather(-1, tokens).float()
