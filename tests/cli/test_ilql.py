"""raffia train, resume, evaluate and list, for runs of ILQL."""

import json
from pathlib import Path

from raffia.cli import main
from raffia.recipes.run_folder import read_run
from tests.cli.test_runs import error_of


def train_on_chats(capsys, more=""):
    """Train a run on a file of dialogues."""
    rows = [{"utterances": [f"say {n}", str(n)], "rewards": [None, 1.0]} for n in range(10)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trunk = f"--model.trunk.n-layer 1 --model.trunk.n_embd 8 --model.trunk.n_head 2 {more}"
    run(f"train ilql --data chats.jsonl --num_updates 1 --batch_size 4 {trunk}", capsys)


SMALL = "--batch_size 4 --evaluate.num_episodes 4"


def run(args, capsys):
    assert main(args.split()) == 0
    return capsys.readouterr().out


def test_a_run_is_trained_resumed_and_evaluated(here, capsys):
    output = run(f"train ilql --preset ilql-smoke --num_updates 2 {SMALL}", capsys)
    assert output.startswith("ILQL on wordle, seed 0, in runs/ilql-smoke-0; Ctrl-C saves")
    assert "runs/ilql-smoke-0 finished: 2 updates in " in output and "step" not in output
    output = run("resume runs/ilql-smoke-0", capsys)
    assert "finished after 2 updates" in output and "--num_updates 4" in output
    output = run("resume runs/ilql-smoke-0 --num_updates 3", capsys)
    assert "resuming after update 2" in output and read_run("runs/ilql-smoke-0").num_updates == 3
    output = run("evaluate runs/ilql-smoke-0 --episodes 5", capsys)
    assert "return" in output and "won" in output
    [path] = Path("runs/ilql-smoke-0/evaluations").iterdir()
    record = json.loads(path.read_text())
    assert len(record["decodings"]["decode"]["returns"]) == 5
    dialogues = Path(f"runs/ilql-smoke-0/dialogues/{record['update']:09}.json")
    assert f"wrote {dialogues}" in output and dialogues.is_file()
    assert json.loads(run("evaluate runs/ilql-smoke-0 --episodes 5 --json", capsys)) == record
    output = error_of("resume runs/ilql-smoke-0 --loss.tau 0.9", capsys)
    assert "loss.tau shapes what is learnt" in output and "raffia train ilql --config" in output
    output = error_of("evaluate runs/ilql-smoke-0 --record", capsys)
    assert "--record is only for runs of EfficientZero" in output
    assert "but of ILQL on wordle" in error_of("play runs/ilql-smoke-0", capsys)
    assert "wordle" in run("list runs", capsys)


def test_a_file_of_dialogues_gives_the_sizes_and_the_name(here, capsys):
    train_on_chats(capsys)
    config = read_run("runs/chats-0")
    assert (config.task, config.data.files) == ("data", ("chats.jsonl",))
    assert config.model.trunk.vocab_size == 10 + len(set("say ")) + 6
    assert "token_loss" in run("evaluate runs/chats-0", capsys)
