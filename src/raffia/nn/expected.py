"""The check of a sequence's keys when it is built: a misspelt key is an error there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raffia.hints import nearest
from raffia.nn.graph import Graph, Modules, graph_of
from raffia.nn.graph_record import GraphNode
from raffia.nn.labels import key_text
from raffia.nn.shapes import plain_keys
from raffia.tensordict.keys import NestedKey, is_under, overlap


def check_in_keys(modules: Modules, expected: Sequence[NestedKey]) -> None:
    """Raise ValueError unless the keys that the modules need from outside are those expected.

    The error names the module that reads a key which nobody writes before, and the nearest key that
    is there, with the module that writes it.
    """
    modules = list(modules.items() if isinstance(modules, Mapping) else modules)
    expected = plain_keys([expected] if isinstance(expected, str) else expected)
    graph = graph_of(modules)
    for position, node in enumerate(graph.nodes):
        for key in _from_outside(graph, node):
            if not any([overlap(key, e) for e in expected]):
                raise ValueError(_unexpected(graph, position, key, expected))
    read = graph.in_keys
    for key in expected:
        if not any([overlap(key, r) for r in read]):
            raise ValueError(_not_needed(graph, key, expected))


def _from_outside(graph: Graph, node: GraphNode) -> list[NestedKey]:
    return [e.key for e in graph.edges if e.source is None and e.target == node.name]


def _module(node: GraphNode) -> str:
    return f'module "{node.name}" ({node.label})'


def _near(key: NestedKey, keys: Iterable[NestedKey]) -> NestedKey | None:
    spelt = {key_text(k): k for k in keys}
    near = nearest(key_text(key), spelt)
    return None if near is None else spelt[near]


def _unexpected(graph: Graph, position: int, key: NestedKey, expected: Sequence[NestedKey]) -> str:
    reader, earlier = graph.nodes[position], graph.nodes[:position]
    there = dict.fromkeys(expected, "which is expected from outside")
    there |= {k: f"which {_module(n)} writes" for n in earlier for k in n.out_keys}
    text = f"{_module(reader)} reads {key!r}, which is neither in expect_in_keys nor written before"
    later = [n for n in graph.nodes[position:] if any([is_under(key, k) for k in n.out_keys])]
    near = _near(key, there)
    silent = [n for n in earlier if not n.in_keys and not n.out_keys]
    if later and later[0] is not reader:
        text += f". {_module(later[0])} writes it, but runs later: put that one first."
    elif near is not None:
        text += f". Did you mean {near!r}, {there[near]}?"
    elif silent:
        text += (
            f". If {_module(silent[-1])} writes it, declare it: "
            f"WrapModule({silent[-1].label}, out_keys=[{key!r}])."
        )
    else:
        text += f"; what is there: {list(there)}."
    return f"{text} If it comes from outside: expect_in_keys={[*expected, key]}"


def _not_needed(graph: Graph, key: NestedKey, expected: Sequence[NestedKey]) -> str:
    rest = [k for k in expected if k != key]
    text = f"expect_in_keys names {key!r}, which no module reads from outside"
    readers = {k: n for n in reversed(graph.nodes) for k in n.in_keys}
    near = _near(key, readers)
    if key in readers:
        writer = next(n for n in graph.nodes if any([is_under(key, k) for k in n.out_keys]))
        text += f": {_module(writer)} writes it before {_module(readers[key])} reads it."
    elif near is not None:
        text += f". Did you mean {near!r}, which {_module(readers[near])} reads?"
    else:
        text += "."
    return f"{text} Without it: expect_in_keys={rest}"
