"""Acting: actions for states, and the entries of the search that replay stores."""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import Box, EnvSpec
from raffia.functional.draws import draw_seeds, seeded_gumbel, seeded_uniform
from raffia.search.policies import PolicyOutput
from raffia.tensordict.access import unchecked
from raffia.tensordict.tensordict import TensorDict


def act(
    planner: Planner,
    state: TensorDict,  # [E]
    *,
    temperature: float,
    noise: bool,
    seed: Tensor | None = None,  # int64 [E]: one for each row's draws
    generator: torch.Generator | None = None,  # of the seeds, where none are given
    num_simulations: int | None = None,
) -> TensorDict:
    """Search from all states together; an action for each, and the entries that replay stores.

    Gives "action", "policy" (the search's, the target of training) [E, A], "value" [E] (of the
    root), and for continuous actions "sampled_actions" [E, N, D], which the policy is over.

    >>> from raffia.algorithms.efficientzero.config import EfficientZeroConfig
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> planner = Planner(EfficientZeroModelMLP(4, 2), spec, EfficientZeroConfig())
    >>> state = TensorDict(observation=torch.zeros(3, 4), batch_size=[3])
    >>> done = act(planner, state, temperature=0.0, noise=False, num_simulations=8)
    >>> done["action"], done["policy"].shape
    (tensor([0, 0, 0]), torch.Size([3, 2]))
    """
    plan = planner.plan(
        state,
        num_simulations=num_simulations,
        noise=noise,
        temperature=temperature,
        seed=seed,
        generator=generator,
    )
    return replay_entries(plan)


def replay_entries(plan: PolicyOutput) -> TensorDict:
    """The entries of a search that replay stores.

    >>> from raffia.search import RecurrentOutput, RootOutput, muzero_policy
    >>> def model(embedding, action):
    ...     rows = len(action)
    ...     return RecurrentOutput(torch.ones(rows), torch.zeros(rows), torch.zeros(rows, 2)
    ...                            ), embedding
    >>> root = RootOutput(torch.zeros(3, 2), torch.zeros(3), torch.zeros(3, 1))
    >>> sorted(replay_entries(muzero_policy(root, model, 4)).keys())
    ['action', 'policy', 'value']
    """
    entries: dict[str, Tensor] = {
        "action": plan.action,
        "policy": plan.action_weights.float(),
        "value": plan.root_value.float(),
    }
    if "actions" in plan.tree.data.keys():
        entries["sampled_actions"] = plan.tree.data["actions"][:, 0].clone()
    return unchecked(entries, plan.action.shape[:1])


def act_at_random(
    spec: EnvSpec,
    state: TensorDict,  # [E]
    *,
    num_sampled_actions: int = 0,  # of continuous actions
    seed: Tensor | None = None,  # int64 [E]: one for each row's draws
    generator: torch.Generator | None = None,  # of the seeds, where none are given
) -> TensorDict:
    """A legal action for each state, drawn uniformly, with the other entries of `act`: that policy,
    and value 0.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(1,), action=Discrete(3), masked=True)
    >>> state = TensorDict(observation=torch.zeros(1, 1),
    ...                    action_mask=torch.tensor([[False, True, True]]), batch_size=[1])
    >>> act_at_random(spec, state)["policy"]
    tensor([[0.0000, 0.5000, 0.5000]])
    """
    num = len(state)
    seed = draw_seeds(num, generator) if seed is None else seed
    if isinstance(spec.action, Box):
        size = len(spec.action.low)
        drawn = seeded_uniform(seed, num_sampled_actions * size)
        low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
        actions = low + (high - low) * drawn.view(num, num_sampled_actions, size)
        policy = torch.full((num, num_sampled_actions), 1 / num_sampled_actions)
        entries = {"action": actions[:, 0].clone(), "sampled_actions": actions}
    else:
        mask = state["action_mask"] if spec.masked else torch.ones(num, spec.action.n)
        policy = mask.float() / mask.sum(-1, keepdim=True)
        scores = policy.log() + seeded_gumbel(seed, policy.shape[1])
        entries = {"action": scores.argmax(-1)}
    return TensorDict({**entries, "policy": policy, "value": torch.zeros(num)}, [num])
