"""raffia chat and raffia export: a talk driven by text, and what is refused."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raffia.algorithms.ilql.config import DecodeConfig, method
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.cli import main
from raffia.cli.chat import _parser, decoding_settings
from raffia.cli.conversation import Conversation, Game, Session, shade, values_table
from raffia.cli.parser import UsageError
from raffia.lm.decoding.config import TokenPlanConfig
from raffia.recipes.ilql import train
from raffia.recipes.ilql.chat import Chat, Guessing, Piece
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import make_tokenizer, make_wordle
from raffia.recipes.ilql.networks import Networks
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.members import best_of
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import find_checkpoint
from raffia.train.view import PlainView
from tests.cli.test_runs import fails

SMOKE = ILQL_PRESETS["ilql-smoke"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class ScriptedGuessing(Guessing):
    """Guesses what is written."""

    guesses: list[str]

    def think(self):
        self.guess = self.guesses.pop(0)
        yield Piece(self.guess, self.guess, 0.5, 0.25, -1.5)
        yield Piece("", "</a>", 1.0, -0.5, -1.0)


class ScriptedChat(Chat):
    """Says what is written; it sees the last two utterances."""

    answers: list[str]

    def answer(self):
        text = self.answers.pop(0)
        self.num_forgotten = max(0, len(self.utterances) - 2)
        self.cut = "" if text != "cut" else "it may say 3 tokens at once"
        for letter in text:
            yield Piece(letter, letter, 0.5, 0.25, -1.5)
        self.utterances.append((text, 0.0))


@pytest.fixture(scope="module")
def policy():
    return ILQL_Policy(Networks(SMOKE), make_tokenizer(SMOKE), DecodeConfig(max_new_tokens=2))


def played(policy, typed, guesses, said=None, monkeypatch=None, **options):
    said = io.StringIO() if said is None else said
    game = ScriptedGuessing(policy, make_wordle(SMOKE.wordle))
    ScriptedGuessing.guesses = [*guesses]
    Game(game, io.StringIO(typed), said, **options).run()
    return said.getvalue()


def talked(policy, typed, answers, said=None, **options):
    said = io.StringIO() if said is None else said
    chat = ScriptedChat(policy)
    ScriptedChat.answers = [*answers]
    Conversation(chat, io.StringIO(typed), said, **options).run()
    return said.getvalue()


WORDS = make_wordle(SMOKE.wordle).vocabulary.words


# -- Wordle


def test_a_word_that_is_told_is_guessed_by_itself(policy):
    first, second = WORDS[:2]
    said = played(policy, f"{second.upper()}\n/again\n/quit\n", [first, second, second])
    assert f"your word, or Enter: {second.upper()}\n1. {first}  " in said
    assert f"2. {second}  ggggg\nFound in 2 guesses.\n" in said
    assert f"/again\n1. {second}  ggggg\nFound in 1 guess.\n" in said
    assert said.endswith("/quit\nGoodbye.\n")


def test_a_person_answers_with_colours(policy):
    first, second = WORDS[:2]
    typed = "\nggg\nxxxxx1\n\nbbbbb\n/undo\nGGGGG\n"
    said = played(policy, typed, [first, second])
    assert (
        f"1. {first}\ncolours of {first}: ggg\n'ggg' is not an answer to {first}: type five" in said
    )
    assert said.count("is not an answer to") == 3
    assert f"2. {second}\ncolours of {second}: /undo\ncolours of {first}: GGGGG\nFound in 1" in said
    assert said.endswith("your word, or Enter: \nGoodbye.\n")


def test_six_guesses_and_another_game(policy):
    word = WORDS[0]
    row = "bbbbb\n"
    said = played(policy, "\n" + 6 * row + "\n/new\nab\n", [word] * 7)
    assert "no word that the agent knows fits all these colours; /undo takes them back" in said
    assert f"6. {word}\ncolours of {word}: bbbbb\n" in said and "Not found in 6 guesses.\n" in said
    assert f"your word, or Enter: \n1. {word}\ncolours of {word}: /new\nyour word, or" in said
    assert "'ab' is not a word of five letters a to z." in said


def test_the_word_may_be_told_amid_a_game_unless_colours_say_otherwise(policy):
    first, second = WORDS[:2]
    said = played(policy, f"\nbbbbb\n{first}\n/undo\n{second}\n", [first, second, second])
    assert f"That can't be your word: for {first}, {first} gets ggggg, but got bbbbb." in said
    assert f"colours of {first}: {second}\n   {first}  " in said
    assert f"2. {second}  ggggg\nFound in 2 guesses." in said


def test_words_that_nobody_knows(policy):
    said = played(policy, "queue\n/words\n", ["zzz", *[WORDS[0]] * 5])
    assert f"(queue is not one of the {len(WORDS)} words that the agent knows, so it is" in said
    assert "1. zzz  bbbbb\n(not a word; it counts as a guess, all black)\n" in said
    assert "Not found in 6 guesses; it was queue." in said
    assert all(word in said for word in WORDS) and "still fit: " in said


def test_commands_out_of_place(policy):
    said = played(policy, "/undo\n/again\n/foo\n/help\n", [])
    assert "you have no colours to take back" in said and "no guess to repeat" in said
    assert "There is no command /foo; /help lists them." in said
    assert "/words   the words that the agent knows" in said
    again = played(policy, "\n/again\nggggg\n", WORDS[:2])
    assert f"colours of {WORDS[0]}: /again\n1. {WORDS[1]}\ncolours of {WORDS[1]}: gggg" in again


def test_values_and_colours(policy, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    word = WORDS[0]
    said = played(policy, f"{word}\n", [word], values=True)
    assert (
        "  token  share      V  advantage\n"
        f"  {word}   50 %  -1.50      +0.25\n"
        "  </a>   100 %  -1.00      -0.50\n"
    ) in said
    bright = played(policy, f"{word}\n", [word], Terminal(), values=True, weight=2.0)
    assert f"\033[32m{word}\033[0m" in bright and "\033[32mg\033[0m" in bright
    assert f"\033[32m{word}" not in played(policy, f"{word}\n", [word], Terminal())
    assert [shade(a, 1.0) for a in (1.0, 0.05, -0.5, -2.0)] == ["green", "", "yellow", "red"]


def test_of_long_answers_the_tokens_that_matter_are_shown():
    said = [Piece(" ", "_", 0.5, 0.01 * n, -1.0) for n in range(30)]
    table = values_table(said, most=2).splitlines()
    assert [line.split()[-1] for line in table[1:3]] == ["+0.28", "+0.29"]
    assert "' '" in table[1] and table[3] == "  and 28 more with smaller advantages"


# -- data


def test_a_talk(policy):
    typed = "hi\n\n/again\n/add one\n/go\nmore\n/new\n/again\n//help\n/help\n/quit\nnever\n"
    answers = ["oh", "ah", "cut", "so", "yes"]
    pair = "<b><b><g><b><y>"
    typed = typed.replace("hi", pair).replace("one", pair).replace("more", pair)
    said = talked(policy, typed, answers)
    assert said.startswith("Type a text; /help lists the commands, /quit quits.\nyou: ")
    assert f"you: {pair}\nagent: oh\nyou: \nyou: /again\nagent: ah\nyou: /add" in said
    assert "agent: cut\n(cut here: it may say 3 tokens at once)\n" in said
    assert said.count("it no longer sees the first") == 2
    assert "/new\n(starting over)\nyou: /again\n(there is no answer to repeat)\n" in said
    assert "/add TEXT   add a text" in said
    assert said.endswith("you: /quit\nGoodbye.\n") and "never" not in said


def test_what_the_agent_can_not_be_told(policy):
    said = talked(policy, "hello\n" + "<b><b><g><b><y>" * 40 + "\n", ["oh"])
    assert "agent: oh" in said  # words are one unknown token here
    assert "(the agent can't read this: the text has 42 tokens, but with an answer" in said


def test_the_best_token_each_time_is_told(policy):
    greedy = ILQL_Policy(policy.agent, policy.tokenizer, DecodeConfig(num_beams=1))
    assert "so this is the same" in talked(greedy, "hello\n/again\n", ["oh", "oh"])


def test_lines_end_at_the_end_of_the_file_also_without_a_newline(policy):
    assert talked(policy, "hello", ["oh"]).endswith("agent: oh\nyou: \nGoodbye.\n")
    with pytest.raises(NotImplementedError):
        Session(io.StringIO("a"), io.StringIO()).run()


# -- the command


def decoding(words, config=SMOKE):
    return decoding_settings(config, _parser().read(words.split()), Path("runs/a"))


def test_how_it_speaks():
    config, notices = decoding("--temperature 0.5 --top_k 3 --top-p 0.9 --adv_weight 2 --values")
    decode = config.decode
    assert (decode.temperature, decode.top_k, decode.adv_weight) == (0.5, 3, 2.0)
    assert decode.effective_top_p == 0.9
    assert decode.report_all and notices == []
    assert decoding("--temperature 0")[0].decode.num_beams == 1
    alone = decoding("--adv-weight 0", method("cql", SMOKE))[0].decode
    assert alone.include_logits and not alone.include_adv
    beams = ILQLRun(decode=DecodeConfig(num_beams=4, num_generations=2, rerank="value"))
    config, notices = decoding("", beams)
    assert config.decode.num_beams == 1 and config.decode.rerank is None
    assert notices == [
        "The run chooses among several texts; here the agent gives one, and always takes the best "
        "token."
    ]
    plans = ILQLRun(decode=DecodeConfig(plan=TokenPlanConfig()))
    config, notices = decoding("", plans)
    assert config.decode.plans and notices == []
    config, notices = decoding("--temperature 0", plans)
    assert not config.decode.plans and "takes the best token" in notices[0]
    for words in ("--temperature -1", "--top_k 0", "--top_p 2", "--adv_weight -1"):
        with pytest.raises(UsageError):
            decoding(words)


def test_an_agent_without_values_is_not_asked_for_them():
    cloned = method("bc", SMOKE)
    assert not decoding("", cloned)[0].decode.include_adv
    assert not decoding("--adv_weight 0", cloned)[0].decode.needs_values
    with pytest.raises(UsageError, match="--values and --adv-weight: runs/a has learnt no values"):
        decoding("--values --adv_weight 2", cloned)


def test_a_run_from_training_to_talk_and_export(here, monkeypatch, capsys):
    small = "--num_updates 1 --batch_size 4 --evaluate.num_episodes 4"
    assert main(f"train ilql --preset ilql-smoke {small}".split()) == 0
    capsys.readouterr()
    run = "runs/ilql-smoke-0"
    talks = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{WORDS[0]}\n/again\n"))
        assert main(["chat", run, "--values", "--seed", "5", "--temperature", "2"]) == 0
        talks.append(capsys.readouterr().out)
    assert talks[0] == talks[1] and talks[0].count("1. ") == 2 and "advantage" in talks[0]
    assert main(["export", run]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {run}/export, of update 1\n") and "load_exported" in said
    names = {path.name for path in Path(run, "export").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} < names
    assert "is not empty\n  raffia export" in fails(f"export {run}", capsys)
    assert f"raffia chat {run}\n" in fails(f"play {run}", capsys)
    assert f"which run?\n  raffia chat {run}\n" in fails("chat", capsys)
    assert f"raffia export {run}\n" in fails("export", capsys)


def test_the_best_member_of_a_population_speaks_with_its_own_numbers(here, monkeypatch):
    ranges = ("adv_weight=0.1..100",)
    population = PopulationConfig(size=3, ranges=ranges, no_mutation=0.0, elitism=False)
    evaluate = replace(SMOKE.evaluate, every_updates=2, num_episodes=2)
    run = replace(SMOKE, population=population, evaluate=evaluate, num_updates=6)
    train(run, "runs/members", view=PlainView(io.StringIO()))
    own = best_of(find_checkpoint(Path("runs/members"), "newest"))["hyper", "adv_weight"]
    assert float(own) != SMOKE.decode.adv_weight
    asked = []
    monkeypatch.setattr("raffia.cli.chat.talk", lambda run, config, **_: asked.append(config) or 0)
    for words in ([], ["--adv-weight", "3"]):
        assert main(["chat", "runs/members", "--checkpoint", "newest", *words]) == 0
    assert [config.decode.adv_weight for config in asked] == [pytest.approx(float(own)), 3.0]


def test_a_talk_about_data(here, monkeypatch, capsys):
    rows = [{"utterances": [f"say {n}", str(n)], "rewards": [None, 1.0]} for n in range(10)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trunk = "--model.trunk.n-layer 1 --model.trunk.n_embd 8 --model.trunk.n_head 2"
    train = f"train ilql --data chats.jsonl --num_updates 1 --batch_size 4 {trunk}"
    assert main([*train.split(), "--model.trunk.block_size", "32"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("say 5\nwhat?\n" + "say 7\n" * 6))
    assert main(["chat", "runs/chats-0", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert "you: say 5\nagent: " in said and said.count("agent: ") == 7
    assert "can't read this: there is no token for 'wh' in 'what?'" in said
    assert "(its context of 32 tokens is full: it no longer sees the first" in said
