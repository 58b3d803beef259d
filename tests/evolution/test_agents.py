"""Lists of agents, selected and mutated through AgileRL's names."""

import copy

import pytest
import torch

from raffia.algorithms.ilql import ILQL, DecodeConfig
from raffia.evolution import HyperRange, Mutations, TournamentSelection
from raffia.functional.optim import adamw
from raffia.lm.data.dialogue import DataPoint, DialogueDataset, Vocabulary
from raffia.lm.lora import add_lora
from raffia.lm.tokenizers.tokenizer import character_tokenizer
from raffia.nn.evolvable import EvolvableMLP
from raffia.tensordict.tensordict import TensorDict
from tests.algorithms.ilql.agents import Letters
from tests.evolution.learners import by_name

TOKENIZER = character_tokenizer(["abcde"])
END = TOKENIZER.eoa_token_id
NET = {"vocab_size": TOKENIZER.num_tokens, "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 24}
SEPARATE = {"policy": "separate", "target": "trunk"}
SHORT = DecodeConfig(max_new_tokens=3, num_beams=1)
RANGES = {
    "lr": HyperRange(1e-4, 1e-1),
    "batch_size": HyperRange(2, 8),
    "tau": HyperRange(0.5, 0.95),
}
KINDS = ("no_mutation", "architecture", "parameters", "activation", "rl_hp")


def data():
    points, letters = [], [TOKENIZER.token_to_id(letter) for letter in "abcde"]
    for i in range(10):
        reply = [letters[i % 5], letters[(i + 1) % 5], END]
        tokens = [TOKENIZER.bos_token_id, letters[i % 4], TOKENIZER.eos_token_id, *reply]
        rewards = [0.0, 0.0, float(i % 5 == 0)]
        points.append(DataPoint.from_tokens(tokens, [2, 3, 4], rewards, end_of_action=END))
    vocabulary = Vocabulary(TOKENIZER.num_tokens, pad_token_id=TOKENIZER.pad_token_id)
    return DialogueDataset.of_points(points, vocabulary)


def agent_of(index=0, net=None, **options):
    torch.manual_seed(index)
    options = {"batch_size": 4, "lr": 1e-2, "tau": 0.8, **options}
    return ILQL(data(), {**NET, **(net or {})}, index=index, **options)


def population_of(num=3, **options):
    agents = [agent_of(i, **options) for i in range(num)]
    for agent, fitness in zip(agents, (1.0, 3.0, 2.0, 0.0), strict=False):
        agent.learn()
        agent.fitness = [fitness]
    return agents


def mutations(kind, seed=0, **options):
    probabilities = dict.fromkeys(KINDS, 0.0) | {kind: 1.0}
    if kind == "rl_hp":
        options = {"hyper_ranges": RANGES, **options}
    options = {"new_layer_prob": 0.5, "nodes": (4, 8), "rand_seed": seed, **options}
    return Mutations(**probabilities, **options)


def all_of(agent):
    """Everything that learning depends on."""
    tensors = {name: p.detach().clone() for name, p in agent.named_parameters()}
    if agent.opt is not None:
        leaves = agent.opt.items(True, True)
        tensors |= {".".join(key): leaf.clone() for key, leaf in leaves}
    return tensors, agent.config, agent.batch_size, agent.step


def same(first, second):
    if first[1:] != second[1:] or first[0].keys() != second[0].keys():
        return False
    return all(torch.equal(first[0][name], second[0][name]) for name in first[0])


def outputs_of(agent):
    tokens = torch.tensor([[1, 5, 6, 2, 7], [1, 6, 6, 2, 8]])
    state, action = torch.tensor([[1, 2, 3]] * 2), torch.tensor([[1, 2]] * 2)
    with torch.no_grad():
        out = agent.eval()(tokens, state, action)
    agent.train()
    return [out.logits, out.v, *out.q, *out.target_q]


def evolved(seed=0):
    population = [agent_of(i) for i in range(3)]
    tournament = TournamentSelection(2, True, 3, eval_loop=2, rand_seed=seed)
    options = {"mutate_elite": False, "rand_seed": seed, "hyper_ranges": RANGES}
    changes, records = Mutations(0.2, 0.3, 0.5, 0.3, 0, 0.4, **options), []
    for _ in range(3):
        for agent in population:
            for _ in range(3):
                assert agent.learn()["loss"].isfinite()
            agent.test(Letters, TOKENIZER, num_games=2, decode=SHORT)
        before = {agent.index: all_of(agent) for agent in population}
        elite, population = tournament.select(population)
        population = changes.mutation(population)
        assert same(all_of(elite), before[elite.index])
        assert same(all_of(population[0]), before[elite.index])
        assert population[0].index == elite.index and population[0] is not elite
        records.append([(a.index, a.mutation, a.fitness, a.lr, a.batch_size) for a in population])
    for agent in population:
        agent.learn()
    return population, records, tournament.lineage


@pytest.mark.slow
def test_a_seed_repeats_three_generations():
    first, records, lineage = evolved()
    again, records_again, lineage_again = evolved()
    assert records == records_again and lineage == lineage_again
    assert all(same(all_of(one), all_of(other)) for one, other in zip(first, again, strict=True))
    assert len({(row[1] or "none").partition(":")[0] for rows in records for row in rows}) > 2
    for index in lineage:  # each descends from one of the first population
        while index in lineage:
            assert lineage[index] < index
            index = lineage[index]
        assert index in range(3)
    assert len(lineage) == 6
    assert all(agent.step == 10 and len(agent.fitness) == 3 for agent in first)


class Light:
    def __init__(self, index, fitness):
        self.index, self.fitness = index, fitness

    def clone(self, index=None):
        return Light(self.index if index is None else index, list(self.fitness))


def test_draws_depend_only_on_the_seed_and_the_number_of_the_call():
    population = [Light(i, [float(i)]) for i in range(4)]
    before = torch.random.get_rng_state()

    def lineage_of(number=0, **seed):
        tournament = TournamentSelection(2, False, 40, **seed)
        tournament.number = number
        tournament.select(population)
        return tournament, list(tournament.lineage.values())

    first, lineage = lineage_of(rand_seed=5)
    first.lineage = {}
    first.select(population)
    lineages = [lineage, list(first.lineage.values())]
    assert lineages == [lineage_of(number, rand_seed=5)[1] for number in range(2)]
    assert lineages[0] != lineages[1]
    drawn, lineage = lineage_of()
    assert lineage_of(rand_seed=drawn.rand_seed)[1] == lineage
    assert TournamentSelection(2, False, 40).rand_seed != drawn.rand_seed
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "net"),
    [
        pytest.param("no_mutation", {}, marks=pytest.mark.slow),
        ("architecture", SEPARATE),
        ("parameters", {}),
        pytest.param("rl_hp", SEPARATE, marks=pytest.mark.slow),
    ],
)
def test_ilql_agents_are_selected_mutated_and_cloned(kind, net, tmp_path):
    """In AgileRL both raise; a clone has no optimiser state, and fails after a mutation."""
    _, population = TournamentSelection(2, True, 3, rand_seed=0).select(population_of(net=net))
    for number in range(2):
        population = mutations(kind, seed=number).mutation(population)
        for agent in population:
            clone = agent.clone(index=50)
            assert same(all_of(clone), all_of(agent)) and clone.opt is not None
            assert (clone.index, clone.mutation) == (50, agent.mutation)
            assert clone.fitness == agent.fitness and clone.fitness is not agent.fitness
            before = all_of(agent)
            clone.learn()
            assert same(all_of(agent), before)  # independent
            agent.learn()
            assert same(all_of(clone), all_of(agent))
    agent.save_checkpoint(tmp_path)
    again = ILQL.from_checkpoint(tmp_path, data())
    again.learn(), agent.learn()
    assert same(all_of(again), all_of(agent)) and again.mutation == agent.mutation


