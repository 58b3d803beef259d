"""From a file of conversations to an agent that answers better than the logged one."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from raffia.algorithms.ilql.config import TrunkConfig
from raffia.lm.data.dialogue import Dialogue
from raffia.recipes.ilql import ILQL_PRESETS, load_agent, train, with_sizes

FIRST = ["sorry to hear that", "what is the order number?", "not our problem"]
SECOND = ["we refund you", "we send a new one", "please call us"]
THINGS = ["shoes", "lamp", "phone", "book"]


def draw_dialogue(draw):
    """Angry customers want a refund, others a replacement; politeness is rewarded, too."""
    angry = draw.random() < 0.5
    complaint = f"my {draw.choice(THINGS)} is broken{'!!' * angry}"
    first, second = draw.choice(FIRST), draw.choice(SECOND)
    is_right = second == SECOND[0 if angry else 1]
    turns = [("user", complaint), ("assistant", first), ("user", "ok"), ("assistant", second)]
    return {
        "messages": [{"role": role, "content": text} for role, text in turns],
        "reward": is_right + (0.5, 0.0, -1.0)[FIRST.index(first)],
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_help_desk_is_learned_from_random_answers(tmp_path):
    """The logs' mean is 1/6 and the best is 1.5; answers are generated letter by letter."""
    draw = random.Random(0)
    rows = [json.dumps(draw_dialogue(draw)) for _ in range(4_000)]
    (tmp_path / "desk.jsonl").write_text("\n".join(rows))
    run = ILQL_PRESETS["dialogue"]
    run = replace(
        run,
        data=replace(run.data, files=(str(tmp_path / "desk.jsonl"),), tokenizer="characters"),
        model=replace(run.model, trunk=TrunkConfig(n_layer=2, n_head=2, n_embd=64, block_size=128)),
        num_updates=2_400,
    )
    assert train(with_sizes(run), tmp_path / "run").update == 2_400
    agent = load_agent(tmp_path / "run")
    agent.config = replace(agent.config, adv_weight=16.0)
    for end, answer in (("!!", SECOND[0]), ("", SECOND[1])):
        complaint = (f"my lamp is broken{end}", None)
        for utterances, best in (
            ([complaint], FIRST[0]),
            ([complaint, (FIRST[1], 0.0), ("ok", None)], answer),
        ):
            answers = Counter(agent.act(Dialogue(utterances, terminal=False)) for _ in range(20))
            assert answers[best] >= 18, answers
