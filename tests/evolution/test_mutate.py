"""Mutations of a member: each kind, and what it leaves unchanged."""

import math

import pytest
import torch
from torch.func import functional_call

from raffia.evolution.config import HyperRange, MutationConfig
from raffia.evolution.mutate import check_mutations, mutate
from raffia.functional.activations import ACTIVATIONS
from raffia.functional.optim import adamw, sgd
from raffia.nn.evolvable import EvolvableMLP
from raffia.tensordict.tensordict import TensorDict

P, X, Y, D, L, N = 5, 3, 2, 4, 3, 6
NAMES = tuple(ACTIVATIONS)
FIRST, SECOND = ("policy", "head"), ("head",)  # the one's name ends as the other's


def only(kind, **options):
    return MutationConfig(no_mutation=0.0, **{kind: 1.0}, **options)


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def network_of(**options):
    sizes = {"width": D, "num_nodes": 3, "max_nodes": N, "max_layers": L}
    return EvolvableMLP(X, Y, **{**sizes, **options})


def member_of(seed, num_layers=1, paths=(FIRST, SECOND), optimizer=None, **options):
    """Separate networks under these paths; the optimiser has made steps on noise."""
    torch.manual_seed(seed)
    params, buffers = TensorDict(), TensorDict()
    for path in paths:
        network = network_of(num_layers=num_layers, **options)
        for tree, named in (
            (params, network.named_parameters()),
            (buffers, network.named_buffers()),
        ):
            for name, tensor in named:
                tree[(*path, *name.split("."))] = tensor.detach().clone()
    optimizer = optimizer or adamw()
    groups = {"language": params.select("head", strict=False), "values": params.exclude("head")}
    opt = TensorDict({name: optimizer.init(part) for name, part in groups.items()})
    opt = opt.apply(lambda x: torch.rand_like(x) + 1 if x.is_floating_point() else x + 7)
    hyper = {"learning_rate": 1e-3, "tau": 0.7, "batch_size": 16}
    hyper = TensorDict({name: torch.tensor(number) for name, number in hyper.items()})
    weights = TensorDict(params=params.clone(), buffers=buffers.clone())
    state = {"params": params, "buffers": buffers, "target": weights, "opt": opt, "hyper": hyper}
    return TensorDict(**state, step=torch.tensor(seed))


def population(**options):
    return torch.stack([member_of(seed, **options) for seed in range(P)])


def outputs(state, x, path=FIRST, of=()):
    """Outputs of the networks of all members, as one program."""
    network = network_of()

    def one(params, buffers):
        return functional_call(network, {**params.flatten_keys("."), **buffers}, (x,))

    return torch.vmap(one)(state[(*of, "params", *path)], state[(*of, "buffers", *path)])


def _tuple(key):
    return key if isinstance(key, tuple) else (key,)


def leaves(tree):
    return {_tuple(key): leaf for key, leaf in tree.items(True, True)}


def changed(before, after):
    """The keys of leaves that differ, with masks of the different elements."""
    new = leaves(after)
    assert new.keys() == leaves(before).keys()
    found = {key: new[key] != leaf for key, leaf in leaves(before).items()}
    return {key: where for key, where in found.items() if where.any()}


def assert_same(one, two):
    assert not changed(one, two)


RANGES = {
    "learning_rate": HyperRange(1e-5, 1e-2),
    "tau": HyperRange(0.5, 0.95),
    "batch_size": HyperRange(4, 64),
}
ALL = MutationConfig(
    **{"no_mutation": 0.2, "hyper": 0.3, "parameters": 0.2, "activation": 0.1},
    **{"architecture": 0.4, "hyper_ranges": RANGES, "nodes": (1, 2)},
)


def alone(**trees):
    """A population whose state has only these trees."""
    (size,) = {len(leaf) for tree in trees.values() for leaf in tree.values()}
    return TensorDict({name: TensorDict(tree, [size]) for name, tree in trees.items()}, [size])


@pytest.mark.parametrize("seed", range(2))
def test_a_pure_function_of_state_and_draws(seed):
    state = population()
    before = state.clone()
    after, changes = mutate(state, ALL, draws(seed))
    assert_same(state, before)
    again, same = mutate(state, ALL, draws(seed))
    assert_same(after, again)
    assert changes == same and len(changes) == P
    memory = {leaf.data_ptr() for leaf in leaves(state).values()}
    assert not memory & {leaf.data_ptr() for leaf in leaves(after).values()}


