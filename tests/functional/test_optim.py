"""raffia.functional.optim, clipping, schedules: the oracle is torch.optim."""

import math

import pytest
import torch
from torch.utils import _pytree as pytree

from raffia.functional.gradients import clip_by_global_norm, global_norm
from raffia.functional.optim import Optimizer, adamw, cosine_decay, linear, sgd, step_decay, warmup
from raffia.tensordict.tensordict import TensorDict

CASES = {
    "adamw": (adamw(), torch.optim.AdamW, {}),
    "adamw, betas and decay": (
        adamw(0.8, 0.95, 1e-5, 0.3),
        torch.optim.AdamW,
        {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3},
    ),
    "adamw, betas of 0": (adamw(0.0, 0.0), torch.optim.AdamW, {"betas": (0.0, 0.0)}),
    "adam": (adamw(weight_decay=0.0), torch.optim.Adam, {}),
    "sgd": (sgd(0.9), torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (sgd(0.7, True), torch.optim.SGD, {"momentum": 0.7, "nesterov": True}),
    "plain": (sgd(0.0, weight_decay=0.2), torch.optim.SGD, {"weight_decay": 0.2}),
}
OPTIMIZERS = pytest.mark.parametrize("optimizer", [case[0] for case in CASES.values()], ids=CASES)


def tree(*batch: int, seed: int = 0, size: float = 1.0) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    draw = {
        "net": {
            "weight": size * torch.randn(*batch, 3, 5, generator=g),
            "bias": size * torch.randn(*batch, 5, generator=g),
        },
        "temperature": size * torch.randn(batch, generator=g),
    }
    return TensorDict(draw, batch_size=batch)


def assert_close(a, b, **tolerance):
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("kind", ["plain", "formula", "dict"])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch_optim_over_warmed_up_steps(case, kind):
    optimizer, theirs, arguments = CASES[case]
    form = (lambda td: td.to_dict()) if kind == "dict" else (lambda td: td)
    params = form(tree())
    leaves = [p.clone().requires_grad_() for p in pytree.tree_leaves(params)]
    oracle = theirs(leaves, lr=0.1, **arguments)
    schedule = torch.optim.lr_scheduler.LambdaLR(oracle, lambda step: min(1, (step + 1) / 4))
    opt = optimizer.init(params)
    update = in_vmap(optimizer) if kind == "formula" else optimizer.update
    for step in range(7):
        grads = form(tree(seed=step + 1, size=10.0 ** (step - 3)))
        for leaf, grad in zip(leaves, pytree.tree_leaves(grads), strict=True):
            leaf.grad = grad.clone()
        oracle.step()
        schedule.step()
        rate = 0.1 * warmup(torch.tensor(step + 1), 4)
        params, opt = update(params, grads, opt, learning_rate=rate)
        assert_close(params, leaves, rtol=3e-6, atol=1e-6)
    assert opt["count"] == 7


@pytest.mark.parametrize("make", [sgd, lambda: sgd(0.0), adamw])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_cpu_is_that_of_float32_but_for_rounding(make, dtype):
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, 100, generator=generator).to(dtype).unbind()
    found = {}
    for kind in (dtype, torch.float32):
        optimizer, params = make(), {"w": start.to(kind, copy=True)}
        opt = optimizer.init(params)
        for grad in grads:
            params, opt = optimizer.update(params, {"w": grad.to(kind)}, opt, learning_rate=0.1)
        found[kind] = params["w"].float()
    assert_close(found[dtype], found[torch.float32], rtol=0.02, atol=0.03)


def in_vmap(optimizer: Optimizer):
    """The update of one member of a population: by the formula, not by a fused kernel."""

    def update(*trees, learning_rate):
        out = torch.vmap(lambda p, g, o: optimizer.update(p, g, o, learning_rate=learning_rate))(
            *[pytree.tree_map(lambda x: x[None], tree) for tree in trees]
        )
        return pytree.tree_map(lambda x: x[0], out)

    return update


MEMBERS = [(name, where) for name in CASES for where in ("stacked", "vmap")]


