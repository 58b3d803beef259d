"""raffia chat and raffia export: a talk driven by text, and what is refused."""

import io
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
from tests.cli.test_ilql import chats, run
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
        yield from (Piece(letter, letter, 0.5, 0.25, -1.5) for letter in text)
        self.utterances.append((text, 0.0))


@pytest.fixture(scope="module")
def policy():
    return ILQL_Policy(Networks(SMOKE), make_tokenizer(SMOKE), DecodeConfig(max_new_tokens=2))


def played(policy, typed, guesses, said=None, **options):
    said = io.StringIO() if said is None else said
    ScriptedGuessing.guesses = [*guesses]
    game = ScriptedGuessing(policy, make_wordle(SMOKE.wordle))
    Game(game, io.StringIO(typed), said, **options).run()
    return said.getvalue()


def talked(policy, typed, answers):
    said, ScriptedChat.answers = io.StringIO(), [*answers]
    Conversation(ScriptedChat(policy), io.StringIO(typed), said).run()
    return said.getvalue()


WORDS = make_wordle(SMOKE.wordle).vocabulary.words


FIRST, SECOND = WORDS[:2]


# -- Wordle


def test_a_word_that_is_told_is_guessed_by_itself(policy):
    said = played(policy, f"{SECOND.upper()}\n/again\n/quit\n", [FIRST, SECOND, SECOND])
    assert f"your word, or Enter: {SECOND.upper()}\n1. {FIRST}  " in said
    assert f"2. {SECOND}  ggggg\nFound in 2 guesses.\n" in said
    assert f"/again\n1. {SECOND}  ggggg\nFound in 1 guess.\n" in said
    assert said.endswith("/quit\nGoodbye.\n")


def test_a_person_answers_with_colours(policy):
    said = played(policy, "\nggg\nxxxxx1\n\nbbbbb\n/undo\nGGGGG\n", [FIRST, SECOND])
    assert (
        f"1. {FIRST}\ncolours of {FIRST}: ggg\n'ggg' is not an answer to {FIRST}: type five" in said
    )
    assert said.count("is not an answer to") == 3
    assert f"2. {SECOND}\ncolours of {SECOND}: /undo\ncolours of {FIRST}: GGGGG\nFound in 1" in said
    assert said.endswith("your word, or Enter: \nGoodbye.\n")


def test_six_guesses_and_another_game(policy):
    said = played(policy, "\n" + 6 * "bbbbb\n" + "\n/new\nab\n", [FIRST] * 7)
    assert "no word that the agent knows fits all these colours; /undo takes them back" in said
    assert f"6. {FIRST}\ncolours of {FIRST}: bbbbb\n" in said
    assert "Not found in 6 guesses.\n" in said
    assert f"your word, or Enter: \n1. {FIRST}\ncolours of {FIRST}: /new\nyour word, or" in said
    assert "'ab' is not a word of five letters a to z." in said


def test_the_word_may_be_told_amid_a_game_unless_colours_say_otherwise(policy):
    said = played(policy, f"\nbbbbb\n{FIRST}\n/undo\n{SECOND}\n", [FIRST, SECOND, SECOND])
    assert f"That can't be your word: for {FIRST}, {FIRST} gets ggggg, but got bbbbb." in said
    assert f"colours of {FIRST}: {SECOND}\n   {FIRST}  " in said
    assert f"2. {SECOND}  ggggg\nFound in 2 guesses." in said


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
    said = played(policy, f"{FIRST}\n", [FIRST], values=True)
    assert "  token  share      V  advantage\n" in said
    assert f"  {FIRST}   50 %  -1.50      +0.25\n  </a>   100 %  -1.00      -0.50\n" in said
    bright = played(policy, f"{FIRST}\n", [FIRST], Terminal(), values=True, weight=2.0)
    assert f"\033[32m{FIRST}\033[0m" in bright and "\033[32mg\033[0m" in bright
    assert f"\033[32m{FIRST}" not in played(policy, f"{FIRST}\n", [FIRST], Terminal())
    assert [shade(a, 1.0) for a in (1.0, 0.05, -0.5, -2.0)] == ["green", "", "yellow", "red"]


def test_of_long_answers_the_tokens_that_matter_are_shown():
    said = [Piece(" ", "_", 0.5, 0.01 * n, -1.0) for n in range(30)]
    table = values_table(said, most=2).splitlines()
    assert [line.split()[-1] for line in table[1:3]] == ["+0.28", "+0.29"]
    assert "' '" in table[1] and table[3] == "  and 28 more with smaller advantages"


