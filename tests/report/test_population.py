"""The page of a population: fitness, lineage, hyper-parameters, and damaged rows."""

import copy
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raffia.report import write_report
from raffia.report.folder import read_run
from raffia.report.lineage import read_lineage
from tests.marks import slow_among

from .made_runs import config, write_run

pytest.importorskip("matplotlib")

RATES = [[0.01, 0.1, 0.001, 0.5], [0.1, 0.1, 0.2, 0.01], [0.2, 0.1, 0.4, 0.1]]
FIRST = {"rate": RATES[0], "gamma": [0.99] * 4, "beta": [1.0, 2.0, 1.0, 1.0]}


def generations():
    """Three generations of four: 1 is the best, then its child 4, then that one's child 6.

    By row:  0 1 2 3  ->  1 4 5 0  ->  4 1 6 7, and 5 diverges.
    """
    return [
        start(),
        evaluated(1, [1.0, 9.0, 2.0, None], [0, 1, 2, 3]),
        selected(1, [1.0, 9.0, 2.0, None], [1, 1, 1, 0], [1, 4, 5, 0], [1, 1, 1, 0])
        | {"kinds": ["none", "none", "hyper", "parameters"]}
        | {"changes": ["", "", "rate 0.1 -> 0.2", "120 weights of 3 tensors"]},
        evaluated(2, [8.0, 11.0, None, 3.0], [1, 4, 5, 0]),
        selected(2, [8.0, 11.0, None, 3.0], [1, 0, 1, 3], [4, 1, 6, 0], [4, 1, 4, 0])
        | {"kinds": ["none", "none", "hyper", "activation"]}
        | {"changes": ["", "", "rate 0.1 -> 0.4", "policy: relu -> tanh"]},
        evaluated(3, [10.0, 9.5, 14.25, 2.0], [4, 1, 6, 0]),
    ]


def start(size=4):
    return {"kind": "start", "update": 0, "env_step": 0, "seconds": 0.0} | {
        "members": list(range(size)),
        "hyper": {name: values[:size] for name, values in FIRST.items()},
    }


def evaluated(number, fitness, members):
    best = max(value for value in fitness if value is not None)
    time = {"update": 50 * number, "env_step": 500 * number, "seconds": 9.0 * number}
    values = {"mean_return": best, "returns": [best - 1, best + 1], "fitness": fitness}
    return {"kind": "evaluate", **time, **values, "members": members}


