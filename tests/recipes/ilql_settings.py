"""Each setting of a run of ILQL acts, and acts there; see `test_settings`."""

from dataclasses import replace

from raffia.algorithms.ilql.config import DecodeConfig, ILQLLossConfig, OptimizerConfig
from raffia.recipes.ilql import with_sizes
from raffia.recipes.ilql.config import ILQLEvaluateConfig, WordleConfig
from raffia.recipes.ilql.presets import ILQL_PRESETS
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


RUNS, WORDS = "tests/recipes/test_ilql.py::", "tests/recipes/test_ilql_settings.py::"
MODELS = "tests/recipes/test_ilql_language_models.py::"
CHATS = "tests/recipes/test_ilql_chat_templates.py::"
OWN = "tests/recipes/test_ilql_own_environment.py::"
HERE = "tests/recipes/test_settings.py::"
LOSSES = "tests/algorithms/ilql/test_losses.py::"
LAYOUTS = "tests/recipes/test_layouts.py::test_wherever_it_runs_it_is_the_same_run"
WORKERS = "tests/recipes/test_workers.py::"
ARRIVED = WORKERS + "test_the_settings_of_workers_get_there"
ENGINE = WORKERS + "test_the_settings_of_the_engine_get_there"
OF_BOTH = {
    "population.workers": LAYOUTS,
    "engine.name": LAYOUTS,
    "engine.address": ENGINE,
    "engine.max_restarts": ARRIVED,
    "engine.spares": ENGINE,
    "engine.patience_seconds": ARRIVED,
    "evaluators.num": LAYOUTS,
    "evaluators.cpus": ARRIVED,
    "evaluators.gpus": ARRIVED,
    "learners.num": LAYOUTS,
    "learners.sums": LAYOUTS,
}
SPEAKING = "tests/algorithms/ilql/decoding/test_generate.py::"
# Of each setting: of which run it is changed, to what, and what is unlike first; or a test that
# sees it act.
SETTINGS = {
    "model.trunk.n_layer": ("wordle", 2, "shapes"),
    "model.trunk.n_head": ("wordle", 1, "gradient"),
    "model.trunk.n_embd": ("wordle", 18, "shapes"),
    "model.trunk.block_size": ("wordle", 40, "shapes"),
    "model.trunk.dim_feedfwd": ("wordle", 10, "shapes"),
    "model.trunk.dropout": ("wordle", 0.1, "shapes"),
    "model.trunk.layer_norm_eps": ("wordle", 1e-2, "gradient"),
    "model.trunk.activation": ("wordle", "Tanh", "gradient"),
    "model.trunk.bias": ("wordle", False, "shapes"),
    "model.trunk.positions": ("wordle", "rotary", "shapes"),
    "model.policy": ("wordle", "separate", "shapes"),
    "model.target": ("wordle", "trunk", "shapes"),
    "model.double_q": ("wordle", False, "shapes"),
    "model.detach_v": ("wordle", True, "gradient"),
    "model.detach_q": ("wordle", True, "gradient"),
    "model.detach_pi": ("wordle", True, "gradient"),
    "model.evolvable_heads": ("wordle", True, "shapes"),
    "model.max_head_layers": ("forms", 2, "shapes"),
    "model.max_head_nodes": ("forms", 40, "shapes"),
    "loss.gamma": ("wordle", 0.9, "gradient"),
    "loss.tau": ("wordle", 0.6, "gradient"),
    "loss.beta": ("wordle", 0.9, "gradient"),
    "loss.exp_weights": ("wordle", False, "gradient"),
    "loss.transition_weight": ("wordle", 0.5, "gradient"),
    "loss.clip_weight": ("wordle", 0.5, "gradient"),
    "loss.value_min": ("wordle", 0.5, "gradient"),
    "loss.value_max": ("wordle", -0.5, "gradient"),
    "loss.awac_weight": ("wordle", 0.5, "gradient"),
    "loss.v_weight": ("wordle", 0.5, "gradient"),
    "loss.q_weight": ("wordle", 0.5, "gradient"),
    "loss.cql_weight": ("wordle", 0.5, "gradient"),
    "loss.cql_temp": ("wordle", 0.5, "gradient"),
    "loss.dm_weight": ("wordle", 0.5, "gradient"),
    "loss.dm_margin": ("wordle", 0.5, "gradient"),
    "loss.mc_returns": ("wordle", True, "gradient"),
    "loss.backup": ("wordle", "max", "gradient"),
    "loss.mask": LOSSES + "test_masks_of_rows_that_end_and_rows_that_do_not",
    "target.alpha": ("wordle", 0.5, "step"),
    "target.interval": ("wordle", 2, "step"),
    "optimizer.learning_rate": ("wordle", 0.02, "step"),
    "optimizer.value_rate": ("wordle", 2.0, "step"),
    "optimizer.weight_decay": ("wordle", 0.1, "step"),
    "optimizer.beta1": ("wordle", 0.5, "step"),
    "optimizer.beta2": ("wordle", 0.9, "step"),
    "optimizer.max_grad_norm": ("wordle", 0.1, "step"),
    "optimizer.warmup_updates": ("wordle", 3, "step"),
    "optimizer.decay": ("wordle", "cosine", "step"),
    "optimizer.final_share": ("wordle", 0.5, "step"),
    "decode.temperature": ("wordle", 3.0, "evaluate"),
    "decode.top_k": ("wordle", 2, "evaluate"),
    "decode.top_p": ("wordle", 0.2, "evaluate"),
    "decode.include_logits": ("wordle", False, "evaluate"),
    "decode.include_adv": ("wordle", False, "evaluate"),
    "decode.exp_adv": ("wordle", {"exp_adv": False, "adv_weight": 0.9}, "evaluate"),
    "decode.adv_weight": ("wordle", 20.0, "evaluate"),
    "decode.adv_clip": ("wordle", -9.0, "evaluate"),
    "decode.num_beams": ("wordle", 1, "evaluate"),
    "decode.plan.num_simulations": ("planned", 12, "evaluate"),
    "decode.plan.num_candidates": ("planned", 8, "evaluate"),
    "decode.plan.max_depth": ("planned", 1, "evaluate"),
    "decode.plan.discount": ("planned", 0.1, "evaluate"),
    "decode.plan.policy": ("planned", "muzero", "evaluate"),
    "decode.plan.inner_reward": ("planned", "implied", "evaluate"),
    "decode.plan.noise": ("planned", 5.0, "evaluate"),
    "precision": ("wordle", "bfloat16", "gradient"),
    "keep_best": ("wordle", 0.5, "data"),
    "seed": ("wordle", 1, "weights"),
    "num_threads": ("wordle", 2, "made"),
    "wordle.num_held_out": ("wordle", 3, "data"),
    "wordle.games": ("wordle", "branching", "data"),
    "wordle.num_games": ("wordle", 50, "data"),
    "wordle.data_seed": ("wordle", 1, "data"),
    "wordle.scripts.expert": ("wordle", 0.5, "data"),
    "wordle.scripts.fair": ("wordle", 0.5, "data"),
    "wordle.scripts.random": ("wordle", 0.5, "data"),
    "wordle.scripts.wrong": ("wordle", 0.5, "data"),
    "wordle.scripts.stuck": ("wordle", 0.5, "data"),
    "wordle.scripts.non_word": ("wordle", 0.5, "data"),
    "wordle.branching.num_expert": ("branching", 2, "data"),
    "wordle.branching.num_adversarial": ("branching", 2, "data"),
    "wordle.branching.num_slow": ("branching", 2, "data"),
    "wordle.branching.num_repeats": ("branching", 2, "data"),
    "data.token_reward": ("file", -0.5, "data"),
    "data.held_out": ("file", 0.3, "data"),
    "data.split_seed": ("file", 1, "data"),
    "data.buckets": ("file", (20,), "batch"),
    "data.sort_window": ("file", 3, "batch"),
    "data.max_len": ("short", 13, "data"),
    "data.too_long": ("short", "cut", "data"),
    "data.files": WORDS + "test_other_words_of_the_same_length_and_reward_are_noticed",
    "data.columns": WORDS + "test_other_names_and_roles_need_no_python",
    "data.roles": WORDS + "test_other_names_and_roles_need_no_python",
    "data.tokenizer": MODELS + "test_embeddings_learn_where_tokens_were_added",
    "data.chat_template": CHATS + "test_an_export_keeps_the_template",
    "data.add_special_tokens": MODELS + "test_embeddings_learn_where_tokens_were_added",
    "data.malformed": RUNS + "test_what_is_wrong_with_files_is_said_and_leaves_no_folder",
    "language_model": RUNS + "test_a_language_model_is_begun_with",
    "lora.rank": ("lora", 1, "shapes"),
    "lora.alpha": ("lora", 8.0, "gradient"),
    "lora.dropout": ("lora", 0.5, "gradient"),
    "lora.layers": ("lora", ("proj",), "shapes"),
    "lora.learn_embeddings": ("lora", False, "shapes"),
    "num_updates": ("wordle", 7, "step"),
    "batch_size": ("wordle", 5, "batch"),
    "num_micro_batches": ("wordle", 2, "made"),
    **OF_BOTH,
    "evaluators.join_after": (
        "tests/recipes/test_layouts.py::test_a_resume_without_evaluators_joins_what_was_open"
    ),
    "evaluators.device": WORKERS + "test_evaluators_compute_on_their_device",
    "learners.state": (
        "tests/recipes/test_sharded_states.py::test_each_process_holds_its_part_alone"
    ),
    "evaluate.every_updates": ("wordle", 2, "evaluate"),
    "evaluate.num_episodes": ("wordle", 9, "evaluate"),
    "evaluate.batch_size": ("file", 2, "evaluate"),
    "evaluate.adv_weights": ("wordle", (0.0,), "evaluate"),
    "evaluate.target_return": ("wordle", -99.0, "end"),
    "evaluate.env": OWN + "test_an_environment_of_ones_own_from_the_first_word_to_the_last",
    "device": HERE + "test_networks_lie_on_the_device",
    "compile": WORDS + "test_what_saves_memory_or_time_learns_the_same",
    "model.trunk.kind": MODELS
    + "test_a_model_of_transformers_is_trained_and_gone_on_with_without_its_folder",
    "model.trunk.vocab_size": RUNS + "test_sizes_that_do_not_fit_are_refused_and_leave_no_folder",
    "model.trunk.gradient_checkpointing": WORDS + "test_what_saves_memory_or_time_learns_the_same",
    "model.per_token": RUNS + "test_whole_utterances_as_actions",
    "decode.num_generations": SPEAKING
    + "test_complete_texts_leave_the_batch_and_the_prompt_is_read_once",
    "decode.rerank": SPEAKING + "test_generations_are_re_ranked",
    "decode.max_new_tokens": SPEAKING + "test_cached_equals_reading_all_anew",
    "decode.report_all": SPEAKING + "test_cached_equals_reading_all_anew",
    "task": RUNS + "test_files_are_learnt_from_and_some_rows_held_out",
    "wordle.num_words": RUNS + "test_games_by_letters_and_of_all_kinds",
    "wordle.words": HERE + "test_words_come_from_a_file",
    "wordle.layout": RUNS + "test_games_by_letters_and_of_all_kinds",
    "population.size": ("wordle", 2, "made"),
    "population.method": ("members", "truncation", "generation"),
    "population.tournament_size": ("members", 3, "generation"),
    "population.elitism": ("members", False, "generation"),
    "population.ranges": ("members", ("tau=0.5..0.9",), "generation"),
    "checkpoint.every_updates": ("wordle", 3, "batch"),
    "checkpoint.keep": ("wordle", 1, "save"),
}
