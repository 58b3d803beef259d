"""ILQL: offline reinforcement learning for language models.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.algorithms.ilql.agent import ILQL as ILQL
    from raffia.algorithms.ilql.config import ILQLConfig as ILQLConfig
    from raffia.algorithms.ilql.config import OptimizerConfig as OptimizerConfig
    from raffia.algorithms.ilql.config import TargetConfig as TargetConfig
    from raffia.algorithms.ilql.config import TrunkConfig as TrunkConfig
    from raffia.algorithms.ilql.config import method as method
    from raffia.algorithms.ilql.evaluator import AgentEvaluation as AgentEvaluation
    from raffia.algorithms.ilql.evaluator import ILQL_Evaluator as ILQL_Evaluator
    from raffia.algorithms.ilql.generate import stream as stream
    from raffia.algorithms.ilql.learner import ILQLLearner as ILQLLearner
    from raffia.algorithms.ilql.loss import Loss as Loss
    from raffia.algorithms.ilql.loss import with_row_means as with_row_means
    from raffia.algorithms.ilql.model import ILQLModel as ILQLModel
    from raffia.algorithms.ilql.model import ILQLOutputs as ILQLOutputs
    from raffia.algorithms.ilql.model import ILQLTarget as ILQLTarget
    from raffia.algorithms.ilql.model import make_target as make_target
    from raffia.algorithms.ilql.ngrams import NGram as NGram
    from raffia.algorithms.ilql.ngrams import TopAdvantageNGrams as TopAdvantageNGrams
    from raffia.algorithms.ilql.policy import ILQL_Policy as ILQL_Policy
    from raffia.lm.decoding.config import DecodeConfig as DecodeConfig

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
