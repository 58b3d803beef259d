"""Chats with an agent of ILQL: its prompts and its answers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from raffia.algorithms.ilql import ILQL_Policy, ILQLConfig
from raffia.algorithms.ilql.config import DecodeConfig, ILQLModelConfig, TrunkConfig
from raffia.lm import DataPoint, WordTokenizer, character_tokenizer, play_dialogues
from raffia.lm.data.dialogue_rows import Dialogue
from raffia.recipes.ilql import ILQL_PRESETS
from raffia.recipes.ilql.chat import Chat, Guessing, UnreadableText
from raffia.recipes.ilql.data import make_tokenizer, make_wordle
from raffia.recipes.ilql.networks import Networks


def policy_of(tokenizer, block_size=24, **decode):
    sizes = dict(vocab_size=tokenizer.num_tokens, block_size=block_size)
    trunk = TrunkConfig(n_layer=1, n_head=2, n_embd=8, **sizes)
    torch.manual_seed(0)
    networks = Networks(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
    generator = torch.Generator().manual_seed(1)
    return ILQL_Policy(networks, tokenizer, DecodeConfig(**decode), generator=generator)


def chat_of(tokenizer=None, **options):
    return Chat(policy_of(tokenizer or character_tokenizer(["abc"]), **options))


def record_prompts(chat, monkeypatch):
    """A list to which the agent's prompts are added from now on."""
    prompts, make = [], chat.policy.fit

    def fit(*args):
        found = make(*args)
        prompts.append(found[0])
        return found

    monkeypatch.setattr(chat.policy, "fit", fit)
    return prompts


def test_prompts_are_the_prefixes_of_data_rows(monkeypatch):
    chat = chat_of(max_new_tokens=3)
    prompts = record_prompts(chat, monkeypatch)
    chat.send("ab")
    list(chat.answer())
    chat.send("c")
    list(chat.answer())
    tokenizer = chat.policy.tokenizer
    assert [reward is None for _, reward in chat.utterances] == [True, False, True, False]
    row = DataPoint.from_obs(Dialogue(chat.utterances[:3], terminal=False), tokenizer).tokens
    assert prompts[-1] == row and row[0] == tokenizer.bos_token_id
    chat.utterances.clear()
    list(chat.answer())  # the agent begins
    assert prompts[-1] == [tokenizer.boa_token_id]


def test_pieces_have_the_text_and_the_values():
    for tokenizer in (character_tokenizer(["abc"]), WordTokenizer.from_texts(["a b c"])):
        chat = chat_of(tokenizer, max_new_tokens=6)
        pieces = list(chat.answer())
        assert "".join(piece.text for piece in pieces) == chat.utterances[0][0]
        assert all(0 < piece.probability <= 1 and piece.v is not None for piece in pieces)
    chat = chat_of(include_adv=False, max_new_tokens=2)
    assert all(piece.v is None and piece.advantage is None for piece in chat.answer())


