# ruff: noqa: E501 - the long lines are the texts that are compared
"""The default repr: one line per leaf, keys sorted, nested containers indented.

All classes here are `ours`: the form is fixed by us.
"""

from textwrap import dedent, indent

import pytest
import torch

from raffia import NonTensorData, TensorDict, TensorDictParams, lazy_stack, tensorclass

B, T = 2, 3


@tensorclass
class Step:
    obs: torch.Tensor
    task: str


def leaf(*shape, dtype="float32", device="cpu", shared=False, cls="Tensor"):
    return f"{cls}(shape=torch.Size({list(shape)}), device={device}, dtype=torch.{dtype}, is_shared={shared})"


def node(fields, batch=(), device=None, shared=False, cls="TensorDict", tail=""):
    """The text of a container, from the texts of its entries in the order in which they must appear."""
    body = ",\n".join(f"{key}: {text}" for key, text in fields.items())
    body = indent(body, " " * 8)
    opening = "    fields={\n" + (f"{body}}},\n" if fields else "    },\n")
    return (
        f"{cls}(\n{opening}"
        + ("    exclusive_fields={\n    },\n" if cls == "LazyStackedTensorDict" else "")
        + f"    batch_size=torch.Size({list(batch)}),\n    device={device},\n    is_shared={shared}{tail})"
    )


class TestDense_ours:
    def test_literal(self):
        td = TensorDict({"b": torch.nn.Parameter(torch.ones(3, 4)), "a": torch.zeros(3)}, [3])
        expected = dedent("""\
            TensorDict(
                fields={
                    a: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False),
                    b: Parameter(shape=torch.Size([3, 4]), device=cpu, dtype=torch.float32, is_shared=False)},
                batch_size=torch.Size([3]),
                device=None,
                is_shared=False)""")
        assert repr(td) == expected

    def test_literal_nested(self):
        td = TensorDict(
            {"n": {"y": torch.ones(B, T), "m": {"z": torch.ones(B)}}, "a": torch.zeros(B)}, [B]
        )
        expected = dedent("""\
            TensorDict(
                fields={
                    a: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False),
                    n: TensorDict(
                        fields={
                            m: TensorDict(
                                fields={
                                    z: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False)},
                                batch_size=torch.Size([2]),
                                device=None,
                                is_shared=False),
                            y: Tensor(shape=torch.Size([2, 3]), device=cpu, dtype=torch.float32, is_shared=False)},
                        batch_size=torch.Size([2]),
                        device=None,
                        is_shared=False)},
                batch_size=torch.Size([2]),
                device=None,
                is_shared=False)""")
        assert repr(td) == expected

    def test_literal_empty(self):
        expected = dedent("""\
            TensorDict(
                fields={
                },
                batch_size=torch.Size([2]),
                device=cpu,
                is_shared=False)""")
        assert repr(TensorDict({}, [B], device="cpu")) == expected

    def test_str_is_repr(self):
        td = TensorDict(a=1, b={"c": 2})
        assert str(td) == f"{td}" == repr(td)

    @pytest.mark.parametrize(
        "td, fields",
        [
            (TensorDict(z=1, a=2, m=3), {k: leaf(dtype="int64") for k in "amz"}),
            (TensorDict({"x": torch.ones(2, dtype=torch.bool)}), {"x": leaf(2, dtype="bool")}),
            (
                TensorDict({"x": torch.ones(2, dtype=torch.float16)}),
                {"x": leaf(2, dtype="float16")},
            ),
            (TensorDict({"e": {}, "x": 1.0}), {"e": node({}), "x": leaf()}),
        ],
        ids=["sorted", "bool", "half", "empty-level"],
    )
    def test_fields(self, td, fields):
        assert repr(td) == node(fields)

    def test_device(self):
        td = TensorDict({"x": torch.ones(B), "n": {"y": torch.ones(B)}}, [B], device="meta")
        inner = node({"y": leaf(B, device="meta")}, [B], "meta")
        assert repr(td) == node({"n": inner, "x": leaf(B, device="meta")}, [B], "meta")

    def test_mixed_devices(self):
        td = TensorDict({"x": torch.ones(B), "y": torch.ones(B, device="meta")}, [B])
        assert repr(td) == node({"x": leaf(B), "y": leaf(B, device="meta")}, [B])

    def test_child_with_a_longer_batch(self):
        td = TensorDict({"n": TensorDict({"y": torch.ones(B, T)}, [B, T])}, [B])
        assert repr(td) == node({"n": node({"y": leaf(B, T)}, [B, T])}, [B])

    def test_shared_memory(self):
        td = TensorDict({"x": torch.ones(B), "n": {"y": torch.ones(B)}}, [B]).share_memory_()
        inner = node({"y": leaf(B, shared=True)}, [B], shared=True)
        assert repr(td) == node({"n": inner, "x": leaf(B, shared=True)}, [B], shared=True)

    @pytest.mark.parametrize(
        "change", [lambda td: td.lock_(), lambda td: td.refine_names("x")], ids=["lock", "names"]
    )
    def test_lock_and_names_do_not_show(self, change):
        td = TensorDict({"x": torch.ones(B)}, [B])
        assert repr(change(td)) == node({"x": leaf(B)}, [B])

    def test_it_does_not_change_the_container(self):
        td = TensorDict({"z": 1, "a": 2})
        repr(td)
        assert list(td.keys()) == ["z", "a"]