@pytest.mark.parametrize("seed", range(2))
def test_spared_and_unmutated_members_stay_bit_for_bit(seed):
    state = population()
    free, changes = mutate(state, ALL, draws(seed))
    after, reports = mutate(state, ALL, draws(seed), spared=(1, 3))
    for i, (change, without) in enumerate(zip(reports, changes, strict=True)):
        if i in (1, 3):
            assert change.kind == "none" and change.what == ""
        if change.kind == "none":
            assert_same(after[i], state[i])
        else:
            assert changed(state[i], after[i]), change
        if i == 0:  # earlier members do not depend on it
            assert change == without
            assert_same(after[0], free[0])


def test_kinds_are_drawn_with_their_probabilities():
    size = 4000
    state = alone(params={"w": torch.ones(size, 2, 2)}, hyper={"tau": torch.full((size,), 0.7)})
    ranges = {"tau": RANGES["tau"]}
    config = MutationConfig(no_mutation=1.0, hyper=2.0, parameters=0.5, hyper_ranges=ranges)
    kinds = [change.kind for change in mutate(state, config, draws())[1]]
    for kind, probability in (("none", 1 / 3.5), ("hyper", 2 / 3.5), ("parameters", 0.5 / 3.5)):
        assert kinds.count(kind) / size == pytest.approx(probability, abs=0.04), kind
    assert set(kinds) == set(config.kinds)


def steps_of(span, start, times=300, dtype=torch.float32, seed=0):
    """The successive values of one hyper-parameter."""
    state = alone(hyper={"tau": torch.tensor([start], dtype=dtype)})
    config, draw = only("hyper", hyper_ranges={"tau": span}), draws(seed)
    found = [start]
    for _ in range(times):
        state, _ = mutate(state, config, draw)
        found.append(state["hyper", "tau"].item())
    return found


def test_a_step_changes_one_hyper_parameter_by_one_of_two_factors():
    state, mutated = population(), set()
    for seed in range(1, 12):
        after, changes = mutate(state, only("hyper", hyper_ranges=RANGES), draws(seed))
        for i, change in enumerate(changes):
            ((key, _),) = changed(state[i], after[i]).items()
            before, now, name = state[i][key].item(), after[i][key].item(), key[1]
            assert (change.kind, change.what) == ("hyper", f"{name} {before:g} -> {now:g}")
            if name != "batch_size":
                assert any(now / before == pytest.approx(by, rel=1e-5) for by in (1.2, 0.8))
            else:
                assert now in (19, 13)
            mutated.add(key)
    assert mutated == {("hyper", name) for name in RANGES}


def moves(found):
    return all(after != before for before, after in zip(found, found[1:], strict=False))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("low, high, start", [(0.5, 0.95, 0.7), (1e-5, 1e-2, 1e-3), (3.0, 4.0, 3)])
def test_steps_stay_within_the_range_and_reverse_at_its_ends(log, low, high, start):
    found = steps_of(HyperRange(low, high, grow=2, shrink=0.5, log=log), start, times=800)
    assert all(low * (1 - 1e-6) <= number <= high * (1 + 1e-6) for number in found)
    assert min(found) < low * 1.1 and max(found) > high * 0.9 and moves(found)
    if start == 3:  # whole numbers stay whole and move
        found = steps_of(HyperRange(1, 8.6, log=log), 2, times=400, dtype=torch.int64)
        assert all(type(number) is int for number in found) and moves(found)
        assert set(found) == set(range(1, 9))
        few = steps_of(HyperRange(3.5, 5.5, resample=1.0), 4, times=100, dtype=torch.int64)
        assert set(few) == {4, 5}


@pytest.mark.parametrize("log", [False, True])
def test_resampled_from_the_whole_range(log):
    found = torch.tensor(steps_of(HyperRange(1e-4, 1.0, log=log, resample=1.0), 0.5, times=600)[1:])
    fraction = (found.log10() / 4 + 1) if log else (found - 1e-4) / (1 - 1e-4)
    assert fraction.min() >= -1e-6 and fraction.max() <= 1 + 1e-6
    for at in (0.25, 0.5, 0.75):
        assert (fraction < at).float().mean() == pytest.approx(at, abs=0.1)
    few = torch.tensor(steps_of(HyperRange(1e-4, 1.0, resample=0.2), 0.5, times=600))
    by = few[1:] / few[:-1]
    steps = ((by - 1.2).abs() < 1e-4) | ((by - 0.8).abs() < 1e-4) | (few[1:] == 1)
    assert (~steps).float().mean() == pytest.approx(0.2, abs=0.08)


