"""Type checkers on users' programs: no errors for correct ones, and all mistakes of a wrong one."""

import json
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from types import UnionType

import pytest

from raffia import TensorDict

ROOT = Path(__file__).parents[1]
RIGHT = """
import torch
from raffia import TensorClass, TensorDict, tensorclass


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        return self.obs.sum()


class Cast(TensorClass, autocast=True):
    n: int


@tensorclass
class Old:
    x: torch.Tensor


td = TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3])
one: TensorDict = td + 1
one = 2 * td - td / 2
one = -(td**2)
one = td[0].clone().to(torch.float64)
mask: TensorDict = (td == td) & (td > 0) | (1 < td)
td["b", "c"] = td["a"].sum(-1)
step = Step(obs=torch.zeros(3, 4), batch_size=[3], device="cpu")
step = Step(torch.zeros(3, 4), torch.ones(3), batch_size=[3])
first: Step = step[0]
first.obs.sum()
first.total().item()
plain: TensorDict = step.to_tensordict()
finite: bool = td.isfinite().all()
rows: int = td.size(0)
step = step.update(reward=None)
old = Old(x=torch.zeros(2))
old.x.sum()
Cast(n=3, batch_size=[])
one = td.view(3, 1).squeeze(1).update({"d": torch.ones(3)}).exclude("d").abs().add(1).lock_()
one = TensorDict.from_dict({"a": torch.zeros(2)}, auto_batch_size=True).mean(0)
total: torch.Tensor = td.sum(reduce=True)
parts: list[TensorDict] = [*td.unbind(0), *td.split(1), *td]
tall: Step = step.reshape(3, 1).sum(0).new_zeros(2)
for key, value in td.items(True, True):
    value.sum()
with td.lock_().unlock_() as free:
    free["e"] = torch.ones(3)
names: list[str] = sorted(td.keys())
"""
CONTAINER = """
from typing import Any, assert_type
import pathlib
import tempfile

import numpy as np
import torch
from torch import Tensor, nn

import raffia
from raffia import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictParams, lazy_stack

# what is reached through the package, without imports of its parts
replay = raffia.data.ReplayBuffer(storage=raffia.data.TensorStorage(9), batch_size=2)
assert_type(replay.extend(TensorDict(x=torch.zeros(3), batch_size=[3])), torch.Tensor)
assert_type(raffia.recipes.PRESETS["smoke"].seed, int)
assert_type(raffia.functional.derive_seed(0), int)
assert_type(raffia.envs.Discrete(3).n, int)


class Step(TensorClass):
    obs: Tensor


td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}}, batch_size=[3])
step = Step(obs=torch.zeros(3, 4), batch_size=[3])
layer = nn.Linear(2, 2)

# what a container tells of itself
assert_type(td.batch_size, torch.Size)
assert_type(step.batch_size, torch.Size)
assert_type(td.device, torch.device | None)
assert_type(step.device, torch.device | None)
assert_type(td.dtype, torch.dtype | None)
assert_type(td.names, list[str | None])
assert_type(td.depth, int)
assert_type(td.is_locked, bool)
assert_type(td.requires_grad, bool)
assert_type(td.grad, TensorDict | None)
td.names = ["time"]
td.names = None
assert_type(td.popitem()[0], str)
td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}}, batch_size=[3])
assert_type(td.split_keys(["a"]), tuple[TensorDict, ...])
assert_type(td.to_dict(), dict[str, Any])
assert_type(td.any(), bool)
for anything in (td.get("missing", None), td.setdefault("d", torch.zeros(3)), td.max().get("a")):
    assert_type(anything is None, bool)
assert_type(td.map(lambda piece: piece["a"].sum(), num_workers=0, chunksize=0) is None, bool)

# what gives a container
for one in (
    *(td.data, td[0], td.select("a"), td.exclude("a"), td.flatten_keys("."), td.view(torch.int32)),
    *(raffia.stack([td, td]), TensorDict.stack([td, td]), lazy_stack([td, td]).contiguous()),
    *(raffia.pad_sequence([td, td]), raffia.merge_tensordicts(td, td), td.new_zeros(2, 3)),
    *(td.view(3, 1).reshape([3]).expand(2, 3).permute(1, 0), td.max(), td.float(), td.to("cpu")),
    *(td.update({"e": torch.ones(3)}).update(td), td.apply(lambda leaf: leaf + 1)),
    *(td.named_apply(lambda key, leaf: leaf), td.apply_(lambda leaf: leaf.zero_())),
    *(td.where(torch.ones(3, dtype=torch.bool), td), td.consolidate()),
    *(td.max(0).values, td.cummax(0).indices),
):
    assert_type(one, TensorDict)
for other in (
    *(step.data, step[0], step.select("obs"), step.half(), step.apply(lambda leaf: leaf + 1)),
    *(Step.stack([step, step]), raffia.cat([step, step])),
):
    assert_type(other, Step)
assert_type(lazy_stack([td, td]), LazyStackedTensorDict)
assert_type(lazy_stack([td, td]).select("a"), LazyStackedTensorDict)
for either in (raffia.maybe_dense_stack([td, td]), raffia.dense_stack_tds([td, td], 0)):
    assert_type(either, TensorDict | LazyStackedTensorDict)

# modules
params = raffia.from_module(layer, as_module=True)
assert_type(params, TensorDictParams)
for weights in (
    *(raffia.from_module(layer), TensorDict.from_module(layer)),
    *(TensorDict.from_modules(layer, layer), raffia.from_modules(layer, layer)),
):
    assert_type(weights, TensorDict)
with params.to_module(layer) as swap:
    pass
assert_type(params.to_module(layer), TensorDict)

# other structures
assert_type(TensorDict.from_any({"a": 1}), TensorDict)
assert_type(TensorDict.from_pytree([torch.zeros(2)]), TensorDict)
assert_type(td.numpy(), dict[str, Any])
assert_type(td.to_struct_array(), np.ndarray)

# disk
with tempfile.TemporaryDirectory() as folder:
    assert_type(td.save(f"{folder}/td.safetensors"), TensorDict)
    assert_type(raffia.save(step, f"{folder}/step"), Step)
    assert_type(TensorDict.load(f"{folder}/td.safetensors"), TensorDict)
    assert_type(raffia.load(f"{folder}/td.safetensors", device="cpu"), TensorDict)
    assert_type(Step.load(f"{folder}/step"), Step)
    assert_type(Step.load_memmap(f"{folder}/step"), Step)
    assert_type(raffia.memmap(step), Step)
    assert_type(td.memmap(f"{folder}/td", num_threads=2, return_early=True).result(), TensorDict)
    assert_type(td.saved_path, pathlib.Path) if td.is_memmap() else None
"""
MODULES = """
from typing import assert_type

import torch
from torch import Tensor, distributions, nn

from raffia import TensorClass, TensorDict, TensorDictParams
import raffia.data as data
import raffia.nn as keyed
from raffia.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorage
from raffia.functional import clip_by_global_norm, value_and_grad
from raffia.nn import TensorDictModule, TensorDictSequential


class Step(TensorClass):
    obs: Tensor


# keyed modules
td = TensorDict(obs=torch.zeros(3, 4), batch_size=[3])
actor = TensorDictModule(nn.Linear(4, 2), in_keys=["obs"], out_keys=["loc"])
assert_type(actor.select_out_keys("loc"), TensorDictModule)
scale = TensorDictModule(torch.ones_like, in_keys=["loc"], out_keys=["scale"])
draw = keyed.ProbabilisticTensorDictModule(
    in_keys=["loc", "scale"], out_keys=["action"], distribution_class=distributions.Normal
)
policy = keyed.ProbabilisticTensorDictSequential(actor, scale, draw)
assert_type(policy.get_dist(td), distributions.Distribution)
assert_type(policy[:2], TensorDictSequential)
both = TensorDictSequential(actor, scale)
assert_type(both.select_subsequence(), TensorDictSequential)
ensemble = keyed.EnsembleModule(actor, num_copies=2)
assert_type(ensemble.params_td, TensorDictParams)
dist = keyed.CompositeDistribution(
    TensorDict(x=TensorDict(loc=torch.zeros(3), scale=torch.ones(3)), batch_size=[3]),
    {"x": distributions.Normal},
)
for given in (
    *(actor(td), policy(td), policy.get_dist_params(td), both(td), ensemble(td)),
    *(dist.sample(), dist.cdf(dist.sample()), dist.mean),
):
    assert_type(given, TensorDict)



class Add(keyed.TensorDictModuleBase):
    in_keys = ["obs"]
    out_keys = [("next", "obs")]

    @keyed.dispatch
    def forward(self, tensordict: TensorDict) -> TensorDict:
        return tensordict.set(("next", "obs"), tensordict["obs"] + 1)


class Scaled(keyed.TensorDictModuleBase):
    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["obs"], ["scaled"]

    @keyed.dispatch(separator="-", auto_batch_size=False)
    def forward(self, tensordict: TensorDict) -> TensorDict:
        return tensordict.set("scaled", tensordict["obs"] * 2)


assert_type(Add()(td), TensorDict)
assert_type(len(Scaled().in_keys + Add().out_keys), int)
Add()(obs=Scaled()(torch.ones(2))).sum()

# gradients
params = TensorDict(weight=torch.tensor(2.0))


def loss(params: TensorDict, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    error = params["weight"] * x - 1
    return error.square().sum(), {"error": error}


grads, (value, metrics) = value_and_grad(loss, params, torch.ones(3))
assert_type(grads, TensorDict)
assert_type(metrics, dict[str, Tensor])
assert_type(clip_by_global_norm(grads, 1.0)[0], TensorDict)

# replay
steps = TensorDict(obs=torch.zeros(6, 4), batch_size=[6])
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
assert_type(buffer.extend(steps), Tensor)
assert_type(buffer.add(steps[0]), int)
assert_type(buffer.sample(), TensorDict)
assert_type(buffer.sample(2, return_info=True)[0], TensorDict)
for batch in buffer:
    assert_type(batch, TensorDict)
    break
prioritized = data.PrioritizedReplayBuffer(0.6, 0.4, storage=TensorStorage(100), batch_size=4)
assert_type(prioritized.extend(steps), Tensor)
assert_type(prioritized.sample(), TensorDict)
assert_type(prioritized.update_priority(torch.tensor([0]), 2.0), int)
plain: data.ReplayBuffer[Step] = data.ReplayBuffer(storage=TensorStorage(9), batch_size=2)
plain.extend(Step(obs=torch.zeros(3, 2), batch_size=[3]))
assert_type(plain.sample(), Step)
no = torch.zeros(9, dtype=torch.bool)
segments = data.SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
segments.extend(
    TensorDict(observation=torch.arange(9), terminated=no, truncated=no, batch_size=[9])
)
assert_type(segments.sample(4), TensorDict)

# by content
xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
assert_type(data.QueryModule(in_keys=["x"])(xs), TensorDict)
known = data.TensorDictMap(in_keys=["x"])
known[xs] = TensorDict(y=torch.tensor([1, 2]), batch_size=[2])
assert_type(known[xs], TensorDict)
assert_type(known.get(xs, 0.0), TensorDict)
assert_type(known.contains(xs), Tensor)
assert_type(known(xs), TensorDict)
forest = data.MCTSForest()
step = TensorDict(observation=torch.tensor(0), action=torch.tensor(1))
step["next"] = TensorDict(observation=torch.tensor(2))
assert_type(forest.add(step, return_node=True), data.Tree) if False else forest.add(step)
assert_type(forest.get_tree(TensorDict(observation=torch.tensor(0))), data.Tree)
"""
AGENTS = """
from pathlib import Path
from typing import Any, Literal, assert_type

import torch
from torch import Tensor

from raffia import TensorDict
from raffia.algorithms.efficientzero import EfficientZeroLearner
from raffia.algorithms.ilql import ILQL, ILQL_Policy
from raffia.envs import BatchEnv, Discrete, Env, EnvConfig, EnvSpec, check_env, make_env
from raffia.evolution import Population, with_hyper
from raffia.lm import Language_Environment, WordTokenizer, play_dialogues
from raffia.lm.data.dialogue import Dialogue, DialogueDataset, ObservationDialogues
from raffia.lm.model import Cache
from raffia.recipes import EfficientZeroRun, Evaluation, RunResult, evaluate, load_agent, train
from raffia.recipes.ilql import load_agent as load_ilql
from raffia.search import FunctionModel, KeyedSearch, PolicyOutput, RecurrentOutput, RootOutput
from raffia.search import Tree, gumbel_policy, muzero_policy, search, state_key
from raffia.train import Collector, Episodes, Experiment, play_episodes


# search
def bandit(embedding: Tensor, action: Tensor) -> tuple[RecurrentOutput, Tensor]:
    rows = len(action)
    zeros = torch.zeros(rows)
    return RecurrentOutput(1.0 - action.float(), zeros, torch.zeros(rows, 2)), embedding


def look(observation: Tensor) -> RootOutput:
    rows = len(observation)
    return RootOutput(torch.zeros(rows, 2), torch.zeros(rows), observation)


def plan_of(root: RootOutput, recurrent_fn: Any, **draws: Any) -> PolicyOutput:
    return gumbel_policy(root, recurrent_fn, num_simulations=4, **draws)


root = look(torch.zeros(3, 1))
assert_type(search(root, bandit, num_simulations=4), Tree)
plan = muzero_policy(root, bandit, 4)
assert_type(plan, PolicyOutput)
assert_type(plan.action, Tensor)
keyed = KeyedSearch(FunctionModel(look, bandit), plan_of)
assert_type(keyed(TensorDict(observation=torch.zeros(3, 1), batch_size=[3])), TensorDict)

# environments
env = make_env(EnvConfig(id="probe/value", num_envs=2))
assert_type(env, BatchEnv)
state = env.reset(torch.tensor([0, 1]))
assert_type(state, TensorDict)
assert_type(env.step(torch.tensor([0, 0])), TensorDict)


def first(state: TensorDict) -> TensorDict:
    action = torch.zeros(len(state), dtype=torch.int64)
    return TensorDict(action=action, batch_size=[len(state)])


played = play_episodes(env, first, num_episodes=2, seed=0)
assert_type(played, Episodes)
assert_type(played.returns, list[float])
assert_type(
    play_episodes(env, first, num_episodes=2, seed=0, stop=lambda: True), Episodes | None
)


class Still(Env):  # the contract has a `render` without a picture, and a `close`
    spec = EnvSpec(observation_shape=(1,), action=Discrete(2))

    def reset(self, seed: int) -> TensorDict:
        return TensorDict(observation=torch.zeros(1))

    def step(self, action: Tensor) -> TensorDict:
        ended = {"terminated": torch.tensor(True), "truncated": torch.tensor(False)}
        return self.reset(0).update({"reward": torch.tensor(1.0), **ended})


assert_type(Still().render(), Tensor | None)
assert_type(check_env(Still()).ok, bool)




# dialogues
class Desk(Language_Environment):
    asked = ""

    def reset(self, seed: int) -> Dialogue:
        self.asked = ("red", "blue")[seed % 2]
        return Dialogue([(self.asked, None)], terminal=False)

    def step(self, action: str) -> tuple[Dialogue, float, bool]:
        reward, self.asked = float(action == self.asked), ""
        return Dialogue([("say red or blue", None), (action, reward)]), reward, True

    def is_terminal(self) -> bool:
        return not self.asked


class Clerk:
    def act(self, asked: Dialogue) -> str:  # an argument of any name
        return asked.sequence[-1][0]


games = play_dialogues(Desk, Clerk(), range(2))
words = WordTokenizer.from_texts(["red", "blue", "say", "or"])
assert_type(words.eoa_token_id, int)
DialogueDataset.build(ObservationDialogues([game.observation for game in games]), words)


# an experiment may say more exactly what it has
class Playing(Experiment):
    learner: EfficientZeroLearner
    env: BatchEnv
    collector: Collector

    def step(self, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        assert_type(self.env.num_envs + self.collector.num_env_steps, int)
        return self.learn(state, self.collector.collect(first, 1))


# what takes a run, or a network, is checked and not called
def agents(agent: ILQL, learner: EfficientZeroLearner, batch: TensorDict, cache: Cache) -> None:
    assert_type(agent.learn(), TensorDict)
    assert_type(agent.get_loss([]), tuple[Tensor, TensorDict])
    assert_type(agent.get_qvs([]), TensorDict)
    assert_type(agent.clone(), ILQL)
    assert_type(agent.lr, float)
    assert_type(agent.double_q, bool)
    assert_type(agent.max_grad_norm, float | None)
    assert_type(agent.decay, Literal["constant", "linear", "cosine"])
    agent.lr = 1e-4
    state = learner.init(0)
    assert_type(state, TensorDict)
    update, metrics = learner.grads(state, batch)
    assert_type(update, TensorDict)
    assert_type(learner.apply(state, update), TensorDict)
    population = Population(learner, 4)
    assert_type(population.init(0), TensorDict)
    assert_type(with_hyper(state, {"learning_rate": torch.tensor(0.1)}), TensorDict)
    assert_type(cache.select(torch.tensor([0])), Cache)


def runs(folder: Path, config: EfficientZeroRun) -> None:
    assert_type(train(config, folder), RunResult)
    agent = load_agent(folder, algorithm="efficientzero", device="cpu")
    assert_type(agent.act(TensorDict()), TensorDict)
    assert_type(agent.plan(TensorDict()), PolicyOutput)
    assert_type(load_agent(folder, algorithm="ilql"), ILQL_Policy)
    assert_type(evaluate(folder, algorithm="efficientzero", episodes=3), Evaluation)
    assert_type(load_ilql(folder), ILQL_Policy)
"""
WRONG = """
import torch
import raffia
from raffia import TensorClass, TensorDict


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor | None = None


Step(reward=torch.zeros(3))
Step(obs=torch.zeros(3), rewards=1)
Step(obs="a")
Step(obs=torch.zeros(3)).obs.no_such_method()
Step(obs=torch.zeros(3), batch_size="a")
td = TensorDict(a=torch.zeros(3), batch_size=[3])
raffia.TensorDit
raffia.data.ReplyBuffer
from raffia import TensorDit
td.absolute()
td.view(1, shape=3)
td.view("a")
td.update(3)
number: int = td.reshape(3)
mean: torch.Tensor = td.mean(0)
row: Step = td[0]
"""


