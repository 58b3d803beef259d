# ruff: noqa: E501 - the long lines are the texts that are compared
"""The default repr: one line per leaf, keys sorted, nested containers indented."""

from textwrap import dedent, indent

import torch

from raffia import NonTensorData, TensorDict, TensorDictParams, lazy_stack, tensorclass
from tests.tensordict.kinds import each

B, T = 2, 3


@tensorclass
class Step:
    obs: torch.Tensor
    task: str


def ones(*shape, **options):
    return torch.ones(shape, **options)


def leaf(*shape, dtype="float32", device="cpu", shared=False, cls="Tensor"):
    return f"{cls}(shape=torch.Size({list(shape)}), device={device}, dtype=torch.{dtype}, is_shared={shared})"


def node(fields, batch=(), device=None, shared=False, cls="TensorDict", tail=""):
    """The text of a container, from the texts of its entries in the order in which they must appear."""
    body = indent(",\n".join(f"{key}: {text}" for key, text in fields.items()), " " * 8)
    lazy = "    exclusive_fields={\n    },\n" if cls == "LazyStackedTensorDict" else ""
    opening = f"{cls}(\n    fields={{\n" + (f"{body}}},\n" if fields else "    },\n") + lazy
    end = f"    batch_size=torch.Size({list(batch)}),\n    device={device},\n"
    return f"{opening}{end}    is_shared={shared}{tail})"


def lazy(dim, fields, batch):
    return node(fields, batch, cls="LazyStackedTensorDict", tail=f",\n    stack_dim={dim}")


def data(text, cls="NonTensorData"):
    return f"{cls}(data={text}, batch_size=torch.Size([2]), device=None)"


STACK = "NonTensorStack(\n    ['u', 'v'],\n    batch_size=torch.Size([2]),\n    device=None)"
STEP = f"Step(\n    obs={leaf(B)},\n    task={data('reach')},\n    batch_size=torch.Size([2]),\n    device=None,\n    is_shared=False)"
MIXED = {"x": ones(B), "y": ones(B, device="meta")}
TWO = {"x": ones(B), "n": {"y": ones(B)}}
IN_META = node({"y": leaf(B, device="meta")}, [B], "meta")
IN_SHARED = node({"y": leaf(B, shared=True)}, [B], shared=True)
PARAMS = node({"n": node({"b": leaf(3, cls="Parameter")}), "w": leaf(2, cls="Parameter")})


def stacked(dim):
    return lazy_stack([TensorDict({"z": ones(B, T), "n": {"y": ones(B)}}, [B])] * 4, dim)


def step():
    return Step(obs=ones(B), task="reach", batch_size=[B])


# what makes the container, and its text
CASES = {
    "sorted": (lambda: TensorDict(z=1, a=2), node({k: leaf(dtype="int64") for k in "az"})),
    "dtypes": (
        lambda: TensorDict(x=ones(2, dtype=torch.bool), y=ones(2, dtype=torch.float16)),
        node({"x": leaf(2, dtype="bool"), "y": leaf(2, dtype="float16")}),
    ),
    "parameter": (
        lambda: TensorDict(b=torch.nn.Parameter(ones(3))),
        node({"b": leaf(3, cls="Parameter")}),
    ),
    "empty level": (lambda: TensorDict({"e": {}, "x": 1.0}), node({"e": node({}), "x": leaf()})),
    "empty": (lambda: TensorDict({}, [B], device="cpu"), node({}, [B], "cpu")),
    "device": (
        lambda: TensorDict(TWO, [B], device="meta"),
        node({"n": IN_META, "x": leaf(B, device="meta")}, [B], "meta"),
    ),
    "devices": (
        lambda: TensorDict(MIXED, [B]),
        node({"x": leaf(B), "y": leaf(B, device="meta")}, [B]),
    ),
    "longer child": (
        lambda: TensorDict({"n": TensorDict({"y": ones(B, T)}, [B, T])}, [B]),
        node({"n": node({"y": leaf(B, T)}, [B, T])}, [B]),
    ),
    "shared": (
        lambda: TensorDict(TWO, [B]).clone().share_memory_(),
        node({"n": IN_SHARED, "x": leaf(B, shared=True)}, [B], shared=True),
    ),
    "lock": (lambda: TensorDict({"x": ones(B)}, [B], lock=True), node({"x": leaf(B)}, [B])),
    "names": (lambda: TensorDict({"x": ones(B)}, [B], names=["t"]), node({"x": leaf(B)}, [B])),
    "values": (
        lambda: TensorDict({"s": "text", "n": None, "l": ["u", "v"]}, [B]),
        node({"l": STACK, "n": data("None"), "s": data("text")}, [B]),
    ),
    "a value": (lambda: NonTensorData("x", batch_size=[B]), data("x")),
    **{
        f"lazy along {dim}": (
            lambda dim=dim: stacked(dim),
            lazy(dim, {"n": lazy(dim, {"y": leaf(*batch)}, batch), "z": leaf(*batch, T)}, batch),
        )
        for dim, batch in ((0, [4, B]), (1, [B, 4]))
    },
    "a lazy entry": (
        lambda: TensorDict({"l": lazy_stack([TensorDict(a=ones(T))] * B)}, [B]),
        node({"l": lazy(0, {"a": leaf(B, T)}, [B])}, [B]),
    ),
    "parameters": (
        lambda: TensorDictParams(TensorDict({"w": ones(2), "n": {"b": ones(3)}})),
        f"TensorDictParams(params={PARAMS})",
    ),
    "tensorclass": (step, STEP),
    "a tensorclass as an entry": (lambda: TensorDict({"s": step()}, [B]), node({"s": STEP}, [B])),
}


def test_texts():
    def check(case):
        make, text = case
        td = make()
        keys = list(td.keys()) if isinstance(td, TensorDict) else None
        assert repr(td) == str(td) == f"{td}" == text
        assert keys is None or list(td.keys()) == keys

    each(CASES, check)


def test_a_text_in_full():
    """Of members of unlike shape and keys, and of nested containers."""
    td = TensorDict(
        {"n": lazy_stack([TensorDict(a=ones(3), b=1), TensorDict(a=ones(4), c=1)])}, [2]
    )
    expected = dedent("""\
        TensorDict(
            fields={
                n: LazyStackedTensorDict(
                    fields={
                        a: Tensor(shape=torch.Size([2, -1]), device=cpu, dtype=torch.float32, is_shared=False)},
                    exclusive_fields={
                        0 ->
                            b: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False),
                        1 ->
                            c: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)},
                    batch_size=torch.Size([2]),
                    device=None,
                    is_shared=False,
                    stack_dim=0)},
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False)""")
    assert repr(td) == expected
