"""Tokenizers as transformers reads them: the same ids and texts as ours."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue_rows import Dialogue
from raffia.lm.envs.wordle.data import wordle_letter_tokenizer, wordle_word_tokenizer
from raffia.lm.envs.wordle.game import NUM_CODES, colors_of
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.hf_tokenizer import HFTokenizer, load_tokenizer
from raffia.lm.tokenizers.tokenizer import (
    SPECIAL_TOKENS,
    PieceTokenizer,
    WordTokenizer,
    character_tokenizer,
)
from raffia.lm.transformers_files import save_for_transformers


def check_of(ours, their, sequence, roles):
    """Their chat template gives the tokens of our row."""
    chat = [
        {"role": role, "content": text} for role, (text, _) in zip(roles, sequence, strict=True)
    ]
    row = DataPoint.from_obs(Dialogue(sequence, terminal=False), ours).tokens
    assert their.apply_chat_template(chat, return_dict=False) == row


tokenizers = pytest.importorskip("tokenizers")

SPECIALS = tuple(SPECIAL_TOKENS.values())
ODD = "ab <>/\\.*+?()[]{}|^$-#&~'\"\n\té😀"
SPACES = "".join(chr(n) for n in range(0x3001) if chr(n).isspace())
KINDS = {
    "characters": (character_tokenizer([ODD]), st.text(ODD, max_size=12)),
    "unknown": (character_tokenizer(["abc"], unknown="<|unk|>"), st.text("abcxyz", max_size=9)),
    "pieces": (
        PieceTokenizer(("a", "b", "ab", "<b>", "bab", "a.b", "+a", *SPECIALS), "bab"),
        st.text("ab<>.+x", max_size=12),
    ),
    "words": (
        WordTokenizer.from_texts(["the cat sat é"], unknown="<|unk|>"),
        st.lists(st.sampled_from(["the", "cat", "dog", *SPACES]), max_size=9).map("".join),
    ),
    "letters": (wordle_letter_tokenizer(), st.text("abz", max_size=5).map("<g>{}<b>".format)),
    "rows": (
        wordle_word_tokenizer(Vocabulary(("crane", "slate")), non_word="<?>"),
        st.one_of(
            st.sampled_from(["crane", "slate", "craneslate", "xcranex", "<?>"]),
            st.integers(0, NUM_CODES - 1).map(
                lambda code: "".join(f"<{color}>" for color in colors_of(code))
            ),
        ),
    ),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Their tokenizer of each kind, loaded from our files."""
    found = {}
    for kind, (ours, _) in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        save_for_transformers(ours, folder, max_length=16)
        found[kind] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_texts_get_the_same_ids_and_round_trip(kind, theirs):
    ours, texts = KINDS[kind]
    their = theirs[kind]

    @given(texts)
    @settings(deadline=None)
    def check(text):
        if any(mark in text for mark in SPECIALS):  # the one difference
            return
        ids = ours.encode(text)
        assert their.encode(text).ids == ids
        assert their.decode(ids) == ours.decode(ids)

    check()
    assert [their.token_to_id(token) for token in ours.tokens] == list(range(ours.num_tokens))
    assert their.decode([ours.eoa_token_id, 0, ours.pad_token_id]) == ours.tokens[0]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it_and_makes_prompts_equal_to_rows(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = KINDS[kind][0]
    save_for_transformers(ours, tmp_path, max_length=16)
    their = transformers.AutoTokenizer.from_pretrained(tmp_path)
    first, second = ours.tokens[0], ours.tokens[1]
    assert their(first).input_ids == ours.encode(first) and len(their) == ours.num_tokens
    marks = [their.bos_token_id, their.eos_token_id, their.pad_token_id, their.model_max_length]
    assert marks == [ours.bos_token_id, ours.eoa_token_id, ours.pad_token_id, 16]
    sequence = [(first, None), (second, 0.0), (first, None)]
    check_of(ours, their, sequence, ("user", "assistant", "user"))
    check_of(ours, their, [(second, 1.0)], ("assistant",))
    ids = [0, ours.eoa_token_id, 1]
    assert their.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert load_tokenizer(tmp_path) == ours


def test_other_special_names_and_no_template_where_encoding_depends_on_the_start(tmp_path):
    model = tokenizers.models.WordLevel({"▁hi": 0, "hi": 1, "[PAD]": 2}, unk_token="hi")
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    theirs.save(str(tmp_path / "own.json"))
    names = {"pad": "[PAD]"}
    ours = HFTokenizer(tmp_path / "own.json", add_missing=True, special_tokens=names)
    save_for_transformers(ours, tmp_path / "out", max_length=16)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["pad_token"] == "[PAD]" and config["eos_token"] == "</a>"
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_tokenizers_that_cannot_be_converted_are_refused(tmp_path, theirs):
    with pytest.raises(Exception, match="Missing"):
        theirs["letters"].encode("A")
    ambiguous = PieceTokenizer(("a", "b</s>", *SPECIALS))
    for tokenizer, message in (
        (ambiguous, r"cannot be converted.*'b</s>' contains '</s>'"),
        (object(), "a object cannot be converted"),
    ):
        with pytest.raises(ValueError, match=message):
            save_for_transformers(tokenizer, tmp_path, max_length=16)
    assert list(tmp_path.iterdir()) == []
