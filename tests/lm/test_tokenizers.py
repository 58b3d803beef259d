"""Our tokenizers, those of Hugging Face, and errors for missing parts."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.lm.envs.wordle.data import wordle_letter_tokenizer
from raffia.lm.tokenizers.hf_tokenizer import HFTokenizer, load_tokenizer
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


KINDS = [  # a tokenizer, texts for it, and the expected decoded text
    (character_tokenizer(["abc <>/&é"]), st.text("abc <>/&é", max_size=20), str),
    (
        PieceTokenizer(("a", "b", "<", ">", "ab", "<b>", "bab", *SPECIALS)),
        st.lists(st.sampled_from(["a", "ab", "b<", "<b>", "bab"]), max_size=8).map("".join),
        str,
    ),
    (
        WordTokenizer.from_texts(["the cat sat é \u2028 ü"], unknown="?"),
        st.lists(st.sampled_from(["the", "cat", "sat"]), max_size=6).map("  ".join),
        lambda text: " ".join(text.split()),
    ),
]


@pytest.mark.parametrize(
    ("tokenizer", "texts", "decoded"), KINDS, ids=["letters", "pieces", "words"]
)
def test_texts_and_saved_tokenizers_round_trip(tmp_path, tokenizer, texts, decoded):
    @given(texts)
    @settings(deadline=None)
    def check(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == decoded(text)
        assert all(0 <= number < tokenizer.num_tokens for number in ids)

    check()
    tokenizer.save(tmp_path / "new" / "folder")
    assert load_tokenizer(tmp_path / "new" / "folder") == tokenizer
    with pytest.raises(KeyError, match="did you mean '</eod>'"):
        tokenizer.token_to_id("<eod>")
    for number in (-1, tokenizer.num_tokens):
        with pytest.raises(KeyError, match=rf"ids are 0\.\.{tokenizer.num_tokens - 1}"):
            tokenizer.id_to_token(number)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: PieceTokenizer(("a", *SPECIALS[:-1])), "lack </eod>, which mark"),
        (lambda: WordTokenizer(("a",)), r"lack <\|pad\|>, </a>, </s>, <s>, <a>, </eod>"),
        (lambda: PieceTokenizer(("a", "b", "a", *SPECIALS)), "'a' occurs twice"),
        (lambda: PieceTokenizer(("", *SPECIALS)), "token 0 is empty"),
        (lambda: PieceTokenizer(SPECIALS, unknown="?"), r"unknown='\?' is not one of the tokens"),
        (lambda: character_tokenizer(["ab"]).encode("axyb"), "no token for 'xy' in 'axyb'"),
        (lambda: character_tokenizer(["ab"]).encode("abc"), "no token for 'c'"),
        (lambda: character_tokenizer(["ab"]).encode("c" * 999), r"'c{76}... in 'c{76}...; create"),
        (lambda: WordTokenizer.from_texts(["a b"]).encode("a c"), "no token for 'c' in 'a c'"),
    ],
)
def test_errors_name_what_a_tokenizer_lacks(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_folders_without_a_tokenizer_are_refused(tmp_path):
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
    """The file of a minimal byte-level tokenizer of GPT-2's kind, without merges."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary["<|endoftext|>"] = 300  # numbers with a gap
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
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
    text, specials = "naïve café, 123 <b>", special_ids(tokenizer)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text  # not cut off, not padded
    assert tokenizer.num_tokens > max(specials) and len(set(specials)) == 6
    assert tokenizer.decode([tokenizer.boa_token_id, *ids, tokenizer.eoa_token_id]) == text
    assert tokenizer.id_to_token(tokenizer.eoa_token_id) == "</a>"
    with pytest.raises(KeyError, match="no token 'nothing such'"):
        tokenizer.token_to_id("nothing such")
    with pytest.raises(KeyError, match="no token 290"):
        tokenizer.id_to_token(290)
    tokenizer.save(tmp_path / "ours")
    again = load_tokenizer(tmp_path / "ours")
    assert again.encode(text) == ids and special_ids(again) == specials
    assert again.num_tokens == tokenizer.num_tokens


def test_special_tokens_of_hugging_face(theirs, tmp_path, monkeypatch):
    names = {"pad": "<|endoftext|>"}
    tokenizer = HFTokenizer(theirs, special_tokens=names, add_missing=True)
    assert tokenizer.pad_token_id == 300
    for token in ("</a>", "<s>", "<|endoftext|>"):  # no text becomes one
        ids = tokenizer.encode(f"say {token} now")
        assert not set(ids) & set(special_ids(tokenizer))
        assert tokenizer.decode(ids) == f"say {token} now"
    for given_names, message in (
        (names, "no token </a>"),
        ({"padding": "x"}, "no role 'padding'; the roles are"),
        ({"pad": "</a>"}, "must differ"),
    ):
        with pytest.raises(ValueError, match=message):
            HFTokenizer(theirs, special_tokens=given_names)
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer that `tokenizers` can read"):
        HFTokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'raffia\[text\]'"):
        HFTokenizer(tmp_path)


def test_wordle_letters_have_the_published_ids_and_no_text_becomes_a_special_token():
    tokenizer = wordle_letter_tokenizer()
    assert tokenizer.encode("abcdefghijklmnopqrstuvwxyz<g><b><y>") == list(range(29))
    assert special_ids(tokenizer) == [29, 30, 31, 32, 33, 34] and tokenizer.num_tokens == 35
    assert [tokenizer.id_to_token(number) for number in range(29, 35)] == list(SPECIALS)
    characters = character_tokenizer(SPECIALS)
    for token in SPECIALS:
        ids = characters.encode(token)
        assert len(ids) == len(token) and characters.decode(ids) == token
        for other in (tokenizer, WordTokenizer.from_texts(["ab"])):
            with pytest.raises(ValueError, match="no token for"):
                other.encode(token)