def selected(number, fitness, parents, members, parent_members):
    time = {"update": 50 * number, "env_step": 500 * number, "seconds": 9.0 * number}
    lineage = {"parents": parents, "members": members, "parent_members": parent_members}
    changes = {"kinds": ["none"] * len(members), "changes": [""] * len(members)}
    changes["hyper"] = {**FIRST, "rate": RATES[number]}
    return {
        "kind": "generation",
        **time,
        "generation": number,
        "fitness": fitness,
        **lineage,
        **changes,
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of these generations."""
    return page_of(tmp_path_factory.mktemp("lived"), settings=settings_of())


def settings_of(size=4, **more):
    return config(target=None) | {"population": {"size": size, "eval_loop": 1, **more}}


def page_of(tmp_path, rows=None, settings=None, name="run"):
    run = write_run(
        tmp_path / name, generations() if rows is None else rows, settings, extras=False
    )
    return write_report([run]).read_text(encoding="utf-8")


def section(text):
    found = re.search(r"<h2>Population</h2>.*?(?=<h2>)", text, re.DOTALL)
    return found[0] if found else ""


def words(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def notes(text):
    found = re.search(r'<div class="notes">.*?</div>', text, re.DOTALL)
    return words(found[0]) if found else ""


def tree_of(text):
    return re.search(r'<svg[^>]*aria-label="Lineage".*?</svg>', text, re.DOTALL)[0]


def test_the_summary_of_a_population(page):
    text = section(page)
    summary = words(text)
    for part in [
        "4 members, 2 generations after the first.",
        "The best is member 6, a descendant of member 1.",
        "All living members descend from 2 of the initial 4.",
        "2 members diverged",
        "The same in all members at all times: gamma 0.99.",
    ]:
        assert part in summary, part
    assert "For a population, an evaluation is that of its best member." in words(page)
    assert "was left out" not in notes(page)
    captions = [
        words(caption).split() for caption in re.findall(r"<figcaption>.*?</figcaption>", text)
    ]
    assert captions == [["Fitness", "by", "member"], ["rate", "(log", "scale)"], ["beta"]]


@pytest.mark.parametrize(
    ("rows", "config", "parts"),
    [
        (generations()[:1], settings_of(), ["No evaluation of its members has been written yet."]),
        (
            generations()[:2],
            settings_of(),
            ["The best is member 1, which was there from the start."],
        ),
        (generations()[:2], settings_of(), ["at all times: gamma 0.99.", "No change was made"]),
        (generations()[:-1], settings_of(), ["The best is member 4, a descendant of member 1."]),
        (generations()[:-1], settings_of(), ["They have not been evaluated since selection"]),
        (generations(), settings_of(eval_loop=3), ["the mean of the last 3 evaluations"]),
        (generations(), None, ["4 members, 2 generations"]),  # the rows say the size
    ],
)
def test_the_summary_of_other_runs(tmp_path, rows, config, parts):
    text = words(section(page_of(tmp_path, rows, config)))
    assert all(part in text for part in parts)


def test_the_tree_shows_fitness_and_changes_of_each_member(page):
    tree = tree_of(page)
    titles = re.findall(r"<title>(.*?)</title>", tree)
    assert len(titles) == 12
    for title in [
        "member 1, generation 0; fitness 9.00",
        "member 3, generation 0; fitness diverged",
        "member 1, generation 1; fitness 8.00; unchanged",
        "member 5, generation 1; fitness diverged; from member 1; rate 0.1 → 0.2",
        "member 0, generation 1; fitness 3.00; unchanged; noise on 120 weights of 3 tensors",
        "member 6, generation 2; fitness 14.25; from member 4; rate 0.1 → 0.4",
        "member 0, generation 2; fitness 2.00; unchanged; activation of policy: relu → tanh",
    ]:
        assert title in titles, title
    assert tree.count("stroke:currentColor;stroke-width:2px") == 2  # crosses
    rings = re.findall(r"<title>(\S+ \d+)[^<]*</title></circle>", "".join(marked_circles(tree)))
    assert rings == ["member 1", "member 4"]
    # The path of the best is bold and has its founder's colour.
    strong = re.findall(r'<path d="([^"]*)"[^>]*style="stroke:var\(--(c\d)\);[^>]*3.2px', tree)
    [(path, tone)] = strong
    assert tone == "c0" and path.count("M") == 2  # 1 -> 4 -> 6
    faint = re.findall(r'opacity="\.5" style="stroke:var\(--(c\d)\)', tree)
    assert sorted(faint) == ["c0", "c1"]  # and from member 0; no line starts at 2 and 3


def marked_circles(tree):
    return [
        circle for circle in re.findall(r"<circle.*?</circle>", tree) if "var(--paper)" in circle
    ]


def test_tables_of_the_last_generation_and_of_the_best_s_path(page):
    last, path = re.findall(r"<tbody>.*?</tbody>", section(page))
    cells = [
        [words(cell).strip() for cell in re.findall(r"<td.*?</td>", row)]
        for row in re.findall(r"<tr>.*?</tr>", last)
    ]
    change = "rate 0.1 → 0.4 (generation 2)"
    assert cells[0] == ["6 (best)", "14.25", "4", "11.00", change, "0.4", "1"]
    assert [row[0] for row in cells] == ["6 (best)", "4", "1", "0"]
    assert cells[1][2:5] == ["itself", "11.00", "none"]
    assert words(path).split() == ["2", "6", "rate", "0.1", "→", "0.4"]


@pytest.mark.parametrize("members", [None, [0, 1], "all", [0, 1, 2, 3]])
def test_the_first_row_may_name_the_members_and_their_hyper_parameters(tmp_path, members):
    first = {name: value for name, value in start().items() if name != "members"}
    if members is not None:
        first["members"] = members
    run = write_run(tmp_path / "run", [first, *generations()[1:]], settings_of(), extras=False)
    lineage, notes = read_lineage(read_run(run))
    valid, column = members == [0, 1, 2, 3], lineage.columns[0]
    assert column.members == (0, 1, 2, 3) and bool(column.hyper) == valid
    assert not valid or column.hyper["rate"] == tuple(RATES[0])
    assert bool(notes) == (members is not None and not valid)


FOUR = "is not a list of 4, so the generation was left out"


def test_long_runs_are_thinned_and_lines_keep_their_ends(tmp_path):
    rows = [generations()[0], evaluated(1, [2.0, 1.0], [0, 1])]
    for number in range(1, 301):  # the second is a new child of the first each time
        row = selected(1, [2.0, 1.0], [0, 0], [0, number + 1], [0, 0]) | {"generation": number}
        row |= {"kinds": ["none", "hyper"], "changes": ["", f"rate 1 -> 1.{number}"]}
        changes = {"env_step": 500 * number, "hyper": {"rate": [1.0, 1 + number / 1000]}}
        rows += [row | changes, evaluated(number + 1, [2.0, 1.0], [0, number + 1])]
    text = page_of(tmp_path, rows, settings_of(size=2))
    summary = words(section(text))
    assert "64 of the 301 generations are drawn, evenly spaced" in summary
    titles = re.findall(r"<title>(.*?)</title>", tree_of(text))
    assert len(titles) == 128
    assert "member 301, generation 300; fitness 1.00; from member 0; rate 1 → 1.300" in titles
    assert len(section(text)) < 150_000


DAMAGED = [
    ("parents", [0, 1], f"parents {FOUR}"),
    ("parents", [0, 1, 2, 4], f"parents {FOUR}"),
    ("parents", [0, 1, 2, True], f"parents {FOUR}"),
    ("members", None, f"members {FOUR}"),
    ("parent_members", "x", f"parent_members {FOUR}"),
    ("fitness", [1.0], "fitness is not a list of 4, and was left out"),
    ("kinds", {}, "kinds is not a list of 4 texts, and was left out"),
    ("changes", [1, 2, 3, 4], "changes is not a list of 4 texts, and was left out"),
    ("hyper", [], "hyper is not an object, and was left out"),
    ("hyper", {"rate": [1.0]}, "rate of hyper is not a list of 4, and was left out"),
]


@pytest.mark.parametrize(
    ("name", "value", "note"), slow_among(DAMAGED, *DAMAGED[1:3], DAMAGED[4], DAMAGED[7])
)
def test_damaged_generations_are_noted(tmp_path, name, value, note):
    rows = generations()
    rows[2] |= {name: value}
    text = page_of(tmp_path, rows, settings_of())
    assert f"generation: {note} in 1 row, first at update 50" in notes(text)
    assert "The best is member 6" in words(section(text))


def test_missing_entries_and_damaged_evaluations_are_noted(tmp_path):
    rows = generations()
    for name in ("fitness", "kinds", "hyper"):
        del rows[2][name]
    rows[-1] |= {"members": [1, 2, 3]}
    text = page_of(tmp_path, rows, settings_of())
    noted = notes(text)
    assert all(f"generation: {name} is no" in noted for name in ("fitness", "kinds", "hyper"))
    assert "evaluate: members is not a list of 4, and was left out in 1 row, first at" in noted
    assert "The best is member 4" in words(section(text))


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-1, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
fours = st.lists(st.integers(0, 5) | anything, min_size=4, max_size=4)
damaged = st.dictionaries(
    st.sampled_from(["members", "parents", "parent_members", "fitness", "kinds", "changes"])
    | st.sampled_from(["hyper", "generation", "update", "env_step"]),
    st.one_of(anything, fours, st.lists(st.integers(0, 3), min_size=4, max_size=4)),
    max_size=3,
)


@pytest.mark.slow
@given(changes=st.lists(damaged, min_size=5, max_size=5))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_rows_give_a_page(tmp_path_factory, changes):
    rows = copy.deepcopy(generations())
    for row, change in zip(rows[1:], changes, strict=True):
        row |= change
    assert "</html>" in page_of(tmp_path_factory.mktemp("runs"), rows, settings_of())


def test_the_best_may_have_few_relatives_and_no_elite(tmp_path):
    first, second = [1.0, 2.0, 9.0, 3.0], [1.0, 1.0, 1.0, 8.0]
    generation = selected(1, first, [0, 0, 0, 2], [0, 4, 5, 2], [0, 0, 0, 2])
    generation |= {"kinds": ["hyper"] * 4, "changes": ["rate 1 -> 2"] * 4}
    rows = [evaluated(1, first, [0, 1, 2, 3]), generation]
    summary = words(section(page_of(tmp_path, rows, settings_of())))
    assert "The best is member 2, which was there from the start." in summary
    text = section(page_of(tmp_path, [*rows, evaluated(2, second, [0, 4, 5, 2])], settings_of()))
    assert "from member 2, with the best in bold from member 0" in words(text)
    assert not marked_circles(tree_of(text))
    strong = re.search(r'd="(M[^"]*)"[^>]*style="stroke:var\(--c0\);stroke-width:3', tree_of(text))
    assert strong is not None
