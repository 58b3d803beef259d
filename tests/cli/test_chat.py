"""raffia chat and raffia export: scripted dialogues, and refused calls."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raffia.algorithms.ilql.config import DecodeConfig, method
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.cli import main
from raffia.cli.chat import _parser, decoding_settings
from raffia.cli.conversation import Conversation, Game, Session, shade
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
from tests.cli.test_ilql import run, train_on_chats
from tests.cli.test_runs import error_of

SMOKE = ILQL_PRESETS["ilql-smoke"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class ScriptedGuessing(Guessing):
    """Makes scripted guesses."""

    guesses: list[str]

    def think(self):
        self.guess = self.guesses.pop(0)
        yield Piece(self.guess, self.guess, 0.5, 0.25, -1.5)
        yield Piece("", "</a>", 1.0, -0.5, -1.0)


class ScriptedChat(Chat):
    """Gives scripted answers; its context holds the last two utterances."""

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


def play(policy, typed, guesses, stdout=None, **options):
    stdout = io.StringIO() if stdout is None else stdout
    ScriptedGuessing.guesses = [*guesses]
    game = ScriptedGuessing(policy, make_wordle(SMOKE.wordle))
    Game(game, io.StringIO(typed), stdout, **options).run()
    return stdout.getvalue()


def talk(policy, typed, answers):
    stdout, ScriptedChat.answers = io.StringIO(), [*answers]
    Conversation(ScriptedChat(policy), io.StringIO(typed), stdout).run()
    return stdout.getvalue()


WORDS = make_wordle(SMOKE.wordle).vocabulary.words


FIRST, SECOND = WORDS[:2]


# -- Wordle


def test_a_person_answers_with_colours(policy):
    output = play(policy, "\nggg\nxxxxx1\n\nbbbbb\n/undo\nGGGGG\n", [FIRST, SECOND])
    assert (
        f"1. {FIRST}\ncolours of {FIRST}: ggg\n'ggg' is not an answer to {FIRST}: type five"
        in output
    )
    assert output.count("is not an answer to") == 3
    assert (
        f"2. {SECOND}\ncolours of {SECOND}: /undo\ncolours of {FIRST}: GGGGG\nFound in 1" in output
    )
    assert output.endswith("your word, or Enter: \nGoodbye.\n")


def test_six_guesses_and_another_game(policy):
    output = play(policy, "\n" + 6 * "bbbbb\n" + "\n/new\nab\n", [FIRST] * 7)
    assert "no word that the agent knows fits all these colours; /undo takes them back" in output
    assert f"6. {FIRST}\ncolours of {FIRST}: bbbbb\n" in output
    assert "Not found in 6 guesses.\n" in output
    assert f"your word, or Enter: \n1. {FIRST}\ncolours of {FIRST}: /new\nyour word, or" in output
    assert "'ab' is not a word of five letters a to z." in output


def test_the_word_may_be_given_in_a_game_unless_colours_contradict_it(policy):
    output = play(policy, f"\nbbbbb\n{FIRST}\n/undo\n{SECOND}\n", [FIRST, SECOND, SECOND])
    assert f"That can't be your word: for {FIRST}, {FIRST} gets ggggg, but got bbbbb." in output
    assert f"colours of {FIRST}: {SECOND}\n   {FIRST}  " in output
    assert f"2. {SECOND}  ggggg\nFound in 2 guesses." in output


def test_unknown_words(policy):
    output = play(policy, "queue\n/words\n", ["zzz", *[WORDS[0]] * 5])
    assert f"(queue is not one of the {len(WORDS)} words that the agent knows, so it is" in output
    assert "1. zzz  bbbbb\n(not a word; it counts as a guess, all black)\n" in output
    assert "Not found in 6 guesses; it was queue." in output
    assert all(word in output for word in WORDS) and "still fit: " in output


def test_commands_at_the_wrong_time(policy):
    output = play(policy, "/undo\n/again\n/foo\n/help\n", [])
    assert "you have no colours to take back" in output and "no guess to repeat" in output
    assert "There is no command /foo; /help lists them." in output
    assert "/words   the words that the agent knows" in output
    again = play(policy, "\n/again\nggggg\n", WORDS[:2])
    assert f"colours of {WORDS[0]}: /again\n1. {WORDS[1]}\ncolours of {WORDS[1]}: gggg" in again


def test_values_and_colours(policy, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = play(policy, f"{FIRST}\n", [FIRST], values=True)
    assert "  token  share      V  advantage\n" in output
    assert f"  {FIRST}   50 %  -1.50      +0.25\n  </a>   100 %  -1.00      -0.50\n" in output
    bright = play(policy, f"{FIRST}\n", [FIRST], Terminal(), values=True, weight=2.0)
    assert f"\033[32m{FIRST}\033[0m" in bright and "\033[32mg\033[0m" in bright
    assert f"\033[32m{FIRST}" not in play(policy, f"{FIRST}\n", [FIRST], Terminal())
    assert [shade(a, 1.0) for a in (1.0, 0.05, -0.5, -2.0)] == ["green", "", "yellow", "red"]


# -- data


def test_a_dialogue(policy):
    pair = "<b><b><g><b><y>"
    typed = f"{pair}\n\n/again\n/add {pair}\n/go\n{pair}\n/new\n/again\n//help\n/help\n/quit\nno\n"
    output = talk(policy, typed, ["oh", "ah", "cut", "so", "yes"])
    assert output.startswith("Type a text; /help lists the commands, /quit quits.\nyou: ")
    assert f"you: {pair}\nagent: oh\nyou: \nyou: /again\nagent: ah\nyou: /add" in output
    assert "agent: cut\n(cut here: it may say 3 tokens at once)\n" in output
    assert output.count("it no longer sees the first") == 2
    assert "/new\n(starting over)\nyou: /again\n(there is no answer to repeat)\n" in output
    assert "/add TEXT   add a text" in output and output.endswith("you: /quit\nGoodbye.\n")


def test_texts_that_the_agent_cannot_read_are_refused(policy):
    output = talk(policy, "hello\n" + "<b><b><g><b><y>" * 40 + "\n", ["oh"])
    assert "agent: oh" in output  # words are one unknown token here
    assert "(the agent can't read this: the text has 42 tokens, but with an answer" in output
    greedy = ILQL_Policy(policy.agent, policy.tokenizer, DecodeConfig(num_beams=1))
    assert "so this is the same" in talk(greedy, "hello\n/again\n", ["oh", "oh"])


def test_lines_end_at_the_end_of_the_file_also_without_a_newline(policy):
    assert talk(policy, "hello", ["oh"]).endswith("agent: oh\nyou: \nGoodbye.\n")
    with pytest.raises(NotImplementedError):
        Session(None, io.StringIO("a"), io.StringIO()).run()


# -- the command


def decoding(args, config=SMOKE):
    return decoding_settings(config, _parser().read(args.split()), Path("runs/a"))


def test_flags_change_the_decoding():
    config, notices = decoding("--temperature 0.5 --top_k 3 --top-p 0.9 --adv_weight 2 --values")
    decode = config.decode
    found = decode.temperature, decode.top_k, decode.effective_top_p, decode.adv_weight
    assert found == (0.5, 3, 0.9, 2.0) and decode.report_all and notices == []
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
    for args in ("--temperature -1", "--top_k 0", "--top_p 2", "--adv_weight -1"):
        with pytest.raises(UsageError):
            decoding(args)


def test_an_agent_without_values_is_not_asked_for_them():
    cloned = method("bc", SMOKE)
    assert not decoding("", cloned)[0].decode.include_adv
    assert not decoding("--adv_weight 0", cloned)[0].decode.needs_values
    with pytest.raises(UsageError, match="--values and --adv-weight: runs/a has learnt no values"):
        decoding("--values --adv_weight 2", cloned)


def test_a_run_from_training_to_chat_and_export(here, monkeypatch, capsys):
    small = "--num_updates 1 --batch_size 4 --evaluate.num_episodes 4"
    assert main(f"train ilql --preset ilql-smoke {small}".split()) == 0
    capsys.readouterr()
    folder = "runs/ilql-smoke-0"
    outputs = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{WORDS[0]}\n/again\n"))
        assert main(["chat", folder, "--values", "--seed", "5", "--temperature", "2"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and outputs[0].count("1. ") == 2 and "advantage" in outputs[0]
    assert main(["export", folder]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"wrote {folder}/export, of update 1\n") and "load_exported" in output
    names = {path.name for path in Path(folder, "export").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} < names
    assert "is not empty\n  raffia export" in error_of(f"export {folder}", capsys)
    assert f"raffia chat {folder}\n" in error_of(f"play {folder}", capsys)
    assert f"which run?\n  raffia chat {folder}\n" in error_of("chat", capsys)
    assert f"raffia export {folder}\n" in error_of("export", capsys)


def test_the_best_member_of_a_population_chats_with_its_own_hyperparameters(here, monkeypatch):
    ranges = ("adv_weight=0.1..100",)
    population = PopulationConfig(size=3, ranges=ranges, no_mutation=0.0, elitism=False)
    evaluate = replace(SMOKE.evaluate, every_updates=2, num_episodes=2)
    config = replace(SMOKE, population=population, evaluate=evaluate, num_updates=4)
    train(config, "runs/members", view=PlainView(io.StringIO()))
    own = float(best_of(find_checkpoint(Path("runs/members"), "newest"))["hyper", "adv_weight"])
    assert own != SMOKE.decode.adv_weight
    calls = []
    monkeypatch.setattr(
        "raffia.cli.chat.talk", lambda run, *args, **to: calls.append((*args, to)) or 0
    )
    for args in ([], ["--adv-weight", "3", "--device", "cuda"]):
        assert main(["chat", "runs/members", "--checkpoint", "newest", *args]) == 0
    assert [config.decode.adv_weight for config, _ in calls] == [pytest.approx(own), 3.0]
    assert [to["device"] for _, to in calls] == ["cpu", "cuda"]


def test_a_dialogue_of_a_run_on_data(here, monkeypatch, capsys):
    train_on_chats(capsys, "--model.trunk.block_size 32")
    monkeypatch.setattr(sys, "stdin", io.StringIO("say 5\nwhat?\n" + "say 7\n" * 6))
    output = run("chat runs/chats-0 --seed 1", capsys)
    assert "you: say 5\nagent: " in output and output.count("agent: ") == 7
    assert "can't read this: there is no token for 'wh' in 'what?'" in output
    assert "(its context of 32 tokens is full: it no longer sees the first" in output
