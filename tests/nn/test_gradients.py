"""Gradients through keyed modules equal those of plain PyTorch, and nothing is left behind."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacfwd, jacrev, jvp
from torch.testing import assert_close

from raffia import TensorDict, TensorDictParams, from_modules
from raffia.nn import TensorDictModule, TensorDictModuleWrapper, TensorDictSequential, dispatch

B, T, A, N = 2, 3, 5, 4


# Forward mode of torch itself compiles its formulas with what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(T, A), nn.Tanh(), nn.Linear(A, 2)).double()


class Product(nn.Module):
    """Two inputs and two layers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(A, 2).double(), nn.Linear(A, 2).double()

    def forward(self, u, v):
        return self.left(u) * self.right(v)


def module():
    return TensorDictModule(net(), ["x"], ["y"])


def sequence():
    return TensorDictSequential(
        TensorDictModule(nn.Linear(T, A).double(), ["x"], [("n", "h")]),
        TensorDictModule(lambda h: (h.tanh(), h.sigmoid()), [("n", "h")], ["u", "v"]),
        TensorDictModule(Product(), ["u", "v"], ["y"]),
    )


def plain(keyed):
    """The same function of `x` without keys."""

    def call(x):
        if isinstance(keyed, TensorDictSequential):
            h = keyed[0].module(x)
            return keyed[2].module(h.tanh(), h.sigmoid())
        return keyed.module(x)

    return call


makes = pytest.mark.parametrize("make", [module, sequence])
forms = pytest.mark.parametrize("form", ["container", "tensors", "keywords"])


def example(requires_grad=False):
    return torch.randn(B, T, dtype=torch.double, requires_grad=requires_grad)


def called(keyed, x, form):
    """`y` of a call in one of its forms."""
    if form == "container":
        return keyed(TensorDict({"x": x}, x.shape[:1]))["y"]
    out = keyed(x) if form == "tensors" else keyed(x=x)
    return out[-1] if isinstance(out, tuple) else out


# --- the same as without keys -------------------------------------------------------------------


@makes
@forms
def test_gradients_equal_plain_torch(make, form):
    keyed, x = make(), example(requires_grad=True)
    wanted = [x, *keyed.parameters()]
    expected = torch.autograd.grad(plain(keyed)(x).square().sum(), wanted)
    got = torch.autograd.grad(called(keyed, x, form).square().sum(), wanted)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, rtol=0, atol=0)


@makes
@forms
def test_gradcheck(make, form):
    keyed = make()
    assert gradcheck(lambda x: called(keyed, x, form), (example(requires_grad=True),))


@makes
def test_gradients_of_gradients(make):
    keyed = make()
    assert gradgradcheck(lambda x: called(keyed, x, "container"), (example(requires_grad=True),))


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_gradcheck_wherever_outputs_go(inplace):
    keyed = TensorDictModule(net(), ["x"], ["y"], inplace=inplace)
    assert gradcheck(lambda x: called(keyed, x, "container"), (example(requires_grad=True),))


def test_gradcheck_with_tensordict_out():
    keyed = module()

    def func(x):
        out = TensorDict()
        keyed(TensorDict({"x": x}, [B]), tensordict_out=out)
        return out["y"]

    assert gradcheck(func, (example(requires_grad=True),))


def test_gradcheck_of_an_overwritten_entry():
    keyed = TensorDictSequential(
        TensorDictModule(torch.sin, ["x"], ["x"]), TensorDictModule(torch.exp, ["x"], ["y"])
    )
    assert gradcheck(lambda x: called(keyed, x, "container"), (example(requires_grad=True),))


def test_gradcheck_of_a_user_class():
    class Own(nn.Module):
        in_keys, out_keys = [("n", "x")], ["y"]

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("y", tensordict["n", "x"].square())

    assert gradcheck(Own(), (example(requires_grad=True),))
    assert gradcheck(lambda x: Own()(n_x=x), (example(requires_grad=True),))


def test_gradcheck_of_a_wrapper():
    keyed = TensorDictModuleWrapper(module())
    assert gradcheck(lambda x: called(keyed, x, "keywords"), (example(requires_grad=True),))


def test_gradcheck_of_a_dict_of_keys():
    keyed = TensorDictModule(lambda a, b: a * b.exp(), {"a": "x", "b": "x"}, ["y"])
    assert gradcheck(lambda x: called(keyed, x, "container"), (example(requires_grad=True),))