def test_a_partial_character_is_held_back():
    class Bytes:  # two tokens make one character
        num_tokens, pad_token_id, bos_token_id, eos_token_id = 12, 6, 7, 8
        boa_token_id, eoa_token_id, eod_token_id = 9, 10, 11

        def encode(self, text):
            return [0]

        def decode(self, ids):
            real = [i for i in ids if i < 6]
            return "é" * (len(real) // 2) + "\ufffd" * (len(real) % 2)

        def id_to_token(self, number):
            return str(number)

    chat = chat_of(Bytes(), max_new_tokens=7, block_size=64)
    pieces = [piece.text for _ in range(5) for piece in chat.answer()]
    assert set(pieces) <= {"", "é"} and "é" in pieces


def test_a_repeated_answer_has_the_same_prompt():
    chat = chat_of(max_new_tokens=8, block_size=64)
    chat.send("ab")
    texts = set()
    for _ in range(4):
        list(chat.answer())
        texts.add(chat.utterances[-1][0])
        assert chat.take_back() and chat.utterances == [("ab", None)]
    assert len(texts) > 1 and not chat.take_back()


def test_a_full_context_forgets_the_oldest_utterances(monkeypatch):
    chat = chat_of(max_new_tokens=4, block_size=24)
    prompts = record_prompts(chat, monkeypatch)
    for _ in range(6):
        chat.send("abca")
        list(chat.answer())
        assert len(prompts[-1]) + chat.policy.room <= 24
    visible = chat.utterances[chat.num_forgotten : -1]
    row = DataPoint.from_obs(Dialogue(visible, terminal=False), chat.policy.tokenizer).tokens
    assert 0 < chat.num_forgotten < len(chat.utterances) - 1 and prompts[-1] == row
    assert len(chat.utterances) == 12
    chat.utterances.clear()
    list(chat.answer())
    assert chat.num_forgotten == 0


class NineQuestions:
    """An environment of text that asks nine times."""

    def reset(self, seed):
        self.sequence = [("abca", None)]
        return Dialogue(list(self.sequence), terminal=False)

    def step(self, text):
        over = len(self.sequence) == 17
        self.sequence += [(text, 1.0)] if over else [(text, 1.0), ("abca", None)]
        return Dialogue(list(self.sequence), terminal=over), 1.0, over

    def is_terminal(self):
        return len(self.sequence) == 18


@pytest.mark.parametrize("block_size", [9, 24, 512])
def test_the_context_is_also_limited_in_an_environment(block_size, monkeypatch):
    policy = policy_of(character_tokenizer(["abc"]), block_size, max_new_tokens=3)
    prompts = record_prompts(SimpleNamespace(policy=policy), monkeypatch)
    [game] = play_dialogues(NineQuestions, policy, [0])
    assert len(game.observation.sequence) == 18 and len(prompts) == 9
    for number, prompt in enumerate(prompts):
        utterances = game.observation.sequence[: 2 * number + 1]
        tails = [utterances[start:] for start in range(len(utterances))]
        rows = [policy.tokens(Dialogue(tail, terminal=False)) for tail in tails]
        fitting = [row for row in rows if len(row) < block_size]
        assert prompt in fitting  # the whole dialogue, or else its last utterances
        with_room = [row for row in fitting if len(row) + policy.room <= block_size]
        assert prompt == rows[0] or prompt == with_room[0]
    assert (prompts[-1] == rows[0]) == (block_size == 512)
    long = Dialogue([("abc" * 99, None)], terminal=False)  # only its end fits
    assert policy.prompt(long) == policy.tokens(long)[-(block_size - 1) :]


def test_a_system_message_is_not_forgotten():
    policy = policy_of(character_tokenizer(["abc"]), max_new_tokens=3)
    turns = [("ccc", None), *[("abca", None), ("b", 1.0)] * 6, ("abca", None)]
    roles = ["system", *["user", "assistant"] * 6, "user"]
    prompt, num = policy.fit(Dialogue(turns, terminal=False, roles=roles))
    rest = Dialogue([turns[0], *turns[1 + num :]], terminal=False)
    assert prompt == policy.tokens(rest) and 0 < num < 13 and len(prompt) + 3 <= 24
    prompt, num = policy.fit(Dialogue(turns, terminal=False))  # treated as any other
    assert prompt == policy.tokens(Dialogue(turns[num:], terminal=False)) and num > 0


def test_texts_that_cannot_be_encoded_or_do_not_fit_are_refused():
    chat = chat_of(block_size=16)
    with pytest.raises(UnreadableText, match="^there is no token for 'x' in 'ax'$"):
        chat.send("ax")
    words = "18 tokens, but with an answer.* of 16 has room for 12"
    with pytest.raises(UnreadableText, match=words):
        chat.send("a" * 16)
    assert chat.utterances == []
    chat.send("a" * 10)
    assert len(list(chat.answer())) <= 4


def test_an_answer_that_is_cut_has_a_reason():
    chat = chat_of(max_new_tokens=2, temperature=1e-3, top_k=1, include_adv=False)
    embeddings = chat.policy.agent.model.trunk.wte.weight
    with torch.no_grad():
        embeddings[chat.policy.tokenizer.eoa_token_id] = 0
    list(chat.answer())
    assert chat.cut == "it may generate 2 tokens at a time"
    chat.policy.config = replace(chat.policy.config, max_new_tokens=None)
    list(chat.answer())
    assert chat.cut == "its context of 24 tokens is full"
    list(chat.answer())  # after an answer that filled it
    assert len(chat.utterances) == 3


def guessing(secret=None):
    config = ILQL_PRESETS["ilql-smoke"]
    decode = replace(config.decode, max_new_tokens=2)
    policy = ILQL_Policy(Networks(config), make_tokenizer(config), decode)
    return Guessing(policy, make_wordle(config.wordle), secret)


def test_colours_of_a_secret_that_is_no_word_of_the_list():
    game = guessing("queue")
    word = game.words[0]
    game.guess = word
    assert game.is_word and set(game.row_of(word)) <= set("gyb")
    assert game.row_of("zzz") == "bbbbb" and guessing().row_of(word) is None
    with pytest.raises(ValueError, match="has 5 letters of g, y, b"):
        game.answer("ggg")
    game.answer("bbbbb")
    with pytest.raises(ValueError, match="no guess is waiting"):
        game.answer("bbbbb")


def test_a_word_must_agree_with_the_colours_so_far():
    game = guessing()
    first, second = game.words[:2]
    game.guess = first
    game.answer("ggggg")
    with pytest.raises(ValueError, match=f"for {second}, {first} gets .*, but got ggggg"):
        game.reveal(second)
    assert game.secret is None
    game.reveal(first)
    assert game.observation.won


def test_colours_are_taken_back_to_the_last_word():
    game = guessing()
    assert not game.take_back()
    word = game.words[0]
    game.turns = ((word, "bbbbb"), ("zzz", "bbbbb"))
    assert game.take_back() and (game.turns, game.guess) == ((), word)
