"""Our tokenizers, those of Hugging Face, and what is said when something is missing."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raffia.lm.envs.wordle.colors import NUM_CODES, colors_of
from raffia.lm.envs.wordle.tokens import wordle_letter_tokenizer, wordle_word_tokenizer
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.hf_tokenizer import HFTokenizer
from raffia.lm.tokenizers.saved_tokenizer import load_tokenizer
from raffia.lm.tokenizers.tokenizer import (
    SPECIAL_TOKENS,
    PieceTokenizer,
    WordTokenizer,
    character_tokenizer,
)

SPECIALS = tuple(SPECIAL_TOKENS.values())
ROLES = ("pad", "eoa", "eos", "bos", "boa", "eod")


def special_ids(tokenizer):
    return [getattr(tokenizer, f"{role}_token_id") for role in ROLES]


@given(st.text("abc <>/&é", max_size=20))
def test_characters_come_back(text):
    tokenizer = character_tokenizer(["abc <>/&é"])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == len(text)
    assert all(0 <= number < tokenizer.num_tokens for number in ids)


@given(st.lists(st.sampled_from(["a", "ab", "b<", "<b>", "bab"]), max_size=8))
def test_pieces_come_back(pieces):
    tokenizer = PieceTokenizer(("a", "b", "<", ">", "ab", "<b>", "bab", *SPECIALS))
    assert tokenizer.decode(tokenizer.encode("".join(pieces))) == "".join(pieces)


@given(st.lists(st.sampled_from(["the", "cat", "sat"]), max_size=6))
def test_words_come_back(words):
    tokenizer = WordTokenizer.from_texts(["the cat sat"])
    assert tokenizer.decode(tokenizer.encode("  ".join(words))) == " ".join(words)


def test_the_longest_piece_is_taken():
    tokenizer = PieceTokenizer(("a", "ab", "abc", "c", *SPECIALS))
    assert tokenizer.encode("abcabac") == [2, 1, 0, 3]


def test_letters_of_wordle_have_the_published_numbers():
    tokenizer = wordle_letter_tokenizer()
    assert tokenizer.encode("abcdefghijklmnopqrstuvwxyz<g><b><y>") == list(range(29))
    assert special_ids(tokenizer) == [29, 30, 31, 32, 33, 34] and tokenizer.num_tokens == 35
    assert [tokenizer.id_to_token(number) for number in range(29, 35)] == list(SPECIALS)


def test_words_and_rows_of_colors_are_one_token_each():
    vocabulary = Vocabulary.built_in()
    tokenizer = wordle_word_tokenizer(vocabulary)
    assert [tokenizer.encode(word) for word in vocabulary] == [[n] for n in range(len(vocabulary))]
    for code in range(NUM_CODES):
        row = "".join(f"<{color}>" for color in colors_of(code))
        assert tokenizer.encode(row) == [len(vocabulary) + code]
        assert tokenizer.decode(tokenizer.encode(row)) == row
    with pytest.raises(ValueError, match="no token for 'toolong' in 'toolong'"):
        tokenizer.encode("toolong")
    with_non_words = wordle_word_tokenizer(vocabulary, non_word="<|unk|>")
    assert with_non_words.encode("toolong") == [with_non_words.token_to_id("<|unk|>")]
    assert with_non_words.encode("crane") == tokenizer.encode("crane")


def test_special_tokens_are_left_out_of_texts():
    assert wordle_letter_tokenizer().decode([33, 2, 29, 0, 30]) == "ca"


def test_no_text_is_taken_for_a_special_token():
    for token in SPECIALS:
        characters = character_tokenizer(SPECIALS)
        ids = characters.encode(token)
        assert len(ids) == len(token) and characters.decode(ids) == token
        with pytest.raises(ValueError, match="no token for"):
            wordle_letter_tokenizer().encode(token)
        with pytest.raises(ValueError, match="no token for"):
            WordTokenizer.from_texts(["ab"]).encode(token)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: PieceTokenizer(("a", *SPECIALS[:-1])), "lack </eod>, which mark"),
        (lambda: WordTokenizer(("a",)), r"lack <\|pad\|>, </a>, </s>, <s>, <a>, </eod>"),
        (lambda: PieceTokenizer(("a", "b", "a", *SPECIALS)), "'a' is there twice"),
        (lambda: PieceTokenizer(("", *SPECIALS)), "token 0 is empty"),
        (lambda: PieceTokenizer(SPECIALS, unknown="?"), r"unknown='\?' is none of the tokens"),
        (lambda: character_tokenizer(["ab"]).encode("axyb"), "no token for 'xy' in 'axyb'"),
        (lambda: character_tokenizer(["ab"]).encode("abc"), "no token for 'c'"),
        (lambda: character_tokenizer(["ab"]).encode("c" * 999), r"'c{76}... in 'c{76}...; make"),
        (lambda: WordTokenizer.from_texts(["a b"]).encode("a c"), "no token for 'c' in 'a c'"),
    ],
)
def test_what_a_tokenizer_cannot_do_is_said(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_unknown_numbers_and_tokens():
    tokenizer = character_tokenizer(["hello"])
    with pytest.raises(KeyError, match="did you mean '</eod>'"):
        tokenizer.token_to_id("<eod>")
    for number in (-1, tokenizer.num_tokens):
        with pytest.raises(KeyError, match=r"they are 0\.\.9"):
            tokenizer.id_to_token(number)


def test_an_unknown_token_stands_for_each_stretch():
    tokenizer = character_tokenizer(["ab"], unknown="<|unk|>")
    assert tokenizer.encode("axxbx") == [0, 2, 1, 2]


@pytest.mark.parametrize(
    "tokenizer",
    [
        wordle_letter_tokenizer(),
        wordle_word_tokenizer(Vocabulary(("crane", "slate")), non_word="<|unk|>"),
        WordTokenizer.from_texts(["é \u2028 ü"], unknown="?"),
    ],
    ids=["letters", "words of Wordle", "words"],
)
def test_saved_tokenizers_come_back(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "new" / "folder")
    assert load_tokenizer(tmp_path / "new" / "folder") == tokenizer


def test_folders_that_are_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer.save\(folder\) writes it"):
        load_tokenizer(tmp_path)
    for text in ("{", "[]", '{"kind": "pieces"}', '{"kind": "x", "tokens": [], "unknown": null}'):
        (tmp_path / "raffia_tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match="damaged, or was not written by save|it is not JSON"):
            load_tokenizer(tmp_path)
    description = {"kind": "pieces", "tokens": ["a"], "unknown": None}
    (tmp_path / "raffia_tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="the tokens lack"):
        load_tokenizer(tmp_path)


@pytest.fixture
def theirs(tmp_path):
    """A byte-level tokenizer without merges, as small as GPT-2's kind can be; its file."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary["<|endoftext|>"] = 300  # numbers with a gap
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=7)
    path = tmp_path / "theirs" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_of_hugging_face(theirs, tmp_path):
    with pytest.raises(ValueError, match=r"no token <\|pad\|>.*'pad'.*add_missing=True"):
        HFTokenizer(theirs)
    tokenizer = HFTokenizer(theirs.parent, add_missing=True)
    text = "naïve café, 123 <b>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text  # not cut off, not padded
    assert (
        tokenizer.num_tokens > max(special_ids(tokenizer)) and len(set(special_ids(tokenizer))) == 6
    )
    assert tokenizer.decode([tokenizer.boa_token_id, *ids, tokenizer.eoa_token_id]) == text
    assert tokenizer.id_to_token(tokenizer.eoa_token_id) == "</a>"
    with pytest.raises(KeyError, match="no token 'nothing such'"):
        tokenizer.token_to_id("nothing such")
    with pytest.raises(KeyError, match="no token 290"):
        tokenizer.id_to_token(290)
    tokenizer.save(tmp_path / "ours")
    again = load_tokenizer(tmp_path / "ours")
    assert again.encode(text) == ids and special_ids(again) == special_ids(tokenizer)
    assert again.num_tokens == tokenizer.num_tokens


def test_no_text_is_taken_for_a_special_token_of_hugging_face(theirs):
    tokenizer = HFTokenizer(theirs, special_tokens={"pad": "<|endoftext|>"}, add_missing=True)
    for token in ("</a>", "<s>", "<|endoftext|>"):
        ids = tokenizer.encode(f"say {token} now")
        assert not set(ids) & set(special_ids(tokenizer))
        assert tokenizer.decode(ids) == f"say {token} now"


def test_special_tokens_of_another_name(theirs):
    names = {"pad": "<|endoftext|>"}
    with pytest.raises(ValueError, match="no token </a>"):
        HFTokenizer(theirs, special_tokens=names)
    tokenizer = HFTokenizer(theirs, special_tokens=names, add_missing=True)
    assert tokenizer.pad_token_id == 300
    with pytest.raises(ValueError, match="no role 'padding'; the roles are"):
        HFTokenizer(theirs, special_tokens={"padding": "x"})
    with pytest.raises(ValueError, match="must differ"):
        HFTokenizer(theirs, special_tokens={"pad": "</a>"})


def test_a_path_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer that `tokenizers` can read"):
        HFTokenizer(tmp_path)


def test_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'raffia\[text\]'"):
        HFTokenizer(tmp_path)
