"""Where each setting of a run of ILQL takes effect; see `test_settings`."""

import ast
import re
from contextlib import suppress
from dataclasses import replace

from raffia.algorithms.ilql.config import DecodeConfig, ILQLLossConfig, OptimizerConfig
from raffia.recipes.ilql import ILQL_PRESETS, with_sizes
from raffia.recipes.ilql.config import ILQLEvaluateConfig, WordleConfig
from raffia.recipes.population_config import PopulationConfig
from tests.recipes.ilql_runs import of_file, write_chats, write_model
from tests.recipes.runs import with_all

SMOKE = ILQL_PRESETS["ilql-smoke"]
WORDLE = replace(
    SMOKE,
    loss=ILQLLossConfig(beta=0.5, tau=0.8, dm_weight=0.1, cql_weight=0.1),
    optimizer=OptimizerConfig(
        learning_rate=0.01, max_grad_norm=0.5, weight_decay=0.01, warmup_updates=2, decay="linear"
    ),
    decode=DecodeConfig(adv_weight=4.0, top_p=None),
    wordle=WordleConfig(num_words=12, num_games=60),
    num_updates=6,
    batch_size=6,
    evaluate=ILQLEvaluateConfig(every_updates=3, num_episodes=8, batch_size=4),
    checkpoint=replace(SMOKE.checkpoint, every_updates=2),
)


def make_bases(folder):
    data = write_chats(folder / "chats.jsonl")
    model = write_model(folder / "model", "gpt2")
    file = with_sizes(of_file(data, loss=WORDLE.loss))
    language = with_sizes(of_file(data, model))
    return {
        "wordle": WORDLE,
        "planned": with_all(
            WORDLE, decode__plan__num_simulations=6, decode__plan__num_candidates=3
        ),
        "branching": with_all(WORDLE, wordle__games="branching"),
        "forms": with_all(WORDLE, model__evolvable_heads=True),
        "file": file,
        "short": with_all(file, data__max_len=15, data__too_long="skip"),
        "language": language,
        "lora": with_all(language, lora__rank=2, lora__dropout=0.1, lora__learn_embeddings=True),
        "members": with_all(
            WORDLE,
            seed=1,
            population=PopulationConfig(size=3, parameters=0.3, ranges=("learning_rate=1e-4..1",)),
            evaluate__every_updates=2,
        ),
    }


def effects_of(table):
    """For each setting: the run in which it is changed, its value, the first differing event.

    table: "run event: setting=value setting=value ...", for each run and event.
    """
    found = {}
    for run, kind, entries in re.findall(r"(\w+) (\w+):((?:\s+[\w.]+=\S+)+)", table):
        for name, _, text in (entry.partition("=") for entry in entries.split()):
            with suppress(ValueError, SyntaxError):
                text = ast.literal_eval(text)
            found[name] = run, text, kind
    return found


def tested_by(table):
    """For each setting: the test of its effect, where no runs can be compared.

    table: "file.py test: setting setting ...", for each test; a file may have several.
    """
    found, file, test = {}, "", ""
    for word in table.split():
        if word.endswith(".py"):
            file = word
        elif word.endswith(":"):
            test = word.removesuffix(":")
        else:
            found[word] = f"tests/{file}::{test}"
    return found