def test_a_selection_keeps_gradients():
    keyed = sequence().select_out_keys("y")
    assert gradcheck(lambda x: called(keyed, x, "container"), (example(requires_grad=True),))
    assert gradcheck(lambda x: keyed(x=x), (example(requires_grad=True),))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_equals_plain_training(optimizer):
    keyed, twin = module(), net()
    twin.load_state_dict(keyed.module.state_dict())
    data = [example() for _ in range(5)]
    for trained, call in ((keyed, lambda x: called(keyed, x, "container")), (twin, twin)):
        opt = optimizer(trained.parameters(), lr=0.1)
        for x in data:
            opt.zero_grad()
            call(x).square().mean().backward()
            opt.step()
    for a, b in zip(keyed.parameters(), twin.parameters(), strict=True):
        assert_close(a, b, rtol=0, atol=0)


@makes
def test_no_grad_makes_no_graph(make):
    with torch.no_grad():
        assert not called(make(), example(), "container").requires_grad


def test_frozen_parameters_get_no_gradient():
    keyed = sequence()
    keyed[0].requires_grad_(False)
    called(keyed, example(), "container").sum().backward()
    assert keyed[0].module.weight.grad is None and keyed[2].module.left.weight.grad is not None


# --- functional transforms ----------------------------------------------------------------------


@makes
@forms
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians(make, form, transform):
    keyed, x = make(), example()
    assert_close(transform(lambda x: called(keyed, x, form))(x), transform(plain(keyed))(x))


@makes
@forms
def test_forward_mode(make, form):
    keyed, x, t = make(), example(), example()
    got = jvp(lambda x: called(keyed, x, form), (x,), (t,))
    expected = jvp(plain(keyed), (x,), (t,))
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1])


@makes
@forms
def test_per_sample_gradients(make, form):
    keyed, x = make(), example()

    def loss(call):
        return lambda row: call(row.unsqueeze(0)).square().sum()

    got = torch.vmap(grad(loss(lambda x: called(keyed, x, form))))(x)
    assert_close(got, torch.vmap(grad(loss(plain(keyed))))(x))


def test_grad_of_a_function_of_a_container():
    keyed = module()

    def loss(td):
        return keyed(td)["y"].square().sum()

    td = TensorDict({"x": example()}, [B])
    x = td["x"].clone().requires_grad_()
    keyed.module(x).square().sum().backward()
    assert_close(grad(loss)(td.select("x"))["x"], x.grad)


# --- other parameters ---------------------------------------------------------------------------


def parameters(keyed):
    return TensorDict.from_module(keyed).data.clone()


@makes
def test_to_module_gives_gradients_to_the_parameters_put_in(make):
    keyed, x = make(), example()
    params = parameters(keyed).apply(lambda p: (p + 0.1).requires_grad_())
    with params.to_module(keyed):
        called(keyed, x, "container").square().sum().backward()
    assert all(p.grad is None for p in keyed.parameters())
    flat = {k: v.detach().requires_grad_() for k, v in params.flatten_keys(".").items()}
    out = functional_call(keyed, flat, (TensorDict({"x": x}, [B]),))
    out["y"].square().sum().backward()
    for key, value in params.flatten_keys(".").items():
        assert_close(value.grad, flat[key].grad)


@makes
def test_gradcheck_over_parameters(make):
    keyed, x = make(), example()
    tree = parameters(keyed)
    keys = list(tree.keys(True, True))

    def func(*values):
        given = TensorDict(dict(zip(keys, values, strict=True)))
        with given.to_module(keyed):
            return called(keyed, x, "container")

    assert gradcheck(func, tuple(tree[key].requires_grad_() for key in keys))


@makes
@forms
def test_functional_call(make, form):
    keyed, x = make(), example()
    flat = dict(parameters(keyed).apply(torch.zeros_like).flatten_keys(".").items())
    if form == "container":
        out = functional_call(keyed, flat, (TensorDict({"x": x}, [B]),))["y"]
    elif form == "tensors":
        out = functional_call(keyed, flat, (x,))
    else:
        out = functional_call(keyed, flat, (), {"x": x})
    out = out[-1] if isinstance(out, tuple) else out
    assert_close(out, torch.zeros(B, 2).double())