# -- data


def test_a_talk(policy):
    pair = "<b><b><g><b><y>"
    typed = f"{pair}\n\n/again\n/add {pair}\n/go\n{pair}\n/new\n/again\n//help\n/help\n/quit\nno\n"
    said = talked(policy, typed, ["oh", "ah", "cut", "so", "yes"])
    assert said.startswith("Type a text; /help lists the commands, /quit quits.\nyou: ")
    assert f"you: {pair}\nagent: oh\nyou: \nyou: /again\nagent: ah\nyou: /add" in said
    assert "agent: cut\n(cut here: it may say 3 tokens at once)\n" in said
    assert said.count("it no longer sees the first") == 2
    assert "/new\n(starting over)\nyou: /again\n(there is no answer to repeat)\n" in said
    assert "/add TEXT   add a text" in said and said.endswith("you: /quit\nGoodbye.\n")


def test_what_the_agent_can_not_be_told(policy):
    said = talked(policy, "hello\n" + "<b><b><g><b><y>" * 40 + "\n", ["oh"])
    assert "agent: oh" in said  # words are one unknown token here
    assert "(the agent can't read this: the text has 42 tokens, but with an answer" in said
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
    asked = decode.temperature, decode.top_k, decode.effective_top_p, decode.adv_weight
    assert asked == (0.5, 3, 0.9, 2.0) and decode.report_all and notices == []
    assert decoding("--temperature 0")[0].decode.num_beams == 1
    alone = decoding("--adv-weight 0", method("cql", SMOKE))[0].decode
    assert alone.include_logits and not alone.include_adv
    beams = ILQLRun(decode=DecodeConfig(num_beams=4, num_generations=2, rerank="value"))
    config, [notice] = decoding("", beams)
    assert config.decode.num_beams == 1 and config.decode.rerank is None
    assert notice.startswith("The run chooses among several texts; here the agent gives one")
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
    folder = "runs/ilql-smoke-0"
    talks = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{WORDS[0]}\n/again\n"))
        assert main(["chat", folder, "--values", "--seed", "5", "--temperature", "2"]) == 0
        talks.append(capsys.readouterr().out)
    assert talks[0] == talks[1] and talks[0].count("1. ") == 2 and "advantage" in talks[0]
    assert main(["export", folder]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {folder}/export, of update 1\n") and "load_exported" in said
    names = {path.name for path in Path(folder, "export").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} < names
    assert "is not empty\n  raffia export" in fails(f"export {folder}", capsys)
    assert f"raffia chat {folder}\n" in fails(f"play {folder}", capsys)
    assert f"which run?\n  raffia chat {folder}\n" in fails("chat", capsys)
    assert f"raffia export {folder}\n" in fails("export", capsys)


def test_the_best_member_of_a_population_speaks_with_its_own_numbers(here, monkeypatch):
    ranges = ("adv_weight=0.1..100",)
    population = PopulationConfig(size=3, ranges=ranges, no_mutation=0.0, elitism=False)
    evaluate = replace(SMOKE.evaluate, every_updates=2, num_episodes=2)
    config = replace(SMOKE, population=population, evaluate=evaluate, num_updates=4)
    train(config, "runs/members", view=PlainView(io.StringIO()))
    own = float(best_of(find_checkpoint(Path("runs/members"), "newest"))["hyper", "adv_weight"])
    assert own != SMOKE.decode.adv_weight
    asked = []
    monkeypatch.setattr("raffia.cli.chat.talk", lambda run, config, **_: asked.append(config) or 0)
    for words in ([], ["--adv-weight", "3"]):
        assert main(["chat", "runs/members", "--checkpoint", "newest", *words]) == 0
    assert [config.decode.adv_weight for config in asked] == [pytest.approx(own), 3.0]


def test_a_talk_about_data(here, monkeypatch, capsys):
    chats(capsys, "--model.trunk.block_size 32")
    monkeypatch.setattr(sys, "stdin", io.StringIO("say 5\nwhat?\n" + "say 7\n" * 6))
    said = run("chat runs/chats-0 --seed 1", capsys)
    assert "you: say 5\nagent: " in said and said.count("agent: ") == 7
    assert "can't read this: there is no token for 'wh' in 'what?'" in said
    assert "(its context of 32 tokens is full: it no longer sees the first" in said
