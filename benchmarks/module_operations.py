"""The operations that `benchmarks.modules` times, as one table.

The floor of each is the same work on plain tensors, with torch.nn, torch.func and
torch.distributions.
"""

import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call, stack_module_state

from benchmarks.operation import BATCH, PEER, Aim, Entries, Operation, container, rand, whole
from benchmarks.timing import Call

UNITS = 8
HIDDEN = 16  # of the MLPs
NAMES = ["x", "h1", "h2", "h3", "h4", "out"]  # of the entries from layer to layer of a sequence
TAU = 0.005  # of the target copy
BACKEND = "inductor" if shutil.which("g++") else "aot_eager"  # inductor needs a C++ compiler

SETTING = (
    f"; batch {BATCH}, Linear layers of {UNITS} units, MLPs of 3 Linear layers "
    f"({UNITS}-{HIDDEN}-{HIDDEN}-{UNITS}) with Tanh, by default; compiled with {BACKEND}, "
    "sizes as units x batch"
)

CALL = Aim(0.55)
TO_MODULE = Aim(0.35)
FROM_MODULES = Aim(0.4)
BY_HAND = Aim(1.0, of="floor")
COMPILED = Aim(1.05, of="floor")

Key = str | tuple[str, ...]
Wrap = Callable[[Call], Call]

# ------------------------------------------------------------------------------ the same data


def seeded(module: nn.Module, seed: int = 0) -> Any:
    fill(list(module.parameters()), seed)
    return module


def fill(parameters: Sequence[Tensor], seed: int) -> None:
    for i, parameter in enumerate(parameters):
        parameter.data.copy_((rand(*parameter.shape, seed=seed + i) - 0.5) / parameter.shape[-1])


def linear(seed: int = 0, units: int = UNITS) -> nn.Linear:
    return seeded(nn.Linear(units, units), seed)


def linears(units: int = UNITS) -> list[nn.Linear]:
    return [linear(10 * i, units) for i in range(len(NAMES) - 1)]


def mlp(seed: int = 0) -> nn.Module:
    layers = [
        nn.Linear(UNITS, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, UNITS),
    ]  # fmt: skip
    return seeded(nn.Sequential(*layers), seed)


def mlps(num_members: int) -> list[nn.Module]:
    return [mlp(10 * i) for i in range(num_members)]


def x(units: int = UNITS, batch: int = BATCH) -> Tensor:
    return rand(batch, units, seed=7)


class LocAndScale(nn.Module):
    """A linear layer whose outputs are the location and the scale of a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(UNITS, 2 * UNITS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self.linear(x).chunk(2, -1)
        return loc, scale.exp()


# ------------------------------------------------------------------------ modules of a package


def nn_of(package: ModuleType) -> Any:
    return import_module(f"{package.__name__}.nn")


def keyed(package: ModuleType, module: nn.Module, source: Key = "x", dest: Key = "out") -> Any:
    return nn_of(package).TensorDictModule(module, [source], [dest])


def sequence(package: ModuleType, at: tuple[str, ...] = (), units: int = UNITS) -> Any:
    """Layer by layer from `x` to `out`; the keys stand below `at`."""
    keys = [(*at, name) if at else name for name in NAMES]
    steps = zip(linears(units), keys[:-1], keys[1:], strict=True)
    return nn_of(package).TensorDictSequential(*[keyed(package, *step) for step in steps])


def normal(package: ModuleType, **kwargs: Any) -> Any:
    return nn_of(package).ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["out"],
        distribution_class=Normal,
        default_interaction_type=nn_of(package).InteractionType.RANDOM,
        **kwargs,
    )


def policy(package: ModuleType) -> Any:
    net = nn_of(package).TensorDictModule(seeded(LocAndScale()), ["x"], ["loc", "scale"])
    return nn_of(package).ProbabilisticTensorDictSequential(
        net, normal(package, return_log_prob=True)
    )


def entry(key: Key) -> Callable[[Any], Tensor]:
    """Reads a keyed result where the floor's is one tensor."""
    return lambda result: result if isinstance(result, Tensor) else result[key]


def entries(*names: str) -> Callable[[Any], Entries]:
    return lambda result: {name: result[name] for name in names}


# ------------------------------------------------------------------------------------ calls