@pytest.mark.parametrize(
    ("net", "prob"),
    [({}, 1.0), (SEPARATE, 0.0), ({"positions": "rotary", "bias": False}, 1.0)]
    + [({"positions": "rotary", "bias": False}, 0.0), ({"dropout": 0.3}, 1.0)],
)
def test_growing_a_network_keeps_the_outputs_of_an_agent(net, prob):
    """In AgileRL the output layer is no longer tied to the embeddings, and the logits jump."""
    name, old_size = ("n_layer", 2) if prob else ("dim_feedfwd", 32)
    for seed in range(4):
        agent = agent_of(net=net)
        agent.learn()
        before, old = outputs_of(agent), copy.deepcopy(agent)
        mutations("architecture", seed, new_layer_prob=prob).mutation([agent])
        if agent.net_config[name] < old_size:
            continue
        assert agent.net_config[name] > old_size
        for mine, was in zip(outputs_of(agent), before, strict=True):
            torch.testing.assert_close(mine, was, rtol=0, atol=0.0 if prob else 1e-6)
        check_moments(agent.opt, old.opt)
        check_grown(agent)
        return
    raise AssertionError("nothing grew")


def check_moments(opt, old):
    """Moments of old weights are kept, those of new weights are 0."""
    for key, now in opt.items(True, True):
        was = old.get(key, None)
        if was is None or was.shape != now.shape:
            total = 0 if was is None else was.abs().sum()
            torch.testing.assert_close(now.abs().sum(), torch.as_tensor(total, dtype=now.dtype))
        else:
            assert torch.equal(now, was)