@makes
def test_grad_with_respect_to_a_container_of_parameters(make):
    keyed, x = make(), example()
    params = parameters(keyed)

    def loss(params):
        with params.to_module(keyed):
            return called(keyed, x, "container").square().sum()

    got = grad(loss)(params)
    called(keyed, x, "tensors").square().sum().backward()
    for name, p in keyed.named_parameters():
        assert_close(got.flatten_keys(".")[name], p.grad)


# --- ensembles by vmap --------------------------------------------------------------------------


@makes
@forms
def test_vmap_over_stacked_parameters(make, form):
    members, x = [make() for _ in range(N)], example()
    params, empty = from_modules(*members), make()

    def call(params, x):
        with params.to_module(empty):
            return called(empty, x, form)

    out = torch.vmap(call, (0, None))(params, x)
    assert_close(out, torch.stack([plain(m)(x) for m in members]))
    out.square().sum().backward()
    for i, member in enumerate(members):
        plain(member)(x).square().sum().backward()
        for name, p in member.named_parameters():
            assert_close(params.flatten_keys(".")[name].grad[i], p.grad)


@makes
def test_vmap_over_parameters_with_a_container_in_and_out(make):
    members, td = [make() for _ in range(N)], TensorDict({"x": example()}, [B])
    params, empty = from_modules(*members), make()

    def call(params, td):
        with params.to_module(empty):
            return empty(td)

    out = torch.vmap(call, (0, None))(params, td)
    assert out.batch_size == (N, B) and "y" not in td
    assert_close(out["y"], torch.stack([plain(m)(td["x"]) for m in members]))


def test_vmap_over_parameters_and_data():
    members, x = [module() for _ in range(N)], torch.randn(N, B, T).double()
    params, empty = from_modules(*members), module()

    def call(params, x):
        with params.to_module(empty):
            return empty(x=x)

    out = torch.vmap(call)(params, x)
    assert_close(out, torch.stack([m.module(row) for m, row in zip(members, x, strict=True)]))


def test_vmap_of_gradients():
    members, x = [module() for _ in range(N)], example()
    params, empty = from_modules(*members).data, module()

    def loss(params, x):
        with params.to_module(empty):
            return empty(x=x).square().sum()

    got = torch.vmap(grad(loss), (0, None))(params, x)
    for i, member in enumerate(members):
        member.module(x).square().sum().backward()
        for name, p in member.named_parameters():
            assert_close(got.flatten_keys(".")[name][i], p.grad)


def test_a_skeleton_on_the_meta_device():
    members, x = [module() for _ in range(N)], example()
    params = from_modules(*members)
    empty = module().to("meta")

    def call(params, x):
        with params.to_module(empty):
            return empty(TensorDict({"x": x}, [B]))["y"]

    out = torch.vmap(call, (0, None))(params, x)
    assert_close(out, torch.stack([m.module(x) for m in members]))
    assert all(p.is_meta for p in empty.parameters())


def test_parameters_registered_in_a_module():
    class Ensemble(nn.Module):
        def __init__(self, members):
            super().__init__()
            self.params = TensorDictParams(from_modules(*members), no_convert=True)
            self.__dict__["empty"] = module().to("meta")

        def forward(self, x):
            def call(params, x):
                with params.to_module(self.empty):
                    return self.empty(x=x)

            return torch.vmap(call, (0, None))(self.params, x)

    ensemble = Ensemble([module() for _ in range(N)])
    ensemble(example()).sum().backward()
    assert len(list(ensemble.parameters())) == 4
    assert all(p.grad is not None and p.shape[0] == N for p in ensemble.parameters())


# --- nothing is left behind ---------------------------------------------------------------------


