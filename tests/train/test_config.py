"""Configs from and to JSON, YAML and the command line, and the errors for mistakes."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raffia.recipes import ALGORITHMS
from raffia.train.config import (
    ConfigError,
    from_command_line,
    from_json,
    read_config,
    setting_names,
    to_json,
)
from tests.marks import slow_among


@dataclass(frozen=True, kw_only=True)
class Inner:
    """What lies within."""

    rate: float = 0.5  # of something
    kinds: tuple[Literal["one", "two"], ...] = ("one",)  # that are known
    size: Literal[64, 96] = 64  # pixels
    bounds: tuple[float, int] = (0.0, 3)  # lower and upper

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate={self.rate} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """What lies around it."""

    name: str = "plain"  # anything
    steps: int = 7  # to be made
    quick: bool = False  # or slow
    goal: float | None = None  # where to end
    sizes: tuple[int, ...] | None = None  # of something, or of nothing
    exact: bool | None = None  # or not, or as it comes
    inner: Inner = field(default_factory=Inner)


def parse(*words, default=None):
    default = Outer() if default is None else default
    return from_command_line(default, words, prog="prog", description="What it does.")


inners = st.builds(
    Inner,
    rate=st.floats(min_value=0, allow_nan=False),
    kinds=st.lists(st.sampled_from(["one", "two"])).map(tuple),
    size=st.sampled_from([64, 96]),
    bounds=st.tuples(st.floats(allow_nan=False), st.integers()),
)
goals = st.none() | st.floats(allow_nan=False)
plain = dict(name=st.text(), steps=st.integers(), quick=st.booleans())
plain["sizes"] = st.none() | st.lists(st.integers()).map(tuple)
plain["exact"] = st.none() | st.booleans()
outers = st.builds(Outer, **plain, goal=goals, inner=inners)


@given(outers)
@settings(deadline=None, max_examples=40)
def test_configs_round_trip_through_json(config):
    text = json.dumps(to_json(config), allow_nan=False)
    assert from_json(Outer, json.loads(text)) == config


@given(outers, outers)
@settings(deadline=None, max_examples=30)
def test_a_complete_config_overrides_its_base(config, base):
    assert from_json(Outer, to_json(config), base=base) == config


@given(outers)
@settings(deadline=None, max_examples=30)
def test_configs_round_trip_through_yaml(tmp_path_factory, config):
    import yaml

    # YAML 1.2 has numbers that are texts to PyYAML, which writes them bare.
    assume(not re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", config.name))
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(yaml.safe_dump(to_json(config)), encoding="utf-8")
    assert read_config(Outer, path) == config


def test_missing_settings_come_from_the_base_or_the_default():
    base = Outer(steps=9, inner=Inner(rate=2.0, size=96))
    found = from_json(Outer, {"inner": {"size": 64}}, base=base)
    assert found == replace(base, inner=Inner(rate=2.0))
    assert from_json(Outer, {"inner": {"size": 96}}) == Outer(inner=Inner(size=96))
    assert type(from_json(Inner, {"rate": 2}).rate) is float  # whole numbers are numbers
    kind = ALGORITHMS["efficientzero"].config
    assert from_json(kind, json.loads(json.dumps(to_json(kind(seed=3))))) == kind(seed=3)


WRONG_DATA = [
    ({"inner": {"rat": 1}}, "no setting inner.rat; did you mean inner.rate?"),
    ({"raet": 1}, "no setting raet; did you mean inner.rate?"),
    ({"qqq": 1}, "no setting qqq; there are name, steps, quick, goal, sizes, exact, inner.rate"),
    ({"inner.rate": 1}, "inner.rate is written inner: {rate: ...}"),
    ({"inner": 3}, "inner must be a table of settings; got 3"),
    ([], "a config must be a table of settings; got []"),
    ({"steps": 1.5}, "steps must be a whole number; got 1.5"),
    ({"steps": True}, "steps must be a whole number; got true"),
    ({"quick": 1}, "quick must be true or false; got 1"),
    ({"name": 1}, "name must be a text; got 1"),
    ({"goal": "x"}, 'goal must be a number or null; got "x"'),
    ({"inner": {"rate": "x"}}, 'inner.rate must be a number; got "x"'),
    ({"inner": {"size": 64.0}}, "inner.size must be one of 64, 96; got 64.0"),
    ({"inner": {"kinds": ["two", "on"]}}, 'inner.kinds[1] must be one of "one", "two"; got'),
    ({"inner": {"kinds": "one"}}, 'inner.kinds must be a list, each one of "one", "two"; got'),
    ({"inner": {"bounds": [1]}}, "inner.bounds must be a list of 2: a number, a whole number"),
    ({"inner": {"rate": -1}}, "inner: rate=-1.0 must not be negative"),
]


@pytest.mark.parametrize(("data", "text"), WRONG_DATA)
def test_errors_in_data_name_the_setting(data, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        from_json(Outer, data)


WRONG_FILES = [
    ("a.toml", "", "must end with .json, .yaml or .yml"),
    ("a.json", None, "there is no file "),
    ("a.json", "[" * 100_000, "is not JSON: "),
    ("a.json", '{"goal": 1' + "0" * 400 + "}", "goal must be a number or null; got 1000"),
    ("a.yaml", "a: [", "is not valid YAML: "),
    ("a.json", '{"steps": 1, "steps": 2}', "'steps' occurs twice"),
    ("a.yaml", "inner: {rate: 1, rate: 2}", "rate occurs twice"),
    ("a.yaml", "seed: !!python/object:os.system 1", "is not valid YAML: "),
    ("a.yaml", "a: &b [*b]", "an alias of a value that contains it"),
    ("a.json", '{"stesp": 1}', "a.json: there is no setting stesp; did you mean steps?"),
]


@pytest.mark.parametrize(("name", "content", "text"), WRONG_FILES)
def test_errors_in_files_name_the_file(tmp_path, name, content, text):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_config(Outer, tmp_path / name)


def test_yaml_exponents_are_numbers_and_an_empty_file_is_empty(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("name: '1e3'\ninner:\n  rate: 1e-3\n")
    assert read_config(Outer, path) == Outer(name="1e3", inner=Inner(rate=1e-3))
    path.write_text("# nothing\n")
    assert read_config(Outer, path, base=Outer(steps=1)) == Outer(steps=1)
    path = tmp_path / "config.json"  # that of a run can be given again
    path.write_text(json.dumps(to_json(Outer(steps=4)) | {"run": {"version": "0"}}))
    assert read_config(Outer, path).steps == 4


def test_the_command_line_sets_any_field():
    assert parse("--inner.bounds", "-1", "2", "--steps=-3").inner.bounds == (-1.0, 2)
    assert parse("--steps", "1", "--steps=2").steps == 2
    assert parse("--name=a=b").name == "a=b"
    given = Outer(quick=True, goal=2.0, inner=Inner(kinds=("two", "one")))
    found = parse("--no-quick", "--goal", "none", "--inner.kinds", default=given)
    assert found == Outer(inner=Inner(kinds=()))
    found = parse("--exact", "True", "--sizes", "None", default=Outer(sizes=(2,)))
    assert (found.exact, found.sizes, parse("--exact", "false").exact) == (True, None, False)


def test_types_that_no_setting_can_have_are_refused_wherever_a_config_is_used():
    for hint in (list[int], dict[str, int], int | str, Inner | None, Path, Any, tuple[Path, ...]):
        kind = make_dataclass("Own", [("sizes", hint, None)], frozen=True)
        refusal = pytest.raises(TypeError, match=r"Own.sizes has the type .*, which no setting can")
        with refusal:
            to_json(kind())
        with refusal:
            from_json(kind, {})
        with refusal:
            parse("--sizes", "1", default=kind())


def test_flags_override_files_and_later_files_override_earlier_ones(tmp_path):
    (tmp_path / "one.json").write_text('{"steps": 1, "name": "one", "inner": {"rate": 1}}')
    (tmp_path / "two.yaml").write_text("{name: two}")
    args = ["--steps", "5", "--config", str(tmp_path / "one.json")]
    found = parse(*args, f"--config={tmp_path / 'two.yaml'}", default=Outer(quick=True))
    assert found == Outer(steps=5, name="two", quick=True, inner=Inner(rate=1.0))


WRONG_ARGUMENTS = [
    ("--inner.rat 1", "there is no --inner.rat; did you mean --inner.rate?"),
    ("--no_quik", "there is no --no_quik; did you mean --no_quick?"),
    ("--config", "--config needs a file"),
    ("fast --steps 1", "'fast' is not a flag; settings are given as --name value"),
    ("--steps x", 'steps must be a whole number; got "x"'),
    ("--inner.kinds one on", 'inner.kinds[1] must be one of "one", "two"; got "on"'),
    ("--inner.bounds 1", "inner.bounds must be a list of 2: a number, a whole number; got"),
    ("--inner.rate -1", "inner: rate=-1.0 must not be negative"),
    ("--steps", "--steps takes one value; got none"),
    ("--steps 1 2", "--steps takes one value; got 2: 1 2"),
    ("--quick yes", "--quick takes no value; got 'yes' after it. Write --quick or --no_quick"),
]


@pytest.mark.parametrize(("args", "text"), WRONG_ARGUMENTS)
def test_errors_on_the_command_line_are_named(args, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse(*args.split())


def as_args(config, prefix=""):
    for each in fields(config):
        value, flag = getattr(config, each.name), f"--{prefix}{each.name}"
        if isinstance(value, Inner):
            yield from as_args(value, f"{prefix}{each.name}.")
        elif each.name == "quick":
            yield flag if value else f"--{prefix}no_{each.name}"
        elif isinstance(value, tuple):
            yield from [flag, *map(str, value)]
        else:
            yield from [flag, str(value)]


@given(outers.filter(lambda config: not config.name.startswith("-")))
@settings(deadline=None, max_examples=40)
def test_arguments_are_parsed_as_tyro_parses_them(config):
    args = list(as_args(config))
    assert parse(*args) == config
    # tyro prints the help; its own reading of the same words agrees
    assert tyro.cli(Outer, args=args, use_underscores=True) == config


def without_boxes(text):
    """The text without boxes and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def help_of(default, capsys):
    with pytest.raises(SystemExit) as raised:
        parse("--help", default=default)
    assert raised.value.code == 0
    return without_boxes(capsys.readouterr().out)


