"""Helpers of tests of keyed modules: small functions, containers of numbers, forms of calls."""

import torch
from torch import nn
from torch.distributions import Distribution, Normal

from raffia import TensorDict
from raffia.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
)

B = 2  # rows
NUMBERS = {"x": 1.0, "y": 10.0, ("n", "x"): 100.0, ("n", "d", "x"): 1000.0}
WRAPPED = {  # the same module, alone and within sequences
    "module": lambda module: module,
    "sequence": lambda module: TensorDictSequential(module),
    "nested": lambda module: TensorDictSequential({"outer": TensorDictSequential(module)}),
    "wrapper": lambda module: TensorDictModuleWrapper(TensorDictModuleWrapper(module)),
}


def plus(*xs):
    return sum(xs) + 1


def add(x, y):
    return x + y


def both(x):
    return x + 1, x + 2


def fail(x, *_):
    raise ZeroDivisionError("inner trouble")


class Scale(nn.Module):
    """Stores the keywords of its last call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        self.last_kwargs = kwargs
        return sum(x for x in args if x is not None) * self.weight

    def encode(self, x, *, scale=1.0):
        return x * self.weight * scale


def step(ins, outs, **kwargs):
    """A module that adds its inputs and one; all its outputs are the same."""
    ins = [ins] if isinstance(ins, str) else ins
    outs = [outs] if isinstance(outs, str) else outs
    return TensorDictModule(lambda *xs: (plus(*xs),) * len(outs), ins, outs, **kwargs)


def chain(*names, **kwargs):
    """a -> b -> c -> ...: each adds one."""
    pairs = zip(names, names[1:], strict=False)
    return TensorDictSequential(*(step(a, b) for a, b in pairs), **kwargs)


def numbers(entries=NUMBERS, shape=(B,)):
    """A container in which each entry is filled with one number."""
    return TensorDict({key: torch.full(shape, float(v)) for key, v in entries.items()}, shape)


def start(*keys, value=0.0):
    return numbers({key: value for key in keys or ("a",)})


def leaves(td):
    return set(td.keys(True, True))


def tree(td):
    """A dict of all leaves."""
    return {key: td[key] for key in td.keys(True, True)}


def keyed(module, in_keys, out_keys, **options):
    return TensorDictModule(module, in_keys=in_keys, out_keys=out_keys, **options)


def linear(in_key="x", out_key="y", sizes=(3, 5), **options):
    return keyed(nn.Linear(*sizes), [in_key], [out_key], **options)


def policy(**options):
    """An action of five numbers, normally distributed, for an `x` of three."""
    head = ProbabilisticTensorDictModule(
        *(["loc", "scale"], ["action"]),
        **{"distribution_class": Normal, "return_log_prob": True, **options},
    )
    parameters = keyed(NormalParamExtractor(), ["params"], ["loc", "scale"])
    return ProbabilisticTensorDictSequential(linear("x", "params", (3, 10)), parameters, head)


def read(td):
    """The number of each leaf; all elements of a leaf are equal."""
    found = {}
    for key, leaf in td.items(True, True):
        assert (leaf == leaf.flatten()[0]).all()
        found[key] = leaf.flatten()[0].item()
    return found


def call(module, form, entries=NUMBERS):
    """The outputs as numbers, of a call with a container, with tensors or with keywords."""
    td = numbers(entries)
    if form == "container":
        out = module(td)
        assert out is td
        return {key: v for key, v in read(td).items() if entries.get(key) != v}
    tensors = [td[key] for key in module.in_keys]
    if form == "keywords":
        names = ["_".join(key) if isinstance(key, tuple) else key for key in module.in_keys]
        out = module(**dict(zip(names, tensors, strict=True)))
    else:
        out = module(*tensors)
    keys = [key for key in module.out_keys if key != "_"]
    out = out if isinstance(out, tuple) else (out,)
    found = TensorDict(dict(zip(keys, out, strict=True)))
    return read(found)


FORMS = ["container", "tensors", "keywords"]


def compiled(module, **options):
    """The compiled module; checks of arguments are off, as after a process's first compilation."""
    torch._dynamo.reset()
    Distribution.set_default_validate_args(False)
    return torch.compile(module, **{"backend": "eager", "fullgraph": True, **options})


def counting_backend():
    """A backend for `compile`, and the list of its graphs."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    return backend, graphs
