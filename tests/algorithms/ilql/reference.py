"""ILQL's loss restated in plain Python: row by row without padding, slot by slot.

Only the networks are the library's, each called with one row. What the published mask lets in
is written out: for an unfinished row, one slot after its last action, where all indices are 0.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Slot:
    """One action, or a slot that the published mask counts as one."""

    action: int  # position of Q
    state: int  # position of V
    next_state: int | None  # None: its value does not count
    token: int | None  # None for a whole utterance
    reward: float
    positions: range  # positions whose next token is part of the action
    for_values: bool
    for_policy: bool


def slots_of(row, per_token, published, num_slots):
    """row: a `DataPoint`; num_slots: A of its batch."""
    actions = row.action_idxs if per_token else row.utterance_action_idxs
    states = row.state_idxs if per_token else row.utterance_state_idxs
    rewards = row.rewards if per_token else row.utterance_rewards
    ended = bool(row.terminals[-1])
    found = []
    for index, (action, reward) in enumerate(zip(actions, rewards, strict=True)):
        last = index == len(actions) - 1
        following = None if last and ended else states[index + 1]
        token = row.tokens[action + 1] if per_token else None
        positions = range(action, action + 1) if per_token else range(states[index], action)
        found.append(Slot(action, states[index], following, token, reward, positions, True, True))
    if published and len(found) < num_slots and (not ended or not found):
        token = row.tokens[1] if per_token else None
        positions = range(1) if per_token else range(states[len(found)], 0)
        state, is_open = states[len(found)], not ended
        found.append(Slot(0, state, None, token, 0.0, positions, is_open, not found))
    return found


def bounded(values, loss):
    if loss.value_min is None and loss.value_max is None:
        return values
    return values.clamp(loss.value_min, loss.value_max)


def reference(model, target, loss, rows):
    """The total, the terms, and by row: weights of tokens, and outputs of the heads."""
    per_token, published = model.config.per_token, loss.mask == "published"
    config = model.config
    num_slots = max(
        [1, *(len(r.action_idxs if per_token else r.utterance_action_idxs) for r in rows)]
    )
    terms = dict.fromkeys(("q", "v", "cql", "dm", "token"), torch.zeros(()).double())
    num_values, num_tokens, by_row = 0, 0, []
    for row in rows:
        tokens = torch.tensor([row.tokens])
        hidden = model.trunk(tokens)[0]
        target_hidden = (
            hidden.detach() if target.trunk is None else target.trunk(tokens)[0].detach()
        )
        policy_hidden = hidden if config.policy == "shared" else model.policy(tokens)[0]
        policy_hidden = policy_hidden.detach() if config.detach_pi else policy_hidden
        log_probs = model.policy_trunk.logits(policy_hidden).log_softmax(-1)
        of_v = hidden.detach() if config.detach_v else hidden
        of_q = hidden.detach() if config.detach_q else hidden
        slots = slots_of(row, per_token, published, num_slots)
        discounted, returns = 0.0, {}
        for index in reversed(range(len(slots))):
            returns[index] = discounted = slots[index].reward + loss.gamma * discounted
        weights = [loss.transition_weight] * len(row.tokens)
        if loss.clip_weight is not None:
            weights = [min(weight, loss.clip_weight) for weight in weights]
        outputs = []
        for index, slot in enumerate(slots):
            column = 0 if slot.token is None else slot.token
            v = model.v(of_v[slot.state])[0]
            following = torch.zeros(()).double()
            if slot.next_state is not None:
                following = model.v(of_v[slot.next_state])[0].detach()
                if loss.backup == "max":
                    least = torch.stack(
                        [head(target_hidden[slot.next_state]) for head in target.q_heads]
                    )
                    least = bounded(least.amin(0), loss)
                    following = least.max().detach()
            q_rows = [head(of_q[slot.action]) for head in model.q_heads]
            target_q = torch.stack(
                [head(target_hidden[slot.action])[column] for head in target.q_heads]
            )
            target_q = bounded(target_q.amin(0), loss).item()
            outputs.append((v, following, [q[column] for q in q_rows], target_q))
            if slot.for_policy:
                advantage = target_q - v.item()
                weight = loss.beta if advantage > 0 else 1 - loss.beta
                if loss.exp_weights:
                    weight = math.exp(loss.beta * advantage)
                if loss.clip_weight is not None:
                    weight = min(weight, loss.clip_weight)
                for position in slot.positions:
                    weights[position] = weight
            if not slot.for_values:
                continue
            num_values += 1
            y = slot.reward + loss.gamma * following
            goal = returns[index] if loss.mc_returns else target_q
            error = goal - v
            terms["v"] = terms["v"] + (loss.tau if error >= 0 else 1 - loss.tau) * error**2
            for q in q_rows:
                terms["q"] = terms["q"] + (y - q[column]) ** 2
                if per_token:
                    scaled = q / loss.cql_temp
                    terms["cql"] = terms["cql"] + scaled.logsumexp(0) - scaled[column]
                    margins = (q - q[column] + loss.dm_margin).clamp_min(0)
                    terms["dm"] = terms["dm"] + margins.square().sum()
        for position, token in enumerate(row.tokens[1:]):
            num_tokens += 1
            terms["token"] = terms["token"] - weights[position] * log_probs[position, token]
        by_row.append((weights, outputs))
    terms = {
        name: term / max(1, num_tokens if name == "token" else num_values)
        for name, term in terms.items()
    }
    total = sum(
        getattr(loss, f"{'awac' if name == 'token' else name}_weight") * term
        for name, term in terms.items()
    )
    return total, terms, by_row
