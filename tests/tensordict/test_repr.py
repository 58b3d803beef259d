# ruff: noqa: E501 - the long lines are the texts that are compared
"""The default repr: one line per leaf, keys sorted, nested containers indented."""

from textwrap import dedent, indent

import torch

import raffia
from raffia import TensorDict, TensorDictParams, lazy_stack, set_printoptions
from tests.tensordict.kinds import each

B, T = 2, 3


@raffia.tensorclass
class Step:
    obs: torch.Tensor
    task: str


def ones(*shape, **options):
    return torch.ones(shape, **options)


def leaf(*shape, dtype="float32", device="cpu", shared=False, cls="Tensor"):
    return f"{cls}(shape=torch.Size({list(shape)}), device={device}, dtype=torch.{dtype}, is_shared={shared})"


def node(fields, batch=(), device=None, shared=False, cls="TensorDict", tail=""):
    """The text of a container, from the texts of its entries in their order."""
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
TWO = {"x": ones(B), "n": {"y": ones(B)}}
IN_META = node({"y": leaf(B, device="meta")}, [B], "meta")
ON_META = {"n": IN_META, "x": leaf(B, device="meta")}
IN_SHARED = node({"y": leaf(B, shared=True)}, [B], shared=True)
IN_SHARED = node({"n": IN_SHARED, "x": leaf(B, shared=True)}, [B], shared=True)
VALUES = node({"l": STACK, "n": data("None"), "s": data("text")}, [B])
PARAMS = node({"n": node({"b": leaf(3, cls="Parameter")}), "w": leaf(2, cls="Parameter")})
PARAMS = f"TensorDictParams(params={PARAMS})"


def stacked(dim):
    return lazy_stack([TensorDict({"z": ones(B, T), "n": {"y": ones(B)}}, [B])] * 4, dim)


def step():
    return Step(obs=ones(B), task="reach", batch_size=[B])


def parameter(*shape):
    return leaf(*shape, cls="Parameter")


LONG = {"n": TensorDict({"y": ones(B, T)}, [B, T])}
LAZY = {"l": lazy_stack([TensorDict(a=ones(T))] * B)}
# a constructor of the container, and its text
CASES = {
    "sorted": (lambda: TensorDict(z=1, a=2), node({k: leaf(dtype="int64") for k in "az"})),
    "parameter": (lambda: TensorDict(b=torch.nn.Parameter(ones(3))), node({"b": parameter(3)})),
    "empty level": (lambda: TensorDict({"e": {}, "x": 1.0}), node({"e": node({}), "x": leaf()})),
    "empty": (lambda: TensorDict({}, [B], device="cpu"), node({}, [B], "cpu")),
    "device": (lambda: TensorDict(TWO, [B], device="meta"), node(ON_META, [B], "meta")),
    "longer child": (
        lambda: TensorDict(LONG, [B]),
        node({"n": node({"y": leaf(B, T)}, [B, T])}, [B]),
    ),
    "shared": (lambda: TensorDict(TWO, [B]).clone().share_memory_(), IN_SHARED),
    "values": (lambda: TensorDict({"s": "text", "n": None, "l": ["u", "v"]}, [B]), VALUES),
    **{
        f"lazy along {dim}": (
            lambda dim=dim: stacked(dim),
            lazy(dim, {"n": lazy(dim, {"y": leaf(*batch)}, batch), "z": leaf(*batch, T)}, batch),
        )
        for dim, batch in ((0, [4, B]), (1, [B, 4]))
    },
    "a lazy entry": (
        lambda: TensorDict(LAZY, [B]),
        node({"l": lazy(0, {"a": leaf(B, T)}, [B])}, [B]),
    ),
    "parameters": (lambda: TensorDictParams(TensorDict(w=ones(2), n=dict(b=ones(3)))), PARAMS),
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


def test_a_complete_text():
    """With members of different shapes and keys, and nested containers."""
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


def members(*shapes, **more):
    return lazy_stack([TensorDict({"a": ones(*shape), **more}, [B]) for shape in shapes])


WIDE = {f"key{i}": ones(1) for i in range(2)}
COMPACT = {
    "a line of 80": (TensorDict({"a" * 25: 1.0}, [], "cpu"), f"[], device=cpu, fields={{{'a' * 25}: f32[]}}"),
    "a line of 81": (TensorDict({"a" * 26: 1.0}, [], "cpu"), f"[], device=cpu, fields={{\n    {'a' * 26}: f32[]}}"),
    "levels": (
        TensorDict({"n": {"deep": {**WIDE, "b" * 60: 1}}, "z": ones(2, 3)}),
        f"[], fields={{\n    n: {{\n        deep: {{\n            {'b' * 60}: i64[],\n            "
        "key0: f32[1],\n            key1: f32[1]}},\n    z: f32[2,3]}",
    ),
    "values": (TensorDict({"s": "text", "l": ["u", "v"]}, [B]), "[2], fields={l: NonTensorStack, s: str}"),
    "dtypes": (
        TensorDict(a=ones(1).bfloat16(), b=ones(1).bool(), c=ones(1).to(torch.complex64), u=ones(1).byte()),
        "[], fields={a: bf16[1], b: bool[1], c: c64[1], u: u8[1]}",
    ),
    "devices": (TensorDict(a=ones(1), m=ones(1, device="meta")), "[], fields={a: f32[1], m: f32[1]@meta}"),
    "more batch dims": (TensorDict({"n": TensorDict({"a": ones(B, T, 1)}, [B, T])}, [B]), "[2], fields={n: [3]{a: f32[1]}}"),
    "a lazy stack": (members((B, 1), (B, 1), n={"c": ones(B)}), "[2,2], stack_dim=0, fields={\n    a: f32[1],\n    n: {c: f32[]}}"),
    "a lazy entry": (TensorDict({"n": members((B, 1), (B, 1))}, [2]), "[2], fields={n: LazyStackedTensorDict[2]{a: f32[1]}}"),
    "different shapes": (members((B, 1), (B, 3)), "[2,2], stack_dim=0, fields={a: f32[-1]}"),
    "different keys": (
        lazy_stack([TensorDict(a=1, b=1.0), TensorDict(a=1.0)]),
        "[2], stack_dim=0, fields={\n    a: f32[]}, exclusive_fields={0: {b: f32[]}}",
    ),
    "a tensorclass": (Step(obs=ones(B), task=None, batch_size=[B]), "[2], fields={obs: f32[], task: None}"),
    "lazy tensorclasses": (
        lazy_stack([Step(obs=ones(n), task="u") for n in (1, 2)]),
        "[2], fields={obs: f32[-1], task: str}",
    ),
    "not known yet": (TensorDict(w=torch.nn.UninitializedParameter()), "[], fields={w: f32[-1]}"),
}  # fmt: skip


def test_compact_texts():
    def check(case):
        td, text = case
        assert repr(td) == f"{type(td).__name__}(batch_size={text})"

    with set_printoptions(compact=True):
        each(COMPACT, check)
