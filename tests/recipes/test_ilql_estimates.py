"""Scores of agents on data: independent of their hyperparameters and of the loss."""

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks.ilql_exact import policy
from benchmarks.ilql_exact_task import dialogues as exact_dialogues
from benchmarks.ilql_exact_task import exact_return
from raffia.algorithms.ilql import method
from raffia.algorithms.ilql.config import DecodeConfig, OptimizerConfig, TargetConfig, TrunkConfig
from raffia.cli.ilql import figures, table
from raffia.recipes.ilql import (
    ILQL_PRESETS,
    ILQLEvaluation,
    evaluate,
    load_agent,
    train,
    with_sizes,
)
from raffia.recipes.ilql.config import DialogueDataConfig
from raffia.recipes.ilql.evaluation import Replies, fitness_of, with_estimate
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.report.folder import read_run
from raffia.train import Checkpoints

from .ilql_runs import of_file, write_chats
from .runs import Quiet, rows, with_all


def population(tmp_path, **changes):
    config = of_file(write_chats(tmp_path / "chats.jsonl"), **changes)
    three = PopulationConfig(size=3, ranges=("tau=0.5..0.95", "q_weight=0.1..2"))
    return with_sizes(replace(config, population=three))


@pytest.mark.parametrize("name", ["ilql", "cql"])  # with an estimate; without one
def test_a_member_s_fitness_does_not_depend_on_its_loss_weights(name, tmp_path):
    """Three members with the same networks and other hyperparameters."""
    config = method(name, population(tmp_path))
    (tmp_path / "run").mkdir()
    run = ILQLExperiment(config, tmp_path / "run", Quiet())
    state = run.init()
    for entries in (state["params"], state["target"]):
        for tensor in entries.values(True, True):
            tensor[1:] = tensor[:1]
    state["hyper", "q_weight"][1] = 0.001
    state["hyper", "awac_weight"][1] = 0.001
    state["hyper", "tau"][2] = 0.5
    state["hyper", "gamma"][2] = 0.1
    evaluated = run.evaluate(state, lambda: False)
    run.close()
    fitness = evaluated.values["fitness"]
    assert fitness[0] == fitness[1] == fitness[2] and math.isfinite(fitness[0])


def replies(decoded, plain, rewards):
    table = [torch.tensor(x, dtype=torch.float64).unsqueeze(-1) for x in (decoded, plain, rewards)]
    return Replies(*table, torch.ones_like(table[0], dtype=torch.bool), worst=-1.0)


def test_members_are_compared_with_the_policy_that_fits_the_data_best():
    """A policy of unlikely answers does not gain by preferring the better of them."""
    ends = [1.0, -1.0] * 20
    half, tenth, never = math.log(0.5), math.log(0.1), math.log(0.001)
    fitted = replies([math.log(0.8), math.log(0.2)] * 20, [half] * 40, ends)
    unlikely = replies([tenth, never] * 20, [math.log(0.01)] * 40, ends)
    assert fitted.fit > unlikely.fit
    alone, compared = (
        with_estimate(ILQLEvaluation(held_out={"loss": 0.5}, replies=unlikely), reference)
        for reference in (None, fitted)
    )
    assert fitness_of(alone) > 0 > fitness_of(compared)
    good = with_estimate(ILQLEvaluation(held_out={"loss": 9.0}, replies=fitted), fitted)
    assert fitness_of(good) > 0 and good.held_out["estimated_return"] == pytest.approx(0.6)


def test_the_best_checkpoint_is_surely_better_than_the_logs_or_the_newest(tmp_path):
    config = with_sizes(of_file(write_chats(tmp_path / "chats.jsonl")))
    train(config, tmp_path / "run", view=Quiet())
    evaluations = rows(tmp_path / "run", "evaluate")
    assert [row["update"] for row in evaluations] == [3, 6]
    for row in evaluations:
        gain = row["estimated_return"] - row["logged_return"]
        assert row["score"] == pytest.approx(gain if row["gain_low"] > 0 else 0.0)
        assert row["estimated_low"] <= row["estimated_return"] <= row["estimated_high"]
    best = Checkpoints(tmp_path / "run" / "checkpoints").best()
    assert [row["score"] for row in evaluations] == [0.0, 0.0] and best.update == 6
    assert [evaluation.score for evaluation in read_run(tmp_path / "run").evaluations] == [0.0, 0.0]
    text = table(figures(evaluate(tmp_path / "run", episodes=5)))
    assert "estimated return when decoding" in text and "do not measure how well it sp" in text
    assert "too few to rely on" in text and "score" not in text


