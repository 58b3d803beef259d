"""ILQL: offline reinforcement learning for language models.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raffia.algorithms.ilql.agent import ILQL
    from raffia.algorithms.ilql.config import ILQLConfig, method
    from raffia.algorithms.ilql.evaluator import AgentEvaluation, ILQL_Evaluator
    from raffia.algorithms.ilql.learner import ILQLLearner
    from raffia.algorithms.ilql.loss import Loss, with_row_means
    from raffia.algorithms.ilql.model import ILQLModel, ILQLOutputs, ILQLTarget, make_target
    from raffia.algorithms.ilql.ngrams import NGram, TopAdvantageNGrams
    from raffia.algorithms.ilql.policy import ILQL_Policy
    from raffia.lm.decoding.config import DecodeConfig

__all__ = [
    "AgentEvaluation",
    "DecodeConfig",
    "ILQL",
    "ILQLConfig",
    "ILQLLearner",
    "ILQLModel",
    "ILQLOutputs",
    "ILQLTarget",
    "ILQL_Evaluator",
    "ILQL_Policy",
    "Loss",
    "NGram",
    "TopAdvantageNGrams",
    "make_target",
    "method",
    "with_row_means",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "ILQLConfig" | "method":
            return getattr(import_module("raffia.algorithms.ilql.config"), name)
        case "DecodeConfig":
            return import_module("raffia.lm.decoding.config").DecodeConfig
        case "ILQL":
            return import_module("raffia.algorithms.ilql.agent").ILQL
        case "AgentEvaluation" | "ILQL_Evaluator":
            return getattr(import_module("raffia.algorithms.ilql.evaluator"), name)
        case "ILQL_Policy":
            return import_module("raffia.algorithms.ilql.policy").ILQL_Policy
        case "NGram" | "TopAdvantageNGrams":
            return getattr(import_module("raffia.algorithms.ilql.ngrams"), name)
        case "ILQLLearner":
            return import_module("raffia.algorithms.ilql.learner").ILQLLearner
        case "Loss" | "with_row_means":
            return getattr(import_module("raffia.algorithms.ilql.loss"), name)
    if name in __all__:
        return getattr(import_module("raffia.algorithms.ilql.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