class TestNonTensor_ours:
    def test_entries(self):
        td = TensorDict({"s": "text", "n": None, "x": torch.ones(B)}, [B])
        fields = {
            "n": "NonTensorData(data=None, batch_size=torch.Size([2]), device=None)",
            "s": "NonTensorData(data=text, batch_size=torch.Size([2]), device=None)",
            "x": leaf(B),
        }
        assert repr(td) == node(fields, [B])

    def test_alone(self):
        assert (
            repr(NonTensorData("x", batch_size=[B]))
            == "NonTensorData(data=x, batch_size=torch.Size([2]), device=None)"
        )

    def test_list_of_texts(self):
        stack = (
            "NonTensorStack(\n    ['u', 'v'],\n    batch_size=torch.Size([2]),\n    device=None)"
        )
        assert repr(TensorDict({"l": ["u", "v"]}, [B])) == node({"l": stack}, [B])


class TestLazy_ours:
    def test_literal(self):
        lazy = lazy_stack([TensorDict(a=torch.ones(3), b=1), TensorDict(a=torch.ones(4), c=1)])
        expected = dedent("""\
            LazyStackedTensorDict(
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
                stack_dim=0)""")
        assert repr(lazy) == expected

    @pytest.mark.parametrize("dim, batch", [(0, [4, B]), (1, [B, 4])])
    def test_nested(self, dim, batch):
        lazy = lazy_stack(
            [TensorDict({"z": torch.ones(B, T), "n": {"y": torch.ones(B)}}, [B]) for _ in range(4)],
            dim,
        )
        kind = {"cls": "LazyStackedTensorDict", "tail": f",\n    stack_dim={dim}"}
        inner = node({"y": leaf(*batch)}, batch, **kind)
        assert repr(lazy) == node({"n": inner, "z": leaf(*batch, T)}, batch, **kind)

    def test_as_an_entry(self):
        lazy = lazy_stack([TensorDict(a=torch.ones(T)) for _ in range(B)])
        inner = node({"a": leaf(B, T)}, [B], cls="LazyStackedTensorDict", tail=",\n    stack_dim=0")
        assert repr(TensorDict({"l": lazy}, [B])) == node({"l": inner}, [B])


class TestOtherContainers_ours:
    def test_params(self):
        params = TensorDictParams(TensorDict({"w": torch.ones(2), "n": {"b": torch.ones(3)}}))
        inner = node({"b": leaf(3, cls="Parameter")})
        assert (
            repr(params)
            == f"TensorDictParams(params={node({'n': inner, 'w': leaf(2, cls='Parameter')})})"
        )

    def test_tensorclass(self):
        step = Step(obs=torch.ones(B), task="reach", batch_size=[B])
        expected = dedent("""\
            Step(
                obs=Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False),
                task=NonTensorData(data=reach, batch_size=torch.Size([2]), device=None),
                batch_size=torch.Size([2]),
                device=None,
                is_shared=False)""")
        assert repr(step) == expected
        assert repr(TensorDict({"s": step}, [B])) == node({"s": expected}, [B])