def test_noise_changes_a_fraction_of_the_weights_of_some_tensors():
    """Also for weights with other strides, as `torch.vmap` leaves them."""
    size, draw = 4, draws(7)
    shapes = {"a": (50, 40), "b": (30, 20, 5), "bias": (100,)}
    weights = {n: torch.randn(size, *s, generator=draw) for n, s in shapes.items()}
    weights["a"] = weights["a"].movedim(0, 1).contiguous().movedim(1, 0)
    weights["b"] = weights["b"].contiguous(memory_format=torch.channels_last)
    state, picked = alone(params=weights, opt=weights), []
    before = state.clone()
    for seed in range(20):
        config = only("parameters", mutated_fraction=0.1, strong_fraction=0.0, reset_fraction=0.0)
        after, changes = mutate(state, config, draws(seed), spared=(2,))
        where = changed(state, after)
        assert {key[0] for key in where} == {"params"} and ("params", "bias") not in where
        for i in (0, 1, 3):
            counts = [int(at[i].sum()) for at in where.values()]
            sizes = [round(0.1 * at[i].numel()) for at in where.values()]
            picked.append(sum(map(bool, counts)))
            assert all(n in (0, count) for n, count in zip(counts, sizes, strict=True))
            assert changes[i].what == f"{sum(counts)} weights of {picked[-1]} tensors"
    assert set(picked) == {1, 2}
    assert_same(state, before)


def noise_of(**options):
    weight = torch.randn(1, 200, 200, generator=draws(3)) * 2
    options = {"strong_fraction": 0.0, "reset_fraction": 0.0, **options}
    after, _ = mutate(
        alone(params={"w": weight}), only("parameters", mutated_fraction=1.0, **options), draws()
    )
    return weight.flatten(), after["params", "w"].flatten()


def test_noise_is_relative_to_the_weight_and_some_weights_get_more_or_are_redrawn():
    before, after = noise_of(mutation_sd=0.3)
    relative = (after - before) / before
    assert relative.std() == pytest.approx(0.3, rel=0.05) and relative.mean().abs() < 0.01
    assert torch.corrcoef(torch.stack([relative.abs(), before.abs()]))[0, 1].abs() < 0.03
    before, after = noise_of(mutation_sd=0.01, strong_fraction=0.2)
    relative = ((after - before) / before).abs()
    # beyond 5 sd of the weak noise: only the strong one, ten times as large, beyond half its sd
    assert (relative > 0.05).float().mean() == pytest.approx(0.2 * 0.617, abs=0.01)
    before, after = noise_of(mutation_sd=0.0, strong_fraction=0.3, reset_fraction=0.25)
    again = after != before
    assert again.float().mean() == pytest.approx(0.25, abs=0.01)
    assert after[again].std() == pytest.approx(2.0, rel=0.05)
    assert torch.corrcoef(torch.stack([before[again], after[again]]))[0, 1].abs() < 0.05
    before, after = noise_of(mutation_sd=0.0, strong_fraction=1.0)
    assert after.equal(before)


def test_another_activation():
    state, drawn = population(activation="gelu"), set()
    x = torch.randn(7, X, generator=draws())
    for seed in range(12):
        after, changes = mutate(state, only("activation"), draws(seed), spared=(0,))
        for i in range(1, P):
            ((key, _),) = changed(state[i], after[i]).items()
            path, now = key[1:-1], NAMES[int(after[i][key])]
            assert key == ("buffers", *path, "activation") and path in (FIRST, SECOND)
            assert changes[i].what == f"{'.'.join(path)}: gelu -> {now}"
            drawn.add(now)
            assert not outputs(after, x, path)[i].equal(outputs(state, x, path)[i])
    assert len(drawn) == len(NAMES) - 1


def grown(config, seeds=range(40), state=None, **options):
    """Changes of the architecture that made it larger: before, after, member, path."""
    state = population(**options) if state is None else state
    for seed in seeds:
        after, changes = mutate(state, config, draws(seed))
        for i, change in enumerate(changes):
            if change.what.endswith("more") or " more in " in change.what:
                yield state, after, i, tuple(change.what.split(":")[0].split("."))


GROWTH = {
    "a layer": only("architecture", new_layer_prob=1.0),
    "nodes": only("architecture", new_layer_prob=0.0, nodes=(1, 2)),
}