OF_BOTH = """
recipes/test_layouts.py
    test_a_run_is_the_same_in_any_layout: population.workers engine.name evaluators.num
        learners.num learners.sums
recipes/test_workers.py
    test_the_settings_of_workers_take_effect: engine.max_restarts engine.patience_seconds
        evaluators.cpus evaluators.gpus
    test_the_settings_of_the_engine_take_effect: engine.address engine.spares
    test_learners_on_ray_are_workers_of_its_engine: learners.gpus
"""
TESTED = """
algorithms/ilql/test_losses.py
    test_masks_of_finished_and_unfinished_rows: loss.mask
recipes/test_ilql_settings.py
    test_changed_text_of_the_same_length_and_reward_is_noticed: data.files
    test_other_names_and_roles_need_no_python: data.columns data.roles
    test_settings_that_save_memory_or_time_give_the_same_weights: compile
        model.trunk.gradient_checkpointing
recipes/test_ilql_language_models.py
    test_embeddings_learn_where_tokens_were_added: data.tokenizer data.add_special_tokens
    test_a_model_of_transformers_is_trained_and_resumed_without_its_folder: model.trunk.kind
recipes/test_ilql_chat_templates.py
    test_an_export_keeps_the_template: data.chat_template
recipes/test_ilql.py
    test_wrong_files_are_refused_and_leave_no_folder: data.malformed
    test_a_run_starts_from_a_language_model: language_model
    test_train_fills_in_sizes_and_refuses_others_without_a_folder: model.trunk.vocab_size
    test_whole_utterances_as_actions: model.per_token
    test_runs_on_files_hold_out_rows_and_refuse_changed_files: task
    test_games_by_letters_and_of_all_kinds: wordle.num_words wordle.layout
algorithms/ilql/decoding/test_generate.py
    test_complete_texts_leave_the_batch_and_the_prompt_is_read_once: decode.num_generations
    test_generations_are_re_ranked: decode.rerank
    test_cached_equals_uncached: decode.max_new_tokens decode.report_all
recipes/test_layouts.py
    test_a_resume_without_evaluators_joins_open_evaluations: evaluators.join_after
recipes/test_workers.py
    test_evaluators_compute_on_their_device: evaluators.device
recipes/test_sharded_states.py
    test_each_process_has_its_shard_alone: learners.state
recipes/test_ilql_own_environment.py
    test_a_custom_environment_in_training_resuming_and_evaluation: evaluate.env
recipes/test_settings.py
    test_networks_lie_on_the_device: device
    test_words_come_from_a_file: wordle.words
"""
EFFECTS = """
wordle shapes: model.trunk.n_layer=2 model.trunk.n_embd=18 model.trunk.block_size=40
    model.trunk.dim_feedfwd=10 model.trunk.dropout=0.1 model.trunk.bias=False
    model.trunk.positions=rotary model.policy=separate model.target=trunk model.double_q=False
    model.evolvable_heads=True
wordle gradient: model.trunk.n_head=1 model.trunk.layer_norm_eps=0.01 model.trunk.activation=Tanh
    model.detach_v=True model.detach_q=True model.detach_pi=True loss.gamma=0.9 loss.tau=0.6
    loss.beta=0.9 loss.exp_weights=False loss.transition_weight=0.5 loss.clip_weight=0.5
    loss.value_min=0.5 loss.value_max=-0.5 loss.awac_weight=0.5 loss.v_weight=0.5 loss.q_weight=0.5
    loss.cql_weight=0.5 loss.cql_temp=0.5 loss.dm_weight=0.5 loss.dm_margin=0.5
    loss.mc_returns=True loss.backup=max precision=bfloat16
forms shapes: model.max_head_layers=2 model.max_head_nodes=40
wordle step: target.alpha=0.5 target.interval=2 optimizer.learning_rate=0.02
    optimizer.value_rate=2.0 optimizer.weight_decay=0.1 optimizer.beta1=0.5 optimizer.beta2=0.9
    optimizer.max_grad_norm=0.1 optimizer.warmup_updates=3 optimizer.decay=cosine
    optimizer.final_share=0.5 num_updates=7
wordle evaluate: decode.temperature=3.0 decode.top_k=2 decode.top_p=0.2 decode.include_logits=False
    decode.include_adv=False decode.adv_weight=20.0 decode.adv_clip=-9.0 decode.num_beams=1
    evaluate.every_updates=2 evaluate.num_episodes=9 evaluate.adv_weights=(0.0,)
planned evaluate: decode.plan.num_simulations=12 decode.plan.num_candidates=8
    decode.plan.max_depth=1 decode.plan.discount=0.1 decode.plan.policy=muzero
    decode.plan.inner_reward=implied decode.plan.noise=5.0
wordle data: keep_best=0.5 wordle.num_held_out=3 wordle.games=branching wordle.num_games=50
    wordle.data_seed=1 wordle.scripts.expert=0.5 wordle.scripts.fair=0.5 wordle.scripts.random=0.5
    wordle.scripts.wrong=0.5 wordle.scripts.stuck=0.5 wordle.scripts.non_word=0.5
wordle weights: seed=1
wordle layout: num_threads=2 num_micro_batches=2 population.size=2
branching data: wordle.branching.num_expert=2 wordle.branching.num_adversarial=2
    wordle.branching.num_slow=2 wordle.branching.num_repeats=2
file data: data.token_reward=-0.5 data.held_out=0.3 data.split_seed=1
file batch: data.buckets=(20,) data.sort_window=3
short data: data.max_len=13 data.too_long=cut
lora shapes: lora.rank=1 lora.layers=('proj',) lora.learn_embeddings=False
lora gradient: lora.alpha=8.0 lora.dropout=0.5
wordle batch: batch_size=5 checkpoint.every_updates=3
file evaluate: evaluate.batch_size=2
wordle end: evaluate.target_return=-99.0
members generation: population.method=truncation population.tournament_size=3
    population.elitism=False population.ranges=('tau=0.5..0.9',)
wordle save: checkpoint.keep=1
"""
SETTINGS = {
    **effects_of(EFFECTS),
    "decode.exp_adv": ("wordle", {"exp_adv": False, "adv_weight": 0.9}, "evaluate"),
    **tested_by(TESTED),
    **tested_by(OF_BOTH),
}
