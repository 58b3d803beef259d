"""What a page tells of a population: fitness, lineage, hyper-parameters; and of damaged rows."""

import copy
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raffia.report import summarise, write_report
from raffia.report.folder import read_run
from raffia.report.lineage import read_lineage

from .made_runs import brief_rows, config, write_run

pytest.importorskip("matplotlib")

RATES = [[0.01, 0.1, 0.001, 0.5], [0.1, 0.1, 0.2, 0.01], [0.2, 0.1, 0.4, 0.1]]
FIRST = {"rate": RATES[0], "gamma": [0.99] * 4, "beta": [1.0, 2.0, 1.0, 1.0]}


def lived():
    """Three generations of four: 1 is the best, then its heir 4, then that one's child 6.

    By place:  0 1 2 3  ->  1 4 5 0  ->  4 1 6 7, and 5 comes to grief.
    """
    return [
        start(),
        evaluated(1, [1.0, 9.0, 2.0, None], [0, 1, 2, 3]),
        born(1, [1.0, 9.0, 2.0, None], [1, 1, 1, 0], [1, 4, 5, 0], [1, 1, 1, 0])
        | {"kinds": ["none", "none", "hyper", "parameters"]}
        | {"changes": ["", "", "rate 0.1 -> 0.2", "120 weights of 3 tensors"]},
        evaluated(2, [8.0, 11.0, None, 3.0], [1, 4, 5, 0]),
        born(2, [8.0, 11.0, None, 3.0], [1, 0, 1, 3], [4, 1, 6, 0], [4, 1, 4, 0])
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
    best = max(one for one in fitness if one is not None)
    at = {"update": 50 * number, "env_step": 500 * number, "seconds": 9.0 * number}
    told = {"mean_return": best, "returns": [best - 1, best + 1], "fitness": fitness}
    return {"kind": "evaluate", **at, **told, "members": members}


def born(number, fitness, parents, members, parent_members):
    at = {"update": 50 * number, "env_step": 500 * number, "seconds": 9.0 * number}
    who = {"parents": parents, "members": members, "parent_members": parent_members}
    made = {"kinds": ["none"] * len(members), "changes": [""] * len(members)}
    made["hyper"] = {**FIRST, "rate": RATES[number]}
    return {"kind": "generation", **at, "generation": number, "fitness": fitness, **who, **made}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of the run as it was lived."""
    return page_of(tmp_path_factory.mktemp("lived"), made=settings_of())


def settings_of(size=4, **more):
    return config(target=None) | {"population": {"size": size, "eval_loop": 1, **more}}


def page_of(tmp_path, rows=None, made=None, name="run"):
    run = write_run(tmp_path / name, lived() if rows is None else rows, made, extras=False)
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


def test_what_is_told(page):
    text = section(page)
    told = words(text)
    for part in [
        "4 members, 2 generations after the first.",
        "The best is member 6, a descendant of member 1.",
        "All living members descend from 2 of the 4 members",
        "2 members diverged",
        "The same in all members at all times: gamma 0.99.",
    ]:
        assert part in told, part
    assert "For a population, an evaluation is that of its best member." in words(page)
    assert "was left out" not in notes(page)
    captions = [words(one).split() for one in re.findall(r"<figcaption>.*?</figcaption>", text)]
    assert captions == [["Fitness", "by", "member"], ["rate", "(log", "scale)"], ["beta"]]


@pytest.mark.parametrize(
    ("rows", "made", "told"),
    [
        (lived()[:1], settings_of(), ["No evaluation of its members has been written yet."]),
        (lived()[:2], settings_of(), ["The best is member 1, which was there from the start."]),
        (lived()[:2], settings_of(), ["at all times: gamma 0.99.", "No change was made"]),
        (lived()[:-1], settings_of(), ["The best is member 4, a descendant of member 1."]),
        (lived()[:-1], settings_of(), ["They have not been evaluated since selection"]),
        (lived(), settings_of(eval_loop=3), ["the mean of the last 3 evaluations"]),
        (lived(), None, ["4 members, 2 generations"]),  # the rows say the size
    ],
)
def test_what_is_told_of_other_runs(tmp_path, rows, made, told):
    text = words(section(page_of(tmp_path, rows, made)))
    assert all(part in text for part in told)


def test_the_tree_says_of_each_member_what_became_of_it(page):
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
    rings = re.findall(r"<title>(\S+ \d+)[^<]*</title></circle>", "".join(ringed(tree)))
    assert rings == ["member 1", "member 4"]
    # The way of the best is strong and of its founder's tone.
    strong = re.findall(r'<path d="([^"]*)"[^>]*style="stroke:var\(--(c\d)\);[^>]*3.2px', tree)
    [(way, tone)] = strong
    assert tone == "c0" and way.count("M") == 2  # 1 -> 4 -> 6
    faint = re.findall(r'opacity="\.5" style="stroke:var\(--(c\d)\)', tree)
    assert sorted(faint) == ["c0", "c1"]  # and from member 0; of 2 and 3 no line begins


def test_changes_of_the_form_are_told_by_what_the_network_is_for(tmp_path):
    rows = lived()
    first = [
        ("none", ""),
        ("activation", "dynamics_network.fc_reward_head: relu -> silu"),
        ("architecture", "prediction_network.fc_policy_head.net: layer 1 more"),
        ("architecture", "mine.inner: 16 nodes less in layer 0"),
    ]
    last = [("none", ""), ("none", ""), ("activation", "q1: elu -> gelu")]
    last += [("architecture", "v: one layer stays")]
    for row, changes in ((rows[2], first), (rows[4], last)):
        row["kinds"], row["changes"] = map(list, zip(*changes, strict=True))
    tree = tree_of(page_of(tmp_path, rows, settings_of()))
    for said in [
        "; activation of the head of the value prefix: relu → silu<",
        "; the policy head: layer 1 more<",
        "; mine.inner: 16 nodes less in layer 0<",
        "; activation of head Q1: elu → gelu<",
        "; head V: one layer stays<",
    ]:
        assert said in tree, said


def ringed(tree):
    return [one for one in re.findall(r"<circle.*?</circle>", tree) if "var(--paper)" in one]


def test_tables_of_the_last_generation_and_of_the_best_ones_way(page):
    last, way = re.findall(r"<tbody>.*?</tbody>", section(page))
    cells = [
        [words(cell).strip() for cell in re.findall(r"<td.*?</td>", row)]
        for row in re.findall(r"<tr>.*?</tr>", last)
    ]
    change = "rate 0.1 → 0.4 (generation 2)"
    assert cells[0] == ["6 (best)", "14.25", "4", "11.00", change, "0.4", "1"]
    assert [row[0] for row in cells] == ["6 (best)", "4", "1", "0"]
    assert cells[1][2:5] == ["itself", "11.00", "none"]
    assert words(way).split() == ["2", "6", "rate", "0.1", "→", "0.4"]


@pytest.mark.parametrize("members", [None, [0, 1], "all", [0, 1, 2, 3]])
def test_the_first_row_may_say_the_members_and_their_hyper_parameters(tmp_path, members):
    first = {name: value for name, value in start().items() if name != "members"}
    if members is not None:
        first["members"] = members
    run = write_run(tmp_path / "run", [first, *lived()[1:]], settings_of(), extras=False)
    lineage, notes = read_lineage(read_run(run))
    whole, column = members == [0, 1, 2, 3], lineage.columns[0]
    assert column.members == (0, 1, 2, 3) and bool(column.hyper) == whole
    assert not whole or column.hyper["rate"] == tuple(RATES[0])
    assert bool(notes) == (members is not None and not whole)


FOUR = "is not a list of 4, so the generation was left out"


def test_long_runs_are_thinned_and_lines_keep_their_ends(tmp_path):
    made = [lived()[0], evaluated(1, [2.0, 1.0], [0, 1])]
    for number in range(1, 301):  # the second is a new child of the first each time
        row = born(1, [2.0, 1.0], [0, 0], [0, number + 1], [0, 0]) | {"generation": number}
        row |= {"kinds": ["none", "hyper"], "changes": ["", f"rate 1 -> 1.{number}"]}
        at = {"env_step": 500 * number, "hyper": {"rate": [1.0, 1 + number / 1000]}}
        made += [row | at, evaluated(number + 1, [2.0, 1.0], [0, number + 1])]
    text = page_of(tmp_path, made, settings_of(size=2))
    told = words(section(text))
    assert "64 of the 301 generations are drawn, evenly spaced" in told
    titles = re.findall(r"<title>(.*?)</title>", tree_of(text))
    assert len(titles) == 128
    assert "member 301, generation 300; fitness 1.00; from member 0; rate 1 → 1.300" in titles
    assert len(section(text)) < 150_000


def test_names_are_escaped(tmp_path):
    made = lived()
    for row in made:
        if row["kind"] == "generation":
            row["hyper"]["<b>&"] = [1.0, 2.0, 3.0, 40.0]
            row["changes"][2] = "<i>odd</i> 1 -> 2"
    text = section(page_of(tmp_path, made, settings_of()))
    assert "<b>&" not in text.replace("<b>&lt;b&gt;&amp;", "") and "<i>odd" not in text
    assert "&lt;i&gt;odd&lt;/i&gt; 1 → 2" in text


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


@pytest.mark.parametrize(("name", "value", "says"), DAMAGED)
def test_damaged_generations_are_told(tmp_path, name, value, says):
    made = lived()
    made[2] |= {name: value}
    text = page_of(tmp_path, made, settings_of())
    assert f"generation: {says} in 1 row, first at update 50" in notes(text)
    assert "The best is member 6" in words(section(text))


def test_missing_entries_and_damaged_evaluations_are_told(tmp_path):
    made = lived()
    for name in ("fitness", "kinds", "hyper"):
        del made[2][name]
    made[-1] |= {"members": [1, 2, 3]}
    text = page_of(tmp_path, made, settings_of())
    told = notes(text)
    assert all(f"generation: {name} is no" in told for name in ("fitness", "kinds", "hyper"))
    assert "evaluate: members is not a list of 4, and was left out in 1 row, first at" in told
    assert "The best is member 4" in words(section(text))


def test_after_a_lost_generation_who_goes_on_is_known_by_number(tmp_path):
    made = lived()
    del made[2]
    text = page_of(tmp_path, made, settings_of())
    titles = re.findall(r"<title>(.*?)</title>", tree_of(text))
    assert "member 1, generation 1; fitness 8.00; unchanged" in titles
    assert "member 4, generation 1; fitness 11.00" in titles  # from whom is not known
    assert "The best is member 6, a descendant of member 4." in words(section(text))


def test_of_several_runs_each_is_named_and_a_list_shows_them(tmp_path):
    runs = []
    for name, size in (("a", 4), ("b", 4), ("one", 1)):
        made = settings_of(size) | {"seed": 3 if size == 4 else 0, "name": name}
        rows = lived() if size == 4 else brief_rows(evaluations=2)
        runs.append(write_run(tmp_path / name, rows, made, extras=False))
    text = section(write_report(runs).read_text())
    assert "a: Lineage" in text and "b: Lineage" in text and "one: " not in text
    assert summarise(runs[0]).best_return == 14.25
    alone = write_report(runs[2:]).read_text()
    assert "Population" not in alone and "Of a population" not in alone


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-1, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
fours = st.lists(st.integers(0, 5) | anything, min_size=4, max_size=4)
spoilt = st.dictionaries(
    st.sampled_from(["members", "parents", "parent_members", "fitness", "kinds", "changes"])
    | st.sampled_from(["hyper", "generation", "update", "env_step"]),
    st.one_of(anything, fours, st.lists(st.integers(0, 3), min_size=4, max_size=4)),
    max_size=3,
)


@pytest.mark.slow
@given(changes=st.lists(spoilt, min_size=5, max_size=5))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_rows_give_a_page(tmp_path_factory, changes):
    made = copy.deepcopy(lived())
    for row, change in zip(made[1:], changes, strict=True):
        row |= change
    assert "</html>" in page_of(tmp_path_factory.mktemp("runs"), made, settings_of())


def test_the_best_may_be_of_a_small_line_and_without_an_elite(tmp_path):
    first, then = [1.0, 2.0, 9.0, 3.0], [1.0, 1.0, 1.0, 8.0]
    generation = born(1, first, [0, 0, 0, 2], [0, 4, 5, 2], [0, 0, 0, 2])
    generation |= {"kinds": ["hyper"] * 4, "changes": ["rate 1 -> 2"] * 4}
    made = [evaluated(1, first, [0, 1, 2, 3]), generation]
    told = words(section(page_of(tmp_path, made, settings_of())))
    assert "The best is member 2, which was there from the start." in told
    text = section(page_of(tmp_path, [*made, evaluated(2, then, [0, 4, 5, 2])], settings_of()))
    assert "from member 2, with the best in bold from member 0" in words(text)
    assert not ringed(tree_of(text))
    strong = re.search(r'd="(M[^"]*)"[^>]*style="stroke:var\(--c0\);stroke-width:3', tree_of(text))
    assert strong is not None