@pytest.mark.parametrize("what", list(GROWTH))
def test_growing_keeps_the_outputs(what):
    x = torch.randn(7, X, generator=draws())
    close = {"rtol": 1e-5, "atol": 1e-6}
    count = 0
    for state, after, i, path in grown(GROWTH[what], seeds=range(12), num_layers=2):
        before, now = (s["buffers", *path, "width_mask"][i].sum() for s in (state, after))
        assert now > before
        for at in (FIRST, SECOND):
            torch.testing.assert_close(outputs(after, x, at)[i], outputs(state, x, at)[i], **close)
            old = outputs(state, x, at, ("target",))[i]
            assert outputs(after, x, at, ("target",))[i].equal(old)
        count += 1
    assert count > 10
    # And a target network that is run with the buffers of the online network.
    shared = population(num_layers=2)
    shared["target"] = shared["params"].apply(torch.randn_like)
    for _, after, i, _ in grown(GROWTH[what], range(4), shared):
        old, new = (s.copy().set("params", s["target"]) for s in (shared, after))
        for at in (FIRST, SECOND):
            torch.testing.assert_close(outputs(new, x, at)[i], outputs(old, x, at)[i], **close)


@pytest.mark.parametrize("what", list(GROWTH))
@pytest.mark.parametrize("optimizer", [adamw(), sgd()])
def test_only_the_moments_of_new_weights_are_zero(what, optimizer):
    count = 0
    for state, after, i, path in grown(GROWTH[what], optimizer=optimizer, num_layers=2):
        group = "language" if path == SECOND else "values"
        (gate, mask), (new_gate, new_mask) = (
            [s["buffers", *path, name][i] for name in ("layer_gate", "width_mask")]
            for s in (state, after)
        )
        added = new_gate > gate
        assert added.sum() == (what == "a layer")
        new = added[:, None].expand(L, N) if what == "a layer" else new_mask > mask
        shapes = {
            "inner_weight": new[:, :, None].expand(L, N, D),
            "inner_bias": new,
            "outer_weight": new[:, None].expand(L, D, N),
            "outer_bias": added[:, None].expand(L, D),
        }
        slots = ("momentum",) if "momentum" in state["opt", group].keys() else ("mean", "square")
        wanted = {(group, slot, *path, name): at for slot in slots for name, at in shapes.items()
                  if at.any()}  # fmt: skip
        found = changed(state["opt"][i], after["opt"][i])
        assert found.keys() == wanted.keys()
        for key, at in wanted.items():
            assert found[key].equal(at), key
            assert not after["opt", *key][i][at].any()
        written = changed(state["params"][i], after["params"][i])
        assert written.keys() <= {(*path, "outer_weight"), (*path, "outer_bias")}
        count += 1
    assert count > 20


def test_layers_and_nodes_are_removed_until_one_is_left():
    config = only("architecture", new_layer_prob=0.5, nodes=(1, 2, 4))
    state, draw = population(paths=(SECOND,), num_layers=3, num_nodes=6), draws()
    reported = set()
    for _ in range(120):
        state, changes = mutate(state, config, draw)
        reported |= {change.what for change in changes}
        gate = state["buffers", *SECOND, "layer_gate"]
        width = state["buffers", *SECOND, "width_mask"].sum(2)
        assert (gate.sum(1) >= 1).all()
        assert (width[gate == 1] >= 1).all() and (width[gate == 0] == 0).all()
        assert set(gate.unique().tolist()) <= {0.0, 1.0}
    layers = {f"head: layer {layer} {step}" for layer in range(3) for step in ("more", "less")}
    assert layers < reported
    counts = {f"head: {n} nodes {step} in layer {layer}"
              for n in (1, 2, 4) for step in ("more", "less") for layer in range(3)}  # fmt: skip
    assert len(counts & reported) > 12


@pytest.mark.parametrize("what", list(GROWTH))
def test_new_weights_learn_and_masked_ones_do_not(what):
    state, after, i, path = next(grown(GROWTH[what], num_layers=2, activation="tanh"))
    one, network, optimizer = after[i].clone(), network_of(), adamw(weight_decay=0.0)
    masks = [s["buffers", *path, "width_mask"][i] for s in (state, after)]
    new, dead = masks[1] > masks[0], masks[1] == 0
    params, opt = one["params", *path], optimizer.init(one["params", *path])
    start = params.clone()
    x, y = torch.randn(20, X, generator=draws()), torch.randn(20, Y, generator=draws(1))
    for _ in range(3):
        leaves = params.apply(lambda p: p.clone().requires_grad_())
        out = functional_call(network, {**leaves.flatten_keys("."), **one["buffers", *path]}, (x,))
        (out - y).square().mean().backward()
        grads = leaves.apply(lambda p: p.grad)
        outer = grads["outer_weight"].movedim(1, 2)
        for grad in (grads["inner_weight"], grads["inner_bias"], outer):
            assert not grad[dead].any()
        params, opt = optimizer.update(params, grads, opt, learning_rate=0.01)
    assert grads["inner_weight"][new].abs().sum(-1).all() and outer[new].abs().sum(-1).all()
    for name in ("inner_weight", "inner_bias"):
        assert params[name][dead].equal(start[name][dead])


