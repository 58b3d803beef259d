"""A tokenizer that lacks a special token is refused at once, with what to do about it."""

from types import SimpleNamespace

import pytest

from raffia.lm.data.dialogue import Dialogue, DialogueDataset, ObservationDialogues

SOURCE = ObservationDialogues([Dialogue([("A", None), ("B", 1.0)])])
WHOLE = dict(
    num_tokens=134, pad_token_id=128, bos_token_id=129, eos_token_id=130, boa_token_id=131,
    eoa_token_id=132, eod_token_id=133, encode=lambda text: list(text.encode("ascii")),
    save=lambda folder: None,
)  # fmt: skip
PURPOSES = {
    "pad": "fills rows up",
    "bos": "begins a dialogue that the environment begins",
    "boa": "begins a dialogue that the agent begins",
    "eos": "ends an utterance of the environment",
    "eoa": "ends an utterance of the agent",
    "eod": "ends a dialogue that is over",
}


def build(tmp_path, **changes):
    """In memory or in a folder; None takes an attribute away."""
    entries = {name: value for name, value in {**WHOLE, **changes}.items() if value != "none"}
    for folder in (None, tmp_path / "store"):
        data = DialogueDataset.build(SOURCE, SimpleNamespace(**entries), folder=folder)
    return data


def test_a_whole_one_is_taken(tmp_path):
    assert build(tmp_path)[0].tokens == [129, 65, 130, 66, 132, 133]


@pytest.mark.parametrize("role", PURPOSES)
@pytest.mark.parametrize("value", ["none", None, "</s>", 1.5, True])
def test_a_special_token_that_is_not_there(tmp_path, role, value):
    """As the tokenizers of transformers have it: pad_token_id is None, and there is no eoa."""
    says = f"tokenizer has no {role}_token_id, a number of a token, which {PURPOSES[role]}"
    with pytest.raises(ValueError, match=says + r".*HFTokenizer\(.*add_missing=True\)"):
        build(tmp_path, **{f"{role}_token_id": value})


@pytest.mark.parametrize("number", [134, 500, -1])
def test_a_special_token_beyond_the_vocabulary(tmp_path, number):
    with pytest.raises(ValueError, match=rf"eoa_token_id is {number}, .* num_tokens=134"):
        build(tmp_path, eoa_token_id=number)


@pytest.mark.parametrize("value", ["none", None, 0])
def test_the_number_of_tokens_is_needed(tmp_path, value):
    with pytest.raises(ValueError, match=r"no num_tokens.*one more than the largest number"):
        build(tmp_path, num_tokens=value)