def check_grown(agent):
    """All new weights learn, and so does the target network."""
    before = all_of(agent)[0]
    for _ in range(3):
        agent.learn()
    after = all_of(agent)[0]
    for name, tensor in agent.model.named_parameters():
        assert not torch.equal(before[f"model.{name}"], after[f"model.{name}"]), name
        if name.endswith("fc.weight"):
            assert bool((tensor != before[f"model.{name}"]).any(1).all())
    tied = agent.model.trunk
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(tied.logits(hidden), hidden @ tied.wte.weight.T)
    assert not any("lm_head" in name for name in after)


def test_removal_stops_at_the_last_layer_and_node_and_within_bounds():
    """In AgileRL a network without nodes is reached."""
    draw = torch.Generator().manual_seed(0)
    agent = agent_of(net={"n_layer": 3, "min_layers": 2, "max_layers": 4, "dim_feedfwd": 6})
    layers, nodes = set(), set()
    for _ in range(30):
        agent.reshape(1.0, (5,), draw)
        agent.reshape(0.0, (5,), draw)
        layers.add(agent.net_config["n_layer"]), nodes.add(agent.net_config["dim_feedfwd"])
    assert layers == {2, 3, 4} and min(nodes) == 1
    assert agent.learn()["loss"].isfinite()
    fixed = agent_of(net={"min_layers": 2, "max_layers": 2})
    before = all_of(fixed)
    assert fixed.reshape(1.0, (5,), draw) == "2 -> 2 layers" and same(all_of(fixed), before)


def test_removing_a_layer_keeps_the_other_layers_and_their_moments():
    draw, agent = torch.Generator().manual_seed(0), agent_of(net={"n_layer": 3, "max_layers": 3})
    agent.learn()

    def layers():
        means = agent.opt["language", "mean", "trunk", "h"]
        blocks = enumerate(agent.model.trunk.h)
        return [(block.fc.weight.clone(), means[str(i), "fc", "weight"]) for i, block in blocks]

    was = layers()
    assert agent.reshape(1.0, (5,), draw) == "3 -> 2 layers"
    found = []
    for weight, mean in layers():
        (layer,) = (j for j in range(3) if torch.equal(was[j][0], weight))
        assert torch.equal(mean, was[layer][1])
        found.append(layer)
    assert found == sorted(found) and [block.layer for block in agent.model.trunk.h] == [0, 1]


def test_mutated_hyper_parameters_are_set_and_integers_stay_integers():
    population = population_of()
    before = [copy.deepcopy(agent) for agent in population]
    for seed in range(6):
        mutations("rl_hp", seed).mutation(population)
        for agent, old in zip(population, before, strict=True):
            changed = [name for name in RANGES if getattr(agent, name) != getattr(old, name)]
            assert agent.mutation.startswith("hyper: ") and len(changed) <= seed + 1
            assert type(agent.batch_size) is int and 2 <= agent.batch_size <= 8
            tensors, old_tensors = all_of(agent)[0], all_of(old)[0]
            assert all(torch.equal(tensors[name], old_tensors[name]) for name in tensors)
    assert len({agent.lr for agent in population}) > 1
    assert population[0].learn()["loss"].isfinite()


@pytest.mark.parametrize("kind", ["architecture", "parameters", "rl_hp"])
def test_torchs_global_generator_is_untouched_and_a_drawn_seed_can_be_repeated(kind):
    first, second = agent_of(), agent_of()
    before = torch.random.get_rng_state()
    drawn = mutations(kind, None)
    drawn.mutation([first])
    mutations(kind, drawn.rand_seed).mutation([second])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same(all_of(first), all_of(second)) and first.mutation == second.mutation


def test_sparing_the_elite_does_not_change_the_other_members():
    changed = [mutations("rl_hp", mutate_elite=elite).mutation(population_of()) for elite in (0, 1)]
    assert changed[0][0].mutation is None and changed[1][0].mutation is not None
    for spared, other in zip(changed[0][1:], changed[1][1:], strict=True):
        assert same(all_of(spared), all_of(other)) and spared.mutation == other.mutation