def test_networks_and_batches_of_minimal_size():
    state = alone(params={"b": torch.ones(2, 20), "s": torch.ones(2)})
    after, changes = mutate(state, only("parameters"), draws())  # vectors alone are changed then
    assert all(change.kind == "parameters" for change in changes) and changed(state, after)
    counts = alone(params={"n": torch.ones(2, 3, 3, dtype=torch.int64), "none": torch.ones(2, 0)})
    state["params"].update(counts["params"])
    again, _ = mutate(state, only("parameters"), draws())  # of whole numbers and of nothing: none
    assert_same(again, after.update(counts))
    config = only("architecture", new_layer_prob=0.5, nodes=(16,))
    state, draw = population(paths=((),), max_layers=1, max_nodes=1, num_nodes=1), draws()
    possible = {"network: one layer stays", "network: 0 nodes more in layer 0"}
    for _ in range(10):
        after, changes = mutate(state, config, draw)
        assert_same(after, state)
        assert {change.what for change in changes} <= possible


def mutated(*missing, **ranges):
    state = population()
    state["hyper", "alpha"] = torch.tensor([0.7, 0.7, math.nan, 0.7, 0.7])
    return mutate(state.exclude(*missing), only("hyper", hyper_ranges=ranges), draws())


def unfit(kind, *missing):
    check_mutations(population().exclude(*missing), only(kind))


FORMS = [("buffers", *FIRST), ("buffers", *SECOND)]


BATCH = ("hyper", "batch_size")


REFUSED = [
    (lambda: mutated(learning_rat=RANGES["tau"]), r"rat'; did you mean 'learning_rate'\?"),
    (lambda: mutated(tau=HyperRange(0.8, 0.9)), "tau starts at 0.7, outside of .* from 0.8 to 0.9"),
    (lambda: mutated(learning_rate=HyperRange(0.01, 0.1)), "learning_rate starts at 0.001, outs"),
    (lambda: mutated(batch_size=HyperRange(0, 64)), "batch_size.* must start at 1"),
    (lambda: mutated(alpha=HyperRange(0.5, 0.9)), "alpha starts at nan, outside of its range"),
    (lambda: mutated(BATCH, batch_size=HyperRange(4, 64)), "batch_size has a range but no start"),
    (lambda: unfit("activation", *FORMS), "activation=1, .*EvolvableMLP, or set activation=0"),
    (lambda: unfit("architecture", "buffers"), "architecture=1, .* or set architecture=0"),
    (lambda: MutationConfig(hyper=-1.0), "hyper=-1.0 must be at least 0"),
    (lambda: MutationConfig(no_mutation=math.nan), "no_mutation=nan"),
    (lambda: MutationConfig(no_mutation=0.0), "all probabilities are 0"),
    (lambda: MutationConfig(hyper=1.0), 'a range: pass hyper_ranges={"learning_rate"'),
    (lambda: MutationConfig(mutated_fraction=1.5), r"mutated_fraction=1.5 must be in 0\.\.1"),
    (lambda: MutationConfig(strong_fraction=0.7, reset_fraction=0.7), "n and reset_fraction must"),
    (lambda: MutationConfig(mutation_sd=-0.1), "mutation_sd=-0.1 must be at least 0"),
    (lambda: MutationConfig(mutation_sd=math.nan), "mutation_sd=nan"),
    (lambda: MutationConfig(architecture=1.0, nodes=()), r"nodes=\(\) must be numbers of nodes"),
    (lambda: MutationConfig(architecture=1.0, nodes=(16, 0)), r"nodes=\(16, 0\)"),
    (lambda: HyperRange(2.0, 1.0), "a range from 2.0 to 1.0 is empty"),
    (lambda: HyperRange(0.0, math.inf), "a range from 0.0 to inf is empty or endless"),
    (lambda: mutated("hyper", tau=RANGES["tau"]), "no hyper-parameter 'tau'. It has: none"),
    (lambda: HyperRange(0.1, 1.0, grow=0.9), "grow=0.9 must be above 1, and shrink=0.8"),
    (lambda: HyperRange(0.1, 1.0, shrink=0.0), "shrink=0.0 between 0 and 1"),
    (lambda: HyperRange(0.0, 1.0, log=True), "low=0.0 must be above 0 in a logarithmic range"),
    (lambda: HyperRange(0.1, 1.0, resample=2.0), "resample=2.0 must be in 0"),
]


def test_invalid_calls_are_refused():
    for call, match in REFUSED:
        with pytest.raises(ValueError, match=match):
            call()