@pytest.mark.parametrize(
    "case, where",
    [
        *MEMBERS,
        pytest.param("adamw", "vmap compiled", marks=pytest.mark.slow),
        ("nesterov", "vmap compiled"),
    ],
)
def test_members_with_different_rates_equal_separate_runs(case, where):
    optimizer = CASES[case][0]
    num_members = 3
    params, grads = tree(num_members), [tree(num_members, seed=s) for s in (5, 6, 7)]
    rates, decays = torch.tensor([0.1, 1e-3, 0.5]), torch.tensor([0.0, 0.1, 0.5])
    one = lambda p, g, o, r, d: optimizer.update(p, g, o, learning_rate=r, weight_decay=d)  # noqa: E731
    separate = []
    for i in range(num_members):
        p = params[i].clone()
        opt = optimizer.init(p)
        for g in grads:
            p, opt = one(p, g[i], opt, rates[i], float(decays[i]))
        separate.append((p, opt))
    call = one if where == "stacked" else torch.vmap(one)
    if where == "vmap compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager", fullgraph=True)
    opt = torch.vmap(optimizer.init)(params)
    for g in grads:
        params, opt = call(params, g, opt, rates, decays)
    exact = {"rtol": 0, "atol": 0} if where == "stacked" else {"rtol": 2e-6, "atol": 1e-6}
    for i, (p, o) in enumerate(separate):
        assert_close(params[i], p, **exact)
        assert_close({key: opt[key][i] for key in o}, o, **exact)


@pytest.mark.parametrize("where", ["plain", "vmap"])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_the_decay_of_a_call_overrides_that_of_the_optimiser(make, where):
    def updated(optimizer, **decay):
        def call(params, grads, opt):
            return optimizer.update(params, grads, opt, learning_rate=0.5, **decay)

        params, opt = tree(2), torch.vmap(optimizer.init)(tree(2))
        call = call if where == "plain" else torch.vmap(call)
        return call(params, tree(2, seed=3), opt)[0]

    own = updated(make(weight_decay=0.3))
    assert_close(updated(make(), weight_decay=0.3), own, rtol=1e-6, atol=1e-7)
    without = updated(make(), weight_decay=0.0)
    assert not torch.equal(without["temperature"], own["temperature"])


@OPTIMIZERS
def test_memory_is_used_in_place_and_gradients_are_not_touched(optimizer):
    params, grads = tree(), tree(seed=1)
    before, leaf = grads.clone(), params["net", "weight"]
    opt = optimizer.init(params)
    new, new_opt = optimizer.update(params, grads, opt, learning_rate=0.1)
    assert new is params and new_opt is opt and new["net", "weight"] is leaf
    assert_close(grads, before, rtol=0, atol=0)


@OPTIMIZERS
def test_any_memory_layout_gives_the_same_update(optimizer):
    """The fused kernels walk through memory in storage order, and would pair different entries."""

    def run(layout_p, layout_g):
        p = {"w": layout_p(torch.arange(24.0).reshape(2, 3, 2, 2))}
        g = {"w": layout_g(torch.linspace(-1, 1, 24).reshape(2, 3, 2, 2) ** 3)}
        opt = optimizer.init(p)
        for _ in range(3):
            p, opt = optimizer.update(p, g, opt, learning_rate=0.1)
        return p["w"]

    layouts = [
        lambda x: x.clone(),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ]
    want = run(layouts[0], layouts[0])
    for layout_p in layouts:
        for layout_g in layouts:
            torch.testing.assert_close(run(layout_p, layout_g), want, rtol=2e-6, atol=1e-6)


def test_a_parameter_that_requires_grad_is_moved_without_history():
    params, grads = {"w": torch.nn.Parameter(torch.ones(2))}, {"w": torch.ones(2)}
    new, _ = sgd().update(params, grads, sgd().init(params), learning_rate=0.5)
    assert new["w"] is params["w"] and new["w"].tolist() == [0.5, 0.5]


def test_leaves_are_paired_by_name_not_by_order():
    params = {"a": torch.zeros(2), "b": {"c": torch.zeros(2)}}
    grads = TensorDict(b=TensorDict(c=torch.ones(2)), a=torch.zeros(2))
    new, _ = sgd(0.0).update(params, grads, sgd(0.0).init(params), learning_rate=1.0)
    assert new["a"].tolist() == [0, 0] and new["b"]["c"].tolist() == [-1, -1]


def updated(params, grads, rate=1.0):
    return sgd().update(params, grads, sgd().init(params), learning_rate=rate)


REFUSED = [
    (
        lambda: updated({"b": {"c": torch.zeros(2)}}, {"b": {"d": torch.zeros(2)}}),
        r"only one of them has b\.c, b\.d",
    ),
    (
        lambda: updated(tree(), tree(), torch.ones(3)),
        r"rate of shape \[3\] needs stacked parameters",
    ),
    (lambda: adamw(beta2=1.0), "beta2=1.0"),
    (lambda: sgd(-0.1), "momentum=-0.1"),
    (lambda: sgd(0.0, nesterov=True), "needs a momentum"),
]