UTTERANCES = {"loss__cql_weight": 0.0, "model__per_token": False}


@pytest.mark.parametrize("changes", [{"loss__beta": 1.0}, UTTERANCES])
def test_without_an_estimate_the_score_is_the_loss(changes, tmp_path):
    config = of_file(write_chats(tmp_path / "chats.jsonl"), num_updates=3)
    train(with_sizes(with_all(config, **changes)), tmp_path / "run", view=Quiet())
    found = evaluate(tmp_path / "run", episodes=5)
    assert found.held_out["score"] == -found.held_out["loss"]
    assert "No return is estimated" in table(figures(found))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_estimate_for_an_exact_task_is_near_the_true_return(tmp_path):
    """While the loss hardly moves, the return and its estimate rise to the optimum."""
    dialogues = [json.dumps({"sequence": one.to_sequence()[0]}) for one in exact_dialogues()]
    (tmp_path / "exact.jsonl").write_text("\n".join(10 * dialogues))
    base = ILQL_PRESETS["dialogue"]
    config = replace(
        base,
        data=DialogueDataConfig(files=(str(tmp_path / "exact.jsonl"),), held_out=0.3),
        model=replace(base.model, trunk=TrunkConfig(n_layer=2, n_head=4, n_embd=32, block_size=16)),
        loss=replace(base.loss, tau=0.9, cql_weight=0.0),
        target=TargetConfig(alpha=0.05),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_updates=100, decay="cosine"),
        decode=DecodeConfig(adv_weight=16.0, num_beams=1),
        num_updates=800,
        batch_size=64,
        evaluate=replace(base.evaluate, every_updates=200),
    )
    train(with_sizes(config), tmp_path / "run", view=Quiet())
    evaluations = rows(tmp_path / "run", "evaluate")
    exact = {}
    for which in ("best", "newest"):
        agent = load_agent(tmp_path / "run", which)
        networks = agent.agent.model, agent.agent.target
        exact[which] = exact_return(policy(*networks, agent.config))
    assert exact == pytest.approx({"best": 2.0, "newest": 2.0})
    assert evaluations[0]["score"] == 0 < max(row["score"] for row in evaluations)
    low, high = (evaluations[-1][f"estimated_{bound}"] for bound in ("low", "high"))
    assert low <= exact["newest"] <= high + 0.1 and low > evaluations[-1]["logged_return"]


def test_the_score_is_the_gain_where_it_is_significant():
    """Three of four dialogues are those of decoding, with rewards: the interval is narrow. With
    one such dialogue among many the gain is as large, but not significant."""

    def scored(num_right, num_wrong):
        num = num_right + num_wrong
        log_ratio = torch.full((num, 1), math.log(num / num_right), dtype=torch.float64)
        log_ratio[num_right:] = -30.0  # decoding would not give these
        rewards = torch.zeros(num, 1, dtype=torch.float64)
        rewards[:num_right] = torch.linspace(0.9, 1.1, num_right, dtype=torch.float64)[:, None]
        mask = torch.ones(num, 1, dtype=torch.bool)
        replies = Replies(log_ratio, torch.zeros_like(log_ratio), rewards, mask, 0.0)
        return with_estimate(ILQLEvaluation(held_out={"loss": 0.5}, replies=replies)).held_out

    sure, unsure = scored(60, 20), scored(1, 20)
    assert sure["gain_low"] > 0 and unsure["gain_low"] <= 0
    assert sure["score"] == pytest.approx(sure["estimated_return"] - sure["logged_return"])
    assert sure["score"] > sure["gain_low"] and unsure["score"] == 0.0