def call_of(build: Callable[[ModuleType], Any], data: Callable[[], Entries]) -> Callable:
    """`make` of an operation that calls one keyed module on one container."""

    def make(package: ModuleType) -> Call:
        module, td = build(package), container(package, data())
        return lambda: module(td)

    return make


def flat() -> Entries:
    return {"x": x()}


def nested() -> Entries:
    return {"s": {"x": x()}}


def loc_and_scale() -> Entries:
    return {"loc": rand(BATCH, UNITS, seed=1), "scale": rand(BATCH, UNITS, seed=2) + 0.1}


def call_module(package: ModuleType) -> Call:
    module, td = keyed(package, linear()), container(package, flat())
    return lambda: module(td)


def module_floor() -> Call:
    module, inputs = linear(), x()
    return lambda: module(inputs)


def as_it_is(call: Call) -> Call:
    return call


def without_grad(call: Call) -> Call:
    def wrapped() -> Any:
        with torch.no_grad():
            return call()

    return wrapped


def dispatch(package: ModuleType) -> Call:
    module, inputs = keyed(package, linear()), x()
    return lambda: module(x=inputs)


def sequence_floor() -> Call:
    module, inputs = nn.Sequential(*linears()), x()
    return lambda: module(inputs)


def subsequence(package: ModuleType) -> Call:
    module = sequence(package)
    return lambda: module.select_subsequence(out_keys=["h3"]).in_keys


def subsequence_floor() -> Call:
    module = nn.Sequential(*linears())

    def call() -> list[str]:
        module[:3]
        return ["x"]

    return call


# --------------------------------------------------------------------- probabilistic modules


def sample_floor() -> Call:
    tree = loc_and_scale()
    return lambda: Normal(tree["loc"], tree["scale"]).rsample()


def policy_floor() -> Call:
    net, inputs = seeded(LocAndScale()), x()

    def call() -> Entries:
        dist = Normal(*net(inputs))
        sample = dist.rsample()
        return {"out": sample, "out_log_prob": dist.log_prob(sample)}

    return call


def get_dist(package: ModuleType) -> Call:
    module, td = normal(package), container(package, loc_and_scale())
    return lambda: module.get_dist(td).scale


def get_dist_floor() -> Call:
    tree = loc_and_scale()
    return lambda: Normal(tree["loc"], tree["scale"]).scale


def log_prob(package: ModuleType) -> Call:
    module, td = normal(package), container(package, loc_and_scale() | {"out": x()})
    return lambda: module.log_prob(td)


def log_prob_floor() -> Call:
    tree, sample = loc_and_scale(), x()
    return lambda: Normal(tree["loc"], tree["scale"]).log_prob(sample)


def policy_log_prob(package: ModuleType) -> Call:
    module, td = policy(package), container(package, {"x": x(), "out": x()})
    return lambda: module.log_prob(td)


def policy_log_prob_floor() -> Call:
    net, inputs = seeded(LocAndScale()), x()
    return lambda: Normal(*net(inputs)).log_prob(inputs)


# ------------------------------------------------------------- modules with other parameters


def to_module(build: Callable[[int], nn.Module]) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        model, td = keyed(package, build(0)), container(package, flat())
        params = package.TensorDict.from_module(keyed(package, build(20)))

        def call() -> Any:
            with params.to_module(model):
                return model(td)

        return call

    return make


def to_module_floor(build: Callable[[int], nn.Module]) -> Callable[[], Call]:
    def make() -> Call:
        module, inputs, params = build(0), x(), dict(build(20).named_parameters())
        return lambda: functional_call(module, params, (inputs,))

    return make


def from_modules(package: ModuleType) -> Call:
    modules = mlps(8)
    return lambda: package.TensorDict.from_modules(*modules)


def from_modules_floor() -> Call:
    modules = mlps(8)
    return lambda: stack_module_state(modules)[0]


def vmap_tensors(num_members: int) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        module, inputs = mlp(), x()
        params = package.TensorDict.from_modules(*mlps(num_members))

        def apply(params: Any, inputs: Tensor) -> Tensor:
            with params.to_module(module):
                return module(inputs)

        return lambda: torch.vmap(apply, (0, None))(params, inputs)

    return make


