"""The table of all methods: every public name of the containers has a row or a reason."""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import raffia
from benchmarks import methods
from benchmarks.method_rules import FRESH, KINDS, LEFT_OUT, NOT_COMPARED, NOT_FOR, RULES, Inputs


def missing_names(container: type, kind: str, rows: list[str]) -> set[str]:
    """Public names that have neither a row nor a reason."""
    timed = {methods.base(row) for row in rows}
    return {*methods.public_names(container)} - timed - {*LEFT_OUT} - {*NOT_FOR[KINDS[kind]]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_name_has_a_row_or_a_reason(kind):
    container = getattr(raffia, kind)
    assert not missing_names(container, kind, methods.row_names(kind, [container]))
    assert all(reason for reason in [*LEFT_OUT.values(), *NOT_FOR[KINDS[kind]].values()])

    class More(container):
        """A new method gets a row, and is missing without one."""

        def more(self) -> None: ...

    if kind == "TensorDict":
        rows = methods.row_names(kind, [More])
        assert "more" in rows
        assert missing_names(More, kind, [row for row in rows if row != "more"]) == {"more"}


def test_rules_and_reasons_are_for_existing_names():
    names = {*methods.public_names(raffia.TensorDict)}
    names |= {*methods.public_names(raffia.LazyStackedTensorDict)}
    unknown = {row for row in RULES if methods.base(row) not in names and row[:2] != "__"}
    assert not unknown
    assert {*LEFT_OUT} <= names
    rows = {row for kind in KINDS for row in methods.row_names(kind, [getattr(raffia, kind)])}
    rows |= {row for unfit in NOT_FOR.values() for row in unfit}
    assert rows >= FRESH
    assert rows >= NOT_COMPARED


ARGUMENTS_LEFT_OUT = {  # of methods of both; docs/tensordict.md gives the reasons
    **dict.fromkeys(("memmap", "save", "dumps"), {"archive", "compression", "atomic"}),
    "memmap_": {"atomic"},
    "memmap_like": {"archive"},
    "load_memmap": {"num_threads", "allow_pickle"},
    "load_memmap_": {"allow_pickle", "mode"},
    "memmap_refresh_": {"allow_pickle"},
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), {"empty_lazy"}),
    "new_tensor": {"pin_memory"},
    "to_module": {"memo"},
    "tolist": {"as_linked_list"},
    "copy_at_": {"fast"},
    **dict.fromkeys(("lazy_stack", "maybe_dense_stack"), {"items"}),  # ours: `input`
}


def arguments(method: Any) -> tuple[set[str], bool]:
    """Names of the public arguments of a method, and whether it takes any others by name."""
    found = inspect.signature(method).parameters.values()
    kinds = {parameter.kind for parameter in found}
    names = {p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    names = {name for name in names - {"self", "cls"} if not name.startswith("_")}
    return names, inspect.Parameter.VAR_KEYWORD in kinds


@pytest.mark.parametrize("kind", KINDS)
def test_no_argument_of_the_peer_is_missing_without_a_reason(kind):
    peer = getattr(pytest.importorskip("tensordict"), kind)
    missing: dict[str, set[str]] = {}
    for name in methods.public_names(getattr(raffia, kind)):
        theirs, mine = (getattr(cls, name, None) for cls in (peer, getattr(raffia, kind)))
        if callable(theirs) and callable(mine):
            names, any_others = arguments(mine)
            lacking = arguments(theirs)[0] - names
            if lacking and not any_others:
                missing[name] = lacking
    text = (Path(__file__).parents[1] / "docs" / "tensordict.md").read_text()
    for name, lacking in missing.items():
        assert lacking <= ARGUMENTS_LEFT_OUT.get(name, set()), name
        for argument in lacking - {"items"}:
            assert f"`{argument}=`" in text
    assert kind != "TensorDict" or {*missing} == {*ARGUMENTS_LEFT_OUT} - {
        "lazy_stack",
        "maybe_dense_stack",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_runs(kind):
    failed = {}
    for row in methods.row_names(kind, [getattr(raffia, kind)]):
        inputs = Inputs(raffia, kind, 12)
        (td,) = methods.containers(row, inputs, 1)
        try:
            methods.rule_of(row)(td, inputs)
        except Exception as error:
            failed[row] = f"{type(error).__name__}: {error}"
        inputs.close()
    assert not failed


@pytest.mark.slow
def test_a_row_whose_results_differ_is_not_timed():
    inputs = {side: Inputs(raffia, "TensorDict", 12) for side in ("ours", "peer")}
    assert isinstance(methods.measure("neg", "TensorDict", inputs, 1), methods.Timed)
    inputs["peer"].td["l0"].add_(1)
    failed = methods.measure("neg", "TensorDict", inputs, 1)
    assert isinstance(failed, methods.Failed)
    assert re.search("results differ: at 'result l0'", failed.reason)


@pytest.mark.parametrize("row", sorted(FRESH - {"batch_size(set)"}))
def test_each_call_of_a_row_that_changes_entries_has_its_own_container(row):
    inputs = Inputs(raffia, "LazyStackedTensorDict", 12)
    first, second = methods.containers(row, inputs, 2)
    assert first is not second
    assert methods.containers("neg", inputs, 2)[0] is methods.containers("neg", inputs, 2)[1]
    pairs = zip(first._leaves([]), second._leaves([]), strict=True)
    assert all(a is not b and torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("tensordict"), reason="needs the peer")
def test_the_command_prints_rows_means_and_left_out_names():
    command = [sys.executable, "-m", "benchmarks.methods", "--sizes", "12", "--rounds", "1"]
    result = subprocess.run([*command, "--ops", "^(neg|any)$"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^neg +dense +12 ", result.stdout, re.MULTILINE)
    assert "lazy, 12 leaves: 2 rows, geometric mean" in result.stdout
    assert "left out: cuda: needs an accelerator" in result.stdout