class Fitting:
    """A minimal agent, with a network whose form changes by masks."""

    hyper_names = ("rate",)

    def __init__(self, index=0):
        torch.manual_seed(index)
        self.index, self.fitness, self.mutation, self.rate = index, [float(index)], None, 0.1
        self.net = EvolvableMLP(3, 2, width=4, num_layers=1, num_nodes=4, max_nodes=16)
        self.opt = adamw().init(by_name(self.net.named_parameters()))

    def clone(self, index=None):
        new = copy.deepcopy(self)
        new.index = self.index if index is None else index
        return new

    def learner_state(self):
        params, buffers = map(by_name, (self.net.named_parameters(), self.net.named_buffers()))
        return TensorDict(params=params, buffers=buffers, opt=self.opt, hyper=TensorDict())

    def load_learner_state(self, state):
        named = state["params"].copy().update(state["buffers"]).flatten_keys(".")
        self.net.load_state_dict(dict(named.items()))
        self.opt = state["opt"]


def with_lora():
    population = population_of(2)
    add_lora(population[1].model.trunk, rank=2)
    return population


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: TournamentSelection(4, True, 3), "=4 is larger than the population of 3"),
        (lambda: TournamentSelection(1, True, 1), "elitism=False, or more members"),
        (lambda: TournamentSelection(1, True, 2, 0), "eval_loop=0 must be at least 1"),
        (lambda: selected((0, [1.0]), (1, [1.0])), "population of 2: pass 2 or fewer"),
        (lambda: selected(*[(0, [1.0])] * 3), "two members have the index 0"),
        (lambda: selected((0, [1.0]), (1, []), (2, [1.0])), "agent 1 was never evaluated"),
        (lambda: selected(), "empty"),
        (lambda: mutations("activation").mutation(population_of(2)), "or set activation=0"),
        (lambda: mutations("architecture").mutation(with_lora()), "1 cannot.*Set architecture=0"),
        (lambda: Mutations(0, 0, 0, 0, 0, 0.2), 'pass hyper_ranges={"lr"'),
        (lambda: Mutations(1, 0, 0, 0, 0, -1), "rl_hp=-1"),
        (lambda: Mutations(0, 0, 0, 0, 0, 0), "all probabilities are 0"),
    ],
)
def test_invalid_calls_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("kind", ["activation", "architecture", "parameters"])
def test_any_agent_with_state_and_load_state_is_mutated(kind):
    population = [Fitting(i) for i in range(3)]
    _, population = TournamentSelection(2, True, 3, rand_seed=0).select(population)
    x, changed = torch.ones(5, 3), []
    before = [(agent.net(x), agent.clone().net) for agent in population]
    mutations(kind, nodes=(3,)).mutation(population)
    for agent, (y, old) in zip(population, before, strict=True):
        assert agent.mutation.startswith(kind)
        if kind == "activation":
            changed.append(agent.net.activation != old.activation)
        elif kind == "parameters":
            both = zip(agent.net.parameters(), old.parameters(), strict=True)
            changed.append(not all(torch.equal(*pair) for pair in both))
        else:
            changed.append(agent.net.num_nodes != old.num_nodes)
            if sum(agent.net.num_nodes) > sum(old.num_nodes):
                torch.testing.assert_close(agent.net(x), y)
    assert any(changed) and (kind == "architecture" or all(changed))


def selected(*agents, size=3, **options):
    tournament = TournamentSelection(3, True, size, rand_seed=0)
    try:
        tournament.select([Light(*agent) for agent in agents])
    finally:
        assert tournament.number == 0 and not tournament.lineage


def test_invalid_ranges_are_refused_before_anything_changes():
    population = population_of()
    before = [all_of(agent) for agent in population]
    for ranges, match in (
        ({"taau": HyperRange(0.5, 0.9)}, "no hyper-parameter 'taau'. Did you mean \"tau\""),
        ({"learning_rate": HyperRange(1e-5, 1e-2)}, "It has: alpha, .* lr"),
        ({"lr": HyperRange(1e-5, 1e-3)}, "lr starts at 0.01, outside of its range"),
        ({"batch_size": HyperRange(5, 8)}, "batch_size starts at 4, outside of its range"),
        ({"clip_weight": HyperRange(1, 8)}, "clip_weight of agent 0 is None"),
        (
            {"alpha": HyperRange(0, 2)},
            r"alpha from 0 to 2 .*: alpha=2 must be in 0\.\.1. Give a nar",
        ),
    ):
        changes = mutations("rl_hp", hyper_ranges={"tau": HyperRange(0.5, 0.9), **ranges})
        with pytest.raises(ValueError, match=match):
            changes.mutation(population)
        assert all(same(all_of(a), b) for a, b in zip(population, before, strict=True))
        assert changes.number == 0