def vmap_keyed(num_members: int) -> Callable[[ModuleType], Call]:
    def make(package: ModuleType) -> Call:
        nn_module = nn_of(package).TensorDictModule
        model = nn_module(mlp(), ["x"], ["out"], inplace=False)
        td = container(package, flat())
        params = package.TensorDict.from_modules(
            *[keyed(package, member) for member in mlps(num_members)]
        )

        def apply(params: Any, td: Any) -> Any:
            with params.to_module(model):
                return model(td)

        return lambda: torch.vmap(apply, (0, None))(params, td)

    return make


def vmap_floor(num_members: int) -> Callable[[], Call]:
    def make() -> Call:
        module, inputs = mlp(), x()
        params, _ = stack_module_state(mlps(num_members))

        def apply(params: Entries, inputs: Tensor) -> Tensor:
            return functional_call(module, params, (inputs,))

        return lambda: torch.vmap(apply, (0, None))(params, inputs)

    return make


def ensemble(package: ModuleType) -> Call:
    model = nn_of(package).EnsembleModule(keyed(package, mlp()), 8)
    stacked, _ = stack_module_state(mlps(8))
    for name, values in stacked.items():
        model.params_td["module", *name.split(".")].data.copy_(values)
    td = container(package, flat())
    return lambda: model(td)


def functional(package: ModuleType) -> Call:
    model, other, inputs = mlp(), mlp(20), x()
    params = package.TensorDict.from_module(other)
    if package.__name__ != PEER:  # the peer's make_functional is gone
        nn_of(package).make_functional(model)
        return lambda: model(inputs, params)

    def call() -> Tensor:
        with params.to_module(model):
            return model(inputs)

    return call


def target_copy(package: ModuleType) -> Call:
    if package.__name__ == PEER:  # it has no function for this
        return lerp(package)
    target, online = (package.TensorDict.from_module(mlp(seed)).data for seed in (0, 20))
    update_target = import_module(f"{package.__name__}.nn.params").update_target
    return lambda: update_target(target, online, TAU)


def lerp(package: ModuleType) -> Call:
    target, online = (package.TensorDict.from_module(mlp(seed)).data for seed in (0, 20))
    return lambda: target.lerp_(online, TAU)


def target_copy_floor() -> Call:
    target, online = (
        {name: p.data for name, p in mlp(seed).named_parameters()} for seed in (0, 20)
    )
    targets, onlines = list(target.values()), list(online.values())

    def call() -> Entries:
        torch._foreach_lerp_(targets, onlines, TAU)
        return target

    return call


# --------------------------------------------------------------------------------- compiled


def compiled(units: int, batch: int, wrap: Wrap = as_it_is) -> Callable[[ModuleType], Call]:
    """A function that calls the sequence on a container."""

    def make(package: ModuleType) -> Call:
        module = sequence(package, units=units)
        td = container(package, {"x": x(units, batch)}, batch)
        step = torch.compile(lambda td: module(td), fullgraph=True, backend=BACKEND)
        return wrap(lambda: step(td))

    return make


def after_another_compile(make: Callable[..., Call]) -> Callable[..., Call]:
    def prepare(*package: ModuleType) -> Call:
        torch.compile(torch.neg)(torch.rand(3))  # imports, and what any first compile sets up
        return make(*package)

    return prepare


def compiled_module(package: ModuleType) -> Call:
    module, td = sequence(package), container(package, flat())
    step = torch.compile(module, fullgraph=True, backend=BACKEND)
    return lambda: step(td)


def compiled_on_tensors(units: int, batch: int, wrap: Wrap = as_it_is) -> Callable[[], Call]:
    """The same layers on tensors; gives what each layer gave, as the sequence does."""

    def make() -> Call:
        layers, inputs = linears(units), x(units, batch)

        def plain(last: Tensor) -> list[Tensor]:
            return [last := layer(last) for layer in layers]

        step = torch.compile(plain, fullgraph=True, backend=BACKEND)
        return wrap(lambda: step(inputs)[-1])

    return make


