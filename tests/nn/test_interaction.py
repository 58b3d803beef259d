"""The setting of the value that modules take from a distribution."""

import threading

import pytest

from raffia.nn import (
    InteractionType,
    composite_lp_aggregate,
    interaction_type,
    set_composite_lp_aggregate,
    set_interaction_type,
)
from raffia.nn.log_prob_keys import LogProbKeys
from raffia.nn.modes import Setting


def in_another_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_types_are_strings_and_found_by_name():
    names = ["mode", "median", "mean", "random", "deterministic"]
    assert [str(kind) for kind in InteractionType] == names and InteractionType.MEAN == "mean"
    for name in ("random", "RANDOM"):
        assert InteractionType(name) is InteractionType.from_str(name) is InteractionType.RANDOM
    for make, wrong, match in (
        (InteractionType, 3, "not a valid InteractionType"),
        (InteractionType, "sometimes", "'mode', 'median', 'mean', 'random', 'deterministic'"),
        (InteractionType.from_str, "Randm", 'Did you mean "random"'),
        (set_interaction_type, "determinstic", 'Did you mean "deterministic"'),
    ):
        with pytest.raises(ValueError, match=match):
            make(wrong)


def test_a_block_sets_the_type_and_restores_the_previous_one():
    with set_interaction_type("random"):
        assert interaction_type() is InteractionType.RANDOM
        with set_interaction_type(InteractionType.MEAN):
            assert interaction_type() is InteractionType.MEAN
            with set_interaction_type(None):
                assert interaction_type() is None
        assert interaction_type() is InteractionType.RANDOM
    with pytest.raises(KeyError), set_interaction_type("random"):
        raise KeyError
    assert interaction_type() is None
    with set_interaction_type():
        assert interaction_type() is InteractionType.DETERMINISTIC
    assert set_interaction_type().type is InteractionType.DETERMINISTIC


def test_a_block_applies_to_all_threads_unless_it_is_local():
    with set_interaction_type("mode"):
        assert in_another_thread(interaction_type) is InteractionType.MODE
    with set_interaction_type("mode", thread_local=True):
        assert interaction_type() is InteractionType.MODE
        assert in_another_thread(interaction_type) is None


def test_blocks_within_a_local_block_are_local_too():
    with set_interaction_type("mode", thread_local=True):
        with set_interaction_type("random"):
            assert interaction_type() is InteractionType.RANDOM
            assert in_another_thread(interaction_type) is None
        assert interaction_type() is InteractionType.MODE
    assert interaction_type() is None


def test_ours_the_first_names_take_and_give_strings():
    from raffia.nn import interaction_mode, set_interaction_mode

    assert interaction_mode() is None
    with set_interaction_mode("random"):
        assert interaction_mode() == "random" and type(interaction_mode()) is str
        assert interaction_type() is InteractionType.RANDOM
    with set_interaction_mode():
        assert interaction_mode() == "mode"
    with set_interaction_type("mean"):
        assert interaction_mode() == "mean"
    with pytest.raises(ValueError, match="not a valid InteractionType"):
        set_interaction_mode("net_output")


def test_the_type_applies_inside_a_decorated_generator_but_not_between_its_steps():
    @set_interaction_type("random")
    def steps():
        sent = yield interaction_type()
        try:
            yield sent, interaction_type()
        except KeyError:
            yield interaction_type()
        return interaction_type()

    def delegating():
        result = yield from steps()
        yield "result", result

    run = delegating()
    assert next(run) is InteractionType.RANDOM and interaction_type() is None
    assert run.send(3) == (3, InteractionType.RANDOM) and interaction_type() is None
    assert run.throw(KeyError()) is InteractionType.RANDOM
    assert next(run) == ("result", InteractionType.RANDOM) and interaction_type() is None


def test_a_decorated_class_warns_and_applies_the_type_in_its_constructor():
    with pytest.warns(FutureWarning, match="Decorating classes"):

        @set_interaction_type("random")
        class Noted:
            def __init__(self):
                self.kind = interaction_type()

    assert Noted().kind is InteractionType.RANDOM and interaction_type() is None


def test_overrides_that_are_undone_in_another_order():
    setting = Setting(0)
    first, second = setting.put(1, thread_local=True), setting.put(2, thread_local=True)
    first()
    second()
    assert setting.get() == 1


def test_a_module_that_sums_itself_asks_for_parts_in_its_thread_alone():
    with set_composite_lp_aggregate(True):
        keys = LogProbKeys(["action"], None)
        assert not keys.in_parts(composite_lp_aggregate)
        assert keys.in_parts(in_another_thread, composite_lp_aggregate)
        assert composite_lp_aggregate()