class Broken(nn.Module):
    """Fails after its parameters were used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(T, A).double()
        self.register_buffer("count", torch.zeros((), dtype=torch.double))

    def forward(self, x):
        self.layer(x)
        raise ZeroDivisionError("inner trouble")


def state(keyed):
    """Everything that a call must leave as it was."""
    return (
        [(name, id(p), p._version, type(p)) for name, p in keyed.named_parameters()],
        [(name, id(b), b._version) for name, b in keyed.named_buffers()],
        [(name, dict(m.__dict__)) for name, m in keyed.named_modules() if isinstance(m, nn.Linear)],
    )


def uses():
    """Ways to run a keyed module with other parameters or under a transform."""

    def swapped(keyed, x):
        with parameters(keyed).to_module(keyed):
            return called(keyed, x, "container")

    def vmapped_ours(keyed, x):
        stacked = torch.stack([parameters(keyed)] * N)

        def call(params, x):
            with params.to_module(keyed):
                return called(keyed, x, "tensors")

        return torch.vmap(call, (0, None))(stacked, x)

    def differentiated(keyed, x):
        return jacrev(lambda x: called(keyed, x, "keywords"))(x)

    def by_parameters(keyed, x):
        def loss(params):
            with params.to_module(keyed):
                return called(keyed, x, "container").sum()

        return grad(loss)(parameters(keyed))

    def mapped(keyed, x):
        return torch.vmap(lambda x: called(keyed, x.unsqueeze(0), "container"))(x)

    def replaced(keyed, x):
        flat = dict(parameters(keyed).flatten_keys(".").items())
        return functional_call(keyed, flat, (TensorDict({"x": x}, [B]),))

    return [swapped, vmapped_ours, differentiated, by_parameters, mapped, replaced]


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.__name__)
@makes
def test_the_module_is_as_it_was(use, make):
    keyed, x = make(), example()
    called(keyed, x, "container")  # what the first call notes is no leak
    before = state(keyed)
    use(keyed, x)
    assert state(keyed)[:2] == before[:2]
    assert [n for n, _ in state(keyed)[2]] == [n for n, _ in before[2]]
    assert_close(called(keyed, x, "container"), plain(keyed)(x))
    called(keyed, x, "tensors").sum().backward()
    assert all(p.grad is not None for p in keyed.parameters())


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.__name__)
@pytest.mark.parametrize("outer", ["module", "sequence", "wrapper"])
def test_the_module_is_as_it_was_after_a_failure(use, outer):
    keyed = TensorDictModule(Broken(), ["x"], ["y"])
    if outer == "sequence":
        keyed = TensorDictSequential(TensorDictModule(torch.sin, ["x"], ["x"]), keyed)
    elif outer == "wrapper":
        keyed = TensorDictModuleWrapper(keyed)
    before = state(keyed)
    with pytest.raises(ZeroDivisionError):
        use(keyed, example())
    after = state(keyed)
    assert after[:2] == before[:2]
    values = [p for m in keyed.modules() for p in (*m._parameters.values(), *m._buffers.values())]
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(v) for v in values)


@pytest.mark.parametrize("form", ["container", "tensors", "keywords"])
def test_no_attribute_of_a_keyed_module_keeps_a_tensor_of_a_transform(form):
    keyed = sequence()
    torch.vmap(lambda x: called(keyed, x.unsqueeze(0), form))(example())
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for v in value.values():
                yield from tensors(v)
        elif isinstance(value, (list, tuple)):
            for v in value:
                yield from tensors(v)

    for m in keyed.modules():
        assert not any(wrapped(t) for t in tensors(m.__dict__))


@pytest.mark.parametrize("form", ["container", "tensors", "keywords"])
def test_calls_keep_no_graph_alive(form):
    import gc
    import weakref

    keyed, x = sequence(), example(requires_grad=True)
    y = called(keyed, x, form)
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@makes
def test_a_container_is_let_go(make):
    import gc
    import weakref

    keyed = make()
    td = TensorDict({"x": example()}, [B])
    keyed(td)
    gone = weakref.ref(td)
    del td
    gc.collect()
    assert gone() is None


def test_buffers_written_by_a_call_stay_in_what_was_put_in():
    keyed = TensorDictModule(nn.BatchNorm1d(T).double(), ["x"], ["y"])
    params = parameters(keyed)
    with params.to_module(keyed):
        called(keyed, example() + 3, "container")
    assert keyed.module.num_batches_tracked == 0
    assert_close(keyed.module.running_mean, torch.zeros(T).double())
    assert params["module", "num_batches_tracked"] == 1


def test_hooks_see_every_call_under_transforms():
    keyed, seen = module(), []
    keyed.module[0].register_forward_hook(lambda m, a, o: seen.append(1))
    torch.vmap(lambda x: called(keyed, x, "tensors"))(example())
    jacrev(lambda x: called(keyed, x, "tensors"))(example())
    assert len(seen) == 2