def comments(kind, prefix=""):
    """(setting, the comment beside or above it) of a config, nested ones included."""
    for each in fields(kind):
        name, inner = f"{prefix}{each.name}", each.default_factory
        if is_dataclass(default := inner() if inner is not MISSING else None):
            yield from comments(type(default), f"{name}.")
            continue
        owner = next(base for base in kind.__mro__ if each.name in vars(base)["__annotations__"])
        above = []
        for line in inspect.getsource(owner).splitlines():
            if line.startswith("    # "):
                above.append(line[6:])
            elif match := re.match(rf"    {each.name}: [^#]*(?:# (.*))?", line):
                yield name, match[1] or " ".join(above)
                break
            else:
                above = []


@pytest.mark.parametrize("name", slow_among(["efficientzero", "ilql"], "ilql"))
def test_each_setting_has_its_own_comment_which_its_help_shows(name, capsys):
    config = ALGORITHMS[name].config
    text = help_of(config(), capsys)
    found = dict(comments(config))
    assert set(found) == set(setting_names(config))
    for setting, comment in found.items():
        assert comment, f"{setting} has no comment"
        shown = re.search(rf"--{re.escape(setting)}[ ,](.*?)\(default:", text)[1]
        assert shown.strip().endswith(" ".join(comment.split())), setting
    assert len(set(found.values())) > 0.9 * len(found)


@pytest.mark.parametrize("name", ["efficientzero", "ilql"])
def test_the_repr_of_a_run_is_the_call_that_makes_it(name):
    algorithm = ALGORITHMS[name]
    kinds = {type(algorithm.config()).__name__: algorithm.config}
    waiting = [algorithm.config()]
    while waiting:
        for each in fields(one := waiting.pop()):
            if is_dataclass(value := getattr(one, each.name)):
                waiting.append(value)
                kinds[type(value).__name__] = type(value)
    assert repr(algorithm.config()) == f"{algorithm.config.__name__}()"
    for run in algorithm.presets.values():
        assert len(repr(run)) < 1_200 and eval(repr(run), kinds) == run


def test_configs_and_their_help_need_no_torch():
    program = """
import sys
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.train.config import from_command_line
try:
    from_command_line(EfficientZeroRun(), ['--help'], prog='p', description='')
except SystemExit:
    assert 'torch' not in sys.modules
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
