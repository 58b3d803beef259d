"""Keyed modules go through torch.compile whole, once, and give what they give without it."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

from raffia import TensorDict, from_module
from raffia.nn import (
    EnsembleModule,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    as_tensordict_module,
    dispatch,
    set_interaction_type,
    set_skip_existing,
    symbolic_trace,
)

B, T, A = 2, 3, 5


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)


def keyed(module, in_keys, out_keys, **options):
    return TensorDictModule(module, in_keys=in_keys, out_keys=out_keys, **options)


def linear(in_key="x", out_key="y", sizes=(T, A), **options):
    return keyed(nn.Linear(*sizes), [in_key], [out_key], **options)


def chain(**options):
    return TensorDictSequential(
        linear("x", "h"), keyed(lambda h, z: (h * z, h + z), ["h", "z"], ["y", "_"]), **options
    )


def nested_chain():
    return TensorDictSequential(
        linear(("obs", "x"), ("mid", "h")),
        TensorDictSequential(
            keyed(torch.relu, [("mid", "h")], [("mid", "h")]),
            linear(("mid", "h"), ("out", "n", "y"), (A, 1)),
        ),
    )


def by_name():
    return TensorDictSequential({"encoder": linear("x", "h"), "head": linear("h", "y", (A, 1))})


def policy(**options):
    return ProbabilisticTensorDictSequential(
        linear("x", "params", (T, 2 * A)),
        keyed(NormalParamExtractor(), ["params"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=Normal,
            return_log_prob=True,
            **options,
        ),
    )


def inputs():
    return TensorDict(
        {"x": torch.randn(B, T), "z": torch.randn(B, A), "obs": {"x": torch.randn(B, T)}},
        batch_size=[B],
    )


def tree(td):
    return {key: td[key] for key in td.keys(True, True)}


def whole(function, *make, backend="eager", close=assert_close):
    """Compile a function, compare it with itself, and call it again without a new compilation.

    make: functions that make its arguments.
    """
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for run in range(2):
        args = [m() for m in make]
        copies = [a.clone() for a in args]
        torch.manual_seed(run)
        with torch._dynamo.config.patch(error_on_recompile=run > 0):
            result = compiled(*args)
        torch.manual_seed(run)
        expected = function(*copies)
        both = zip([result, *args], [expected, *copies], strict=True)
        for mine, theirs in both:
            if isinstance(theirs, TensorDict):
                assert mine.batch_size == theirs.batch_size
                assert (mine is args[0]) == (theirs is copies[0])
                mine, theirs = tree(mine), tree(theirs)
            close(mine, theirs)
    return compiled


# --- containers ---------------------------------------------------------------------------------


class Own(TensorDictModuleBase):
    in_keys, out_keys = ["x"], ["y"]

    @dispatch
    def forward(self, tensordict):
        return tensordict.set("y", 2 * tensordict["x"])


class Around(TensorDictModuleWrapper):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Foreign(nn.Module):
    in_keys, out_keys = ["x"], ["y"]

    def forward(self, tensordict):
        tensordict["y"] = 2 * tensordict["x"]
        return tensordict


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(T, A)

    def forward(self, x):
        return x

    def encode(self, x, *, scale):
        return self.net(x) * scale


MODULES = {
    "module": linear,
    "nested keys": lambda: linear(("obs", "x"), ("out", "n", "y")),
    "function": lambda: keyed(torch.exp, ["x"], ["y"]),
    "several outputs": lambda: keyed(lambda x: (x + 1, x + 2, x + 3), ["x"], ["a", "_", "b"]),
    "dict output": lambda: keyed(lambda x: {"b": x + 1, "a": x + 2}, ["x"], ["a", "b"]),
    "nested output": lambda: keyed(lambda x: {"b": x + 1, "a": x + 2}, ["x"], ["n"]),
    "keyword inputs": lambda: keyed(lambda *, p, q: p - q, {"q": "x", "p": ("obs", "x")}, ["y"]),
    "missing input": lambda: keyed(lambda x, m: x if m is None else m, ["x", "missing"], ["y"]),
    "method": lambda: keyed(Branch(), ["x"], ["y"], method="encode", method_kwargs={"scale": 2.0}),
    "strict": lambda: linear(strict=True),
    "inplace False": lambda: linear(inplace=False),
    "inplace empty": lambda: linear(inplace="empty"),
    "selected": lambda: keyed(lambda x: (x + 1, x + 2), ["x"], ["a", "b"]).select_out_keys("b"),
    "sequence": chain,
    "sequence of nested keys": nested_chain,
    "sequence by name": by_name,
    "sequence inplace False": lambda: chain(inplace=False),
    "sequence inplace empty": lambda: chain(inplace="empty"),
    "sequence inplace True": lambda: chain(inplace=True),
    "sequence selected": lambda: chain(selected_out_keys=["y"]),
    "selected twice": lambda: TensorDictSequential(chain().select_out_keys("y"), linear("x", "v")),
    "subsequence": lambda: chain().select_subsequence(out_keys=["h"]),
    "partial tolerant": lambda: TensorDictSequential(
        linear("missing", "v"), linear(), partial_tolerant=True
    ),
    "in place of its input": lambda: TensorDictSequential(linear("x", "x", (T, T)), linear()),
    "empty sequence": lambda: TensorDictSequential(),
    "function of a container": lambda: TensorDictSequential(lambda td: td.set("y", td["x"] + 1)),
    "wrapped function": lambda: WrapModule(lambda td: td.select("x"), inplace=False),
    "wrapper": lambda: Around(linear()),
    "wrapper of a sequence": lambda: TensorDictModuleWrapper(nested_chain()),
    "own class": Own,
    "any class with keys": lambda: TensorDictSequential(Foreign(), linear("x", "h")),
    "decorated function": lambda: as_tensordict_module(in_keys=["x"], out_keys=["y"])(torch.exp),
    "traced": lambda: symbolic_trace(chain()),
    "probabilistic": lambda: policy(default_interaction_type="mode"),
    "ensemble": lambda: EnsembleModule(linear(), 4),
    "ensemble of a sequence": lambda: EnsembleModule(nested_chain(), 4),
    "ensembles in a row": lambda: TensorDictSequential(
        EnsembleModule(linear("x", "h"), 4), EnsembleModule(linear("h", "y", (A, 1)), 4, False)
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_container_in_container_out(name):
    whole(MODULES[name](), inputs)


@pytest.mark.parametrize("make", [linear, chain, nested_chain, lambda: EnsembleModule(linear(), 4)])
def test_within_a_compiled_function(make):
    module = make()
    key = [key for key in module.out_keys if key != "_"][-1]

    def function(td):
        return module(td)[key].square().sum()

    whole(function, inputs)


def test_locked_input_of_a_module_that_makes_its_own_output():
    whole(linear(inplace="empty"), lambda: inputs().lock_())


def test_tensordict_out():
    for module in (linear(), chain()):

        def function(td, out, module=module):
            module(td, tensordict_out=out)
            return out

        whole(function, inputs, lambda: TensorDict(batch_size=[B]))


def test_keywords_of_the_module():
    module = keyed(lambda x, scale=1: x * scale, ["x"], ["y"])
    whole(lambda td: module(td, scale=3), inputs)


# --- tensors ------------------------------------------------------------------------------------


def x():
    return torch.randn(B, T)


def z():
    return torch.randn(B, A)


@pytest.mark.parametrize(
    "make",
    [linear, lambda: linear("x", ("n", "y")), by_name, Own, lambda: EnsembleModule(linear(), 4)],
)
def test_called_with_a_tensor(make):
    module = make()
    whole(module, x)
    whole(lambda x: module(x=x), x)


def test_called_with_tensors():
    module = chain()
    whole(module, x, z)
    whole(lambda x, z: module(z=z, x=x), x, z)
    whole(lambda x, z: module(x, z=z), x, z)
    whole(module.select_out_keys("y"), x, z)


def test_called_with_tensors_for_nested_keys():
    module = nested_chain()
    whole(lambda x: module(obs_x=x), x)


def test_probabilistic_called_with_a_tensor():
    whole(policy(), x)


# --- distributions ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mode", "mean", "deterministic"])
def test_interaction_type_within_the_compiled_function(kind):
    module = policy(default_interaction_type="random")

    def function(td):
        with set_interaction_type(kind):
            return module(td)

    compiled = whole(function, inputs)
    td = compiled(inputs())
    assert_close(td["action"], td["loc"])


def test_interaction_type_around_the_compiled_function():
    module = policy(default_interaction_type="random")
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with set_interaction_type("mode"):
        td = compiled(inputs())
    assert_close(td["action"], td["loc"])
    td = compiled(inputs())
    assert not torch.equal(td["action"], td["loc"])
    with set_interaction_type("mode"):
        td = compiled(inputs())
    assert_close(td["action"], td["loc"])


def test_samples_differ_between_calls_and_follow_the_seed():
    compiled = whole(policy(default_interaction_type="random"), inputs)
    td = inputs()
    assert not torch.equal(compiled(td.clone())["action"], compiled(td.clone())["action"])


def test_distribution_and_log_prob():
    module = policy()

    def function(td):
        return module.get_dist(td).entropy().sum() + module.log_prob(td).sum()

    whole(function, lambda: inputs().set("action", torch.zeros(B, A)))


# --- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linear, chain])
def test_parameters_put_in_within_the_compiled_function(make):
    module = make()

    def function(params, td):
        with params.to_module(module):
            return module(td)["y"]

    def zeros():
        return from_module(module).data.clone().zero_()

    before = list(module.parameters())
    compiled = whole(function, zeros, inputs)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert compiled(zeros(), inputs()).count_nonzero() == 0


@pytest.mark.parametrize("make", [chain, policy, lambda: EnsembleModule(linear(), 4)])
def test_gradients(make):
    module = make()
    key = module.out_keys[0]
    function = torch.compile(
        lambda td: module(td)[key].square().sum(), fullgraph=True, backend="aot_eager"
    )
    td = inputs()
    function(td.clone()).backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(td.clone())[key].square().sum().backward()
    assert_close(grads, [p.grad for p in module.parameters()])


def test_gradients_of_parameters_that_are_put_in():
    module, td = linear(), inputs()

    def loss(params):
        with params.to_module(module):
            return module(td.clone())["y"].square().sum()

    params = [from_module(module).data.clone().requires_grad_() for _ in range(2)]
    torch.compile(loss, fullgraph=True, backend="aot_eager")(params[0]).backward()
    loss(params[1]).backward()
    for key in params[0].keys(True, True):
        assert params[0][key].grad is not None
        assert_close(params[0][key].grad, params[1][key].grad)
    assert all(p.grad is None for p in module.parameters())


def test_a_training_step_is_the_same():
    def train(compiled):
        torch.manual_seed(0)
        module = by_name()
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        td = inputs()
        for _ in range(3):
            optimiser.zero_grad()
            run(td.clone())["y"].square().sum().backward()
            optimiser.step()
        return list(module.parameters())

    assert_close(train(True), train(False))


# --- state --------------------------------------------------------------------------------------


def test_training_mode_is_seen():
    module = keyed(nn.Dropout(0.999), ["x"], ["y"])
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert compiled(torch.ones(64, T)).mean() != 1
    module.eval()
    assert compiled(torch.ones(64, T)).mean() == 1


def test_another_shape():
    module = chain()
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    for batch in (2, 3, 7):
        td = TensorDict({"x": torch.randn(batch, T), "z": torch.randn(batch, A)}, [batch])
        assert_close(compiled(td.clone())["y"], module(td)["y"])


def test_skip_existing_can_be_switched_off_within_and_says_why_not_on():
    module = linear()

    def function(td, mode):
        with set_skip_existing(mode):
            return module(td)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    td = inputs()
    assert_close(compiled(td.clone(), False)["y"], module(td)["y"])
    with pytest.raises(Exception, match="can't|cannot"):
        compiled(td.clone(), True)


def test_skip_existing_around_the_compiled_function():
    module = linear()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    td = inputs().set("y", torch.zeros(B, A))
    with set_skip_existing():
        assert compiled(td.clone())["y"].count_nonzero() == 0
    assert compiled(td.clone())["y"].count_nonzero() > 0


def test_module_can_be_compiled_in_place():
    module = chain()
    expected = module(inputs().fill_("x", 1).fill_("z", 1))["y"]
    module.compile(fullgraph=True, backend="eager")
    assert_close(module(inputs().fill_("x", 1).fill_("z", 1))["y"], expected)


def test_a_wrapped_module_that_is_compiled_itself():
    net = torch.compile(nn.Linear(T, A), fullgraph=True, backend="eager")
    td = keyed(net, ["x"], ["y"])(inputs())
    assert_close(td["y"], net._orig_mod(td["x"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [nested_chain, policy, lambda: EnsembleModule(linear(), 4)])
def test_inductor(make):
    whole(make(), inputs, backend="inductor")
