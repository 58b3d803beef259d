"""Planning over sampled actions: continuous and large action spaces, K actions at each node.

What a search calls the prior logits of a state are here the parameters of a policy, from which a
sampler draws K actions with the noise of the state's seed. A child's seed is made of its parent's
and of the choice that leads to it, so the same seed gives the same tree, whatever the batch.

Sources: Hubert et al. (2021), "Learning and Planning in Complex Action Spaces" (Sampled MuZero);
the LightZero project for its combination with EfficientZero.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from raffia.functional.draws import child_seed, draw_seeds
from raffia.search.outputs import RecurrentFn, RecurrentOutput, RootOutput
from raffia.search.policies import PolicyOutput
from raffia.search.samplers import ActionSampler
from raffia.tensordict.node import Node

SEED, ACTIONS = "sampling_seed", "sampled_actions"  # what the search's embeddings hold besides
Prior = Literal["sampling", "uniform", "density"]


def sampled_policy(
    root: RootOutput,  # its prior_logits are parameters of the policy [B, P]
    recurrent_fn: RecurrentFn,  # takes actions [M, ...] and gives parameters [M, P]
    *,
    sampler: ActionSampler,
    policy: Callable[[RootOutput, RecurrentFn], PolicyOutput],  # muzero_policy or gumbel_policy
    seed: Tensor | None = None,  # int64 [B]: the draws of a root's whole tree
    prior: Prior = "sampling",
    generator: torch.Generator | None = None,  # for the seeds if not given; None: torch's own
) -> PolicyOutput:
    """Plan over sampled actions; `action` is the real one, `action_weights` are of the K sampled.

    The K actions of the root are `tree.data["actions"][:, 0]`: with `sampler.log_density` of them
    and `action_weights` as the target, they make the loss of the policy.

    >>> import functools
    >>> from raffia.search import GaussianSampler, RecurrentOutput, RootOutput
    >>> from raffia.search import gumbel_policy, sampled_policy
    >>> def reach(embedding, action):  # the closer to 0.5 the better
    ...     rows = len(action)
    ...     reward = 1 - (action[:, 0] - 0.5).abs()
    ...     policy = torch.tensor([0.0, 1.0]).expand(rows, 2)  # mean, standard deviation
    ...     return RecurrentOutput(reward, torch.zeros(rows), policy), embedding
    >>> root = RootOutput(torch.tensor([[0.0, 1.0]] * 3), torch.zeros(3), torch.zeros(3, 1))
    >>> plan = sampled_policy(
    ...     root, reach, sampler=GaussianSampler(16), seed=torch.tensor([1, 2, 3]),
    ...     policy=functools.partial(gumbel_policy, num_simulations=32, gumbel_scale=0.0,
    ...                              discount=0.0))
    >>> plan.action.shape, bool(((plan.action - 0.5).abs() < 0.2).all())
    (torch.Size([3, 1]), True)
    """
    if seed is None:
        seed = draw_seeds(len(root.prior_logits), generator).to(root.prior_logits.device)
    return policy(*with_sampled_actions(root, recurrent_fn, sampler, seed, prior=prior))


def with_sampled_actions(
    root: RootOutput,  # its prior_logits are parameters of the policy [B, P]
    recurrent_fn: RecurrentFn,  # takes actions [M, ...] and gives parameters [M, P]
    sampler: ActionSampler,
    seed: Tensor,  # int64 [B]
    *,
    prior: Prior = "sampling",
) -> tuple[RootOutput, RecurrentFn]:
    """The root and the recurrent function of a search over K sampled actions at each node.

    prior: what the search takes for the prior of the K actions. They were drawn from the policy pi,
        so what is likely stands among them already; to weigh it by pi again would count pi twice.
        "sampling": the weights with which the K stand for pi: all equal where they were drawn
        independently of each other; where they were drawn without replacement, pi over the
        probability to be among them (all of pi where all actions are).
        "uniform": 1/K. "density": pi, rescaled to the K.
    Embeddings get two further entries, "sampling_seed" [M] and "sampled_actions" [M, K, ...], which
    lie where the embedding does and which the model does not see.

    >>> from raffia.search import CategoricalSampler, RecurrentOutput, RootOutput
    >>> from raffia.search import with_sampled_actions
    >>> def model(embedding, action):
    ...     return RecurrentOutput(0 * action, 0 * action, embedding.expand(-1, 9)), embedding
    >>> root = RootOutput(torch.zeros(2, 9), torch.zeros(2), torch.zeros(2, 1))
    >>> few, few_fn = with_sampled_actions(
    ...     root, model, CategoricalSampler(4), seed=torch.tensor([3, 3]))
    >>> few.actions
    tensor([[1, 2, 5, 7],
            [1, 2, 5, 7]])
    """
    if isinstance(sampler, type) or not hasattr(sampler, "sample"):
        what = f"the class {sampler.__name__}" if isinstance(sampler, type) else repr(sampler)
        raise TypeError(f"sampler is {what}; pass an instance, such as GaussianSampler(20)")
    if prior not in ("sampling", "uniform", "density"):
        raise ValueError(f"prior={prior!r} is none of 'sampling', 'uniform', 'density'")
    if root.actions is not None:
        raise ValueError(
            "root.actions is given: the actions of this root are sampled already; pass the root "
            "of the model, whose prior_logits are the parameters of its policy"
        )
    batch = len(root.prior_logits)
    if seed.shape != (batch,) or seed.dtype != torch.int64:
        raise ValueError(
            f"seed is {seed.dtype} {list(seed.shape)}; it must be int64 [{batch}], one for each "
            f"root: for example torch.arange({batch})"
        )
    actions, logits, mask = _draw(sampler, root.prior_logits, seed, root.mask, prior)
    device = _device_of(root.embedding, root.prior_logits.device)

    def recurrent_over_samples(embedding: Any, action: Tensor) -> tuple[RecurrentOutput, Any]:
        own, seed, known = _take(embedding)
        output, child = recurrent_fn(own, action)
        _check_dtype(root.prior_logits, output.prior_logits)
        seed = child_seed(seed, _which(known, action.to(device)))
        actions, logits, mask = _draw(sampler, output.prior_logits, seed, output.mask, prior)
        output = output._replace(prior_logits=logits, mask=mask, actions=actions)
        return output, _put(child, seed, actions.to(device))

    # The model over samples predicts prefixes or rewards as the model itself does.
    vars(recurrent_over_samples).update(
        predicts_prefixes=getattr(recurrent_fn, "predicts_prefixes", False)
    )
    embedding = _put(root.embedding, seed.to(device), actions.to(device))
    over_samples = root._replace(
        prior_logits=logits, mask=mask, actions=actions, embedding=embedding
    )
    return over_samples, recurrent_over_samples


def _check_dtype(root: Tensor, node: Tensor) -> None:
    if root.dtype != node.dtype:
        raise TypeError(
            f"root.prior_logits (the policy's parameters) are {root.dtype} and those that "
            f"recurrent_fn gives are {node.dtype}; they must be the same: pass for example "
            f"root._replace(prior_logits=root.prior_logits.to({node.dtype}))"
        )


def _draw(
    sampler: ActionSampler, parameters: Tensor, seed: Tensor, mask: Tensor | None, prior: Prior
) -> tuple[Tensor, Tensor, Tensor | None]:
    """K actions of each row, their prior logits, and which of them are legal."""
    samples = sampler.sample(parameters, seed.to(parameters.device), mask)
    if prior == "density":
        logits = sampler.log_density(parameters, samples.actions)
    elif prior == "sampling":
        logits = samples.log_weight
    else:
        logits = torch.zeros_like(samples.log_weight)
    return samples.actions, logits, samples.mask


def _which(
    known: Tensor,  # [M, K, ...]
    action: Tensor,  # [M, ...]
) -> Tensor:
    """Index of the taken action among the K [M]; the first of equal ones.

    Seeds are made of it and not of the action's bits, so that a last bit changes no draw.
    """
    same = known == action.unsqueeze(1)
    return same.flatten(2).all(-1).int().argmax(-1) if same.ndim > 2 else same.int().argmax(-1)


def _device_of(embedding: Any, default: torch.device) -> torch.device:
    """Device of the embedding, which may be another than the trees'; what is carried beside it
    goes along, since a search moves the rows of all of it together."""
    leaves = _entries(embedding) if isinstance(embedding, Node) else tree_leaves(embedding)
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), default)


def _put(embedding: Any, seed: Tensor, actions: Tensor) -> Any:
    """The model's embedding with seeds and actions beside it, in the container that it is."""
    beside = {SEED: seed, ACTIONS: actions}
    if isinstance(embedding, Node):
        return embedding.copy().update(beside)
    return {**embedding, **beside} if isinstance(embedding, dict) else (embedding, seed, actions)


def _take(carried: Any) -> tuple[Any, Tensor, Tensor]:
    """What `_put` was given."""
    if isinstance(carried, tuple):
        return carried
    if isinstance(carried, Node):
        own: Any = carried.exclude(SEED, ACTIONS)
    else:
        own = {name: entry for name, entry in carried.items() if name not in (SEED, ACTIONS)}
    return own, carried[SEED], carried[ACTIONS]


def _entries(container: Any) -> Iterable[Any]:
    return container.values(True, True)
