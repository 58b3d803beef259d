"""ILQL: offline reinforcement learning for language models.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

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

__getattr__, __dir__ = _lazy_names(__name__)