RIGHT_ONES = {"right": RIGHT, "container": CONTAINER, "modules": MODULES, "agents": AGENTS}


def _written(folder: Path, **more: str) -> list[str]:
    """The names of the programs, written to files."""
    programs = {**RIGHT_ONES, "wrong": WRONG, **more}
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    return [f"{name}.py" for name in programs]


MEMBERS = [name for name in dir(TensorDict) if name[0] != "_"]
REVEAL = ["from raffia import TensorDict", "def ask(td: TensorDict) -> None:"]
REVEAL += [f"    reveal_type(td.{name})" for name in MEMBERS]


@pytest.fixture(scope="module")
def mypy_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of mypy for all programs, in one run, as each run reads the whole package."""
    folder = tmp_path_factory.mktemp("programs")
    names = _written(folder, asked="\n".join(REVEAL)) + [str(ROOT / "examples/own_environment.py")]
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--no-error-summary"]
    command += ["--cache-dir", str(folder / "cache"), *names]
    env = {"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT / "src"), "HOME": str(folder)}
    options: dict[str, typing.Any] = dict(capture_output=True, text=True, timeout=500)
    done = subprocess.run(command, cwd=folder, env=env, **options)
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_mypy_passes_a_correct_program_and_finds_mistakes(mypy_lines):
    assert [line for line in mypy_lines if not line.startswith(("wrong.py", "asked.py"))] == []
    codes = " ".join([line.rpartition("[")[2][:-1] for line in mypy_lines if ": error: " in line])
    assert codes == (
        "call-arg call-arg arg-type attr-defined arg-type attr-defined attr-defined attr-defined "
        "attr-defined call-arg arg-type arg-type assignment assignment assignment"
    )


# Members without a precise type: they return any entry, or a lazy stack, whose class builds on
# TensorDict.
OPEN = "get get_at get_non_tensor lazy_stack maybe_dense_stack pop setdefault to_lazystack"
OPEN += " to_pytree tolist"


@pytest.mark.slow
def test_all_other_members_of_a_container_have_a_type(mypy_lines):
    kinds = re.findall(r'note: Revealed type is "(.*)"', "\n".join(mypy_lines))
    results = [re.findall(r"-> (.+?)(?=, def |\)$|$)", kind) or [kind] for kind in kinds]
    unknown = [n for n, found in zip(MEMBERS, results, strict=True) if {*found} == {"Any"}]
    assert unknown == OPEN.split()


@pytest.mark.slow
def test_pyright_passes_a_correct_program_and_finds_mistakes(tmp_path):
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("basedpyright, of the extra dev, is not installed")
    _written(tmp_path)
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [checker, "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {Path(error["file"]).name for error in found} == {"wrong.py"}
    assert " ".join([error.get("rule", "").removeprefix("report") for error in found]) == (
        "CallIssue CallIssue ArgumentType AttributeAccessIssue ArgumentType AttributeAccessIssue "
        "AttributeAccessIssue AttributeAccessIssue AttributeAccessIssue "
        "CallIssue ArgumentType ArgumentType AssignmentType AssignmentType AssignmentType"
    )


def _is_of(value: object, kind: typing.Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_is_of(value, each) for each in typing.get_args(kind))
    return kind is typing.Any or isinstance(value, typing.get_origin(kind) or kind)


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_a_right_program_runs_and_its_types_are_true(name, monkeypatch):
    def check(value, kind):
        assert _is_of(value, kind), f"{type(value).__name__} is no {kind}"

    monkeypatch.setattr(typing, "assert_type", check)
    exec(RIGHT_ONES[name], {"__name__": name})