def compiled_on_dicts(units: int, batch: int, wrap: Wrap = as_it_is) -> Callable[[], Call]:
    def make() -> Call:
        steps = list(zip(linears(units), NAMES[:-1], NAMES[1:], strict=True))
        tree = {"x": x(units, batch)}

        def plain(tree: Entries) -> Entries:
            tree = dict(tree)
            for layer, source, dest in steps:
                tree[dest] = layer(tree[source])
            return tree

        step = torch.compile(plain, fullgraph=True, backend=BACKEND)
        return wrap(lambda: step(tree))

    return make


def compiled_calls(units: int, batch: int, wrap: Wrap = as_it_is) -> list[Operation]:
    """The compiled sequence at one size, against a floor on tensors and one on dicts."""
    size, make = (units, batch, wrap), compiled(units, batch, wrap)
    name, read = f"compiled sequence, {units} x {batch}", entry("out")
    return [
        Operation(name, make, compiled_on_tensors(*size), COMPILED, True, read=read),
        Operation(f"{name}, floor on dicts", make, compiled_on_dicts(*size), alone=True, read=read),
    ]


OPERATIONS = (
    Operation(
        "module(td)",
        call_module,
        module_floor,
        CALL,
        read=entry("out"),
    ),
    Operation(
        "module(td), nested keys",
        call_of(lambda package: keyed(package, linear(), ("s", "x"), ("s", "out")), nested),
        module_floor,
        read=entry(("s", "out")),
    ),
    Operation(
        "module(td), no_grad",
        lambda package: without_grad(call_module(package)),
        lambda: without_grad(module_floor()),
        read=entry("out"),
    ),
    Operation("module(x=tensor), dispatched", dispatch, module_floor),
    Operation("sequence of 5", call_of(sequence, flat), sequence_floor, CALL, read=entry("out")),
    Operation(
        "sequence of 5, nested keys",
        call_of(lambda package: sequence(package, ("s",)), nested),
        sequence_floor,
        read=entry(("s", "out")),
    ),
    Operation("sequence.select_subsequence(out_keys=)", subsequence, subsequence_floor),
    Operation(
        "probabilistic module, Normal, RANDOM",
        call_of(normal, loc_and_scale),
        sample_floor,
        read=entry("out"),
    ),
    Operation(
        "policy: sample and log_prob",
        call_of(policy, flat),
        policy_floor,
        read=entries("out", "out_log_prob"),
    ),
    Operation("probabilistic module.get_dist(td)", get_dist, get_dist_floor),
    Operation("probabilistic module.log_prob(td)", log_prob, log_prob_floor),
    Operation("policy.log_prob(td)", policy_log_prob, policy_log_prob_floor),
    Operation(
        "to_module(Linear) + module(td)",
        to_module(linear),
        to_module_floor(linear),
        TO_MODULE,
        read=entry("out"),
    ),
    Operation(
        "to_module(MLP) + module(td)",
        to_module(mlp),
        to_module_floor(mlp),
        TO_MODULE,
        read=entry("out"),
    ),
    Operation("functional MLP(x, params)", functional, to_module_floor(mlp)),
    Operation("from_modules(8 MLPs)", from_modules, from_modules_floor, FROM_MODULES),
    Operation("update_target(target, MLP, 0.005)", target_copy, target_copy_floor),
    Operation("target.lerp_(params of an MLP, 0.005)", lerp, target_copy_floor),
    *[
        Operation(f"vmap over {n} MLPs, {kind}", make(n), vmap_floor(n), BY_HAND, True, read=read)
        for n in (8, 64)
        for kind, make, read in (
            ("tensors", vmap_tensors, whole),
            ("containers", vmap_keyed, entry("out")),
        )
    ],
    Operation(
        "EnsembleModule(MLP, 8)(td)", ensemble, vmap_floor(8), BY_HAND, True, read=entry("out")
    ),
    *compiled_calls(16, 32),
    *compiled_calls(256, 256),
    *compiled_calls(1024, 1024, without_grad),
    Operation(
        "torch.compile(sequence)(td)",
        compiled_module,
        compiled_on_tensors(UNITS, BATCH),
        alone=True,
        read=entry("out"),
    ),
    Operation(
        "first compile of the sequence of 5",
        after_another_compile(compiled(UNITS, BATCH)),
        after_another_compile(compiled_on_tensors(UNITS, BATCH)),
        first=True,
        read=entry("out"),
    ),
)