@pytest.mark.parametrize("call, match", REFUSED, ids=[match for _, match in REFUSED])
def test_invalid_arguments_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_the_first_steps_keep_their_digits_in_float32():
    """1 - 0.999^t in float32 would be wrong by 1e-5 of itself."""
    params = {"w": torch.zeros(1)}
    optimizer = adamw(weight_decay=0.0, eps=1e-3)
    grads = {"w": torch.full((1,), 1e-3)}
    new, _ = in_vmap(optimizer)(params, grads, optimizer.init(params), learning_rate=1.0)
    assert new["w"].item() == pytest.approx(-0.5, rel=3e-7)


def test_half_precision_stays_half():
    params = {"w": torch.ones(2, 3, dtype=torch.bfloat16)}
    optimizer = adamw()
    step = lambda p, g, o, r: optimizer.update(p, g, o, learning_rate=r)  # noqa: E731
    for call in (step, torch.vmap(step)):
        opt = torch.vmap(optimizer.init)(params)
        new, opt = call({"w": params["w"].clone()}, params, opt, torch.ones(2))
        assert new["w"].dtype == opt["mean"]["w"].dtype == torch.bfloat16


# ---- clipping


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 500.0])
def test_clipping_equals_torch(max_norm):
    grads = tree(seed=2)
    leaves = [torch.zeros_like(g) for g in pytree.tree_leaves(grads)]
    for leaf, grad in zip(leaves, pytree.tree_leaves(grads), strict=True):
        leaf.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    before = grads.clone()
    clipped, got = clip_by_global_norm(grads, max_norm)
    torch.testing.assert_close(got, norm)
    torch.testing.assert_close(global_norm(grads), norm)
    assert_close(clipped, [leaf.grad for leaf in leaves])
    assert_close(grads, before, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["stacked", "vmap"])
def test_clipping_is_separate_for_each_member(where):
    grads, bounds = tree(3, seed=2), torch.tensor([0.1, 2.0, 100.0])
    if where == "vmap":
        clipped, norm = torch.vmap(clip_by_global_norm)(grads, bounds)
    else:
        clipped, norm = clip_by_global_norm(grads, bounds, num_batch_dims=1)
    assert norm.shape == (3,)
    for i in range(3):
        one, n = clip_by_global_norm(grads[i], float(bounds[i]))
        torch.testing.assert_close(norm[i], n)
        assert_close(clipped[i], one)


def test_two_names_for_one_gradient_are_clipped_once():
    shared = torch.ones(4)
    clipped, norm = clip_by_global_norm({"a": shared, "b": shared.expand(2, 4)}, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(12))
    assert global_norm(clipped).item() == pytest.approx(1.0, rel=1e-5)


def test_no_gradients_have_no_length():
    assert clip_by_global_norm({}, 1.0) == ({}, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_show_in_the_norm(bad):
    _, norm = clip_by_global_norm({"a": torch.tensor([1.0, bad])}, 1.0)
    assert not norm.isfinite()


# ---- schedules


def test_schedules_equal_torch():
    schedulers = torch.optim.lr_scheduler
    for make, ours in [
        (lambda opt: schedulers.StepLR(opt, 3, 0.1), lambda step: step_decay(step, 3, 0.1)),
        (lambda opt: schedulers.LinearLR(opt, 0.25, 1, 8), lambda step: linear(step, 8, 0.25, 1.0)),
    ]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        theirs = make(optimizer)
        for step in range(12):
            got = ours(torch.tensor(step))
            assert got.shape == () and got.item() == pytest.approx(
                theirs.get_last_lr()[0], rel=1e-5
            )
            optimizer.step()
            theirs.step()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda s: warmup(s, 4),
        lambda s: warmup(s, 0),
        lambda s: step_decay(s - 4, 3, 0.5),
        lambda s: linear(s, 7, 2.0, 0.5),
        lambda s: cosine_decay(s, 7, 0.1),
    ],
)
def test_schedules_under_vmap(schedule):
    steps = torch.arange(12)
    factors = schedule(steps)
    assert factors.shape == (12,) and factors.dtype == torch.float32
    assert torch.equal(torch.vmap(schedule)(steps), factors)
    assert torch.equal(torch.stack([schedule(s) for s in steps]), factors)


def test_ends_of_schedules_are_exact():
    last = torch.tensor(10**6)
    assert warmup(last, 3) == 1 and linear(last, 7, 1.0, 0.3) == torch.tensor(0.3)
    assert step_decay(torch.tensor(-1), 5, 0.1) == 1 and cosine_decay(torch.tensor(0), 5) == 1


def test_a_schedule_of_no_steps_is_refused():
    for schedule in (linear, cosine_decay):
        with pytest.raises(ValueError, match="num_steps=0 must be above 0"):
            schedule(torch.tensor(0), 0)
