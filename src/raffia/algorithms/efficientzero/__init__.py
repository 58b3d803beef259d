"""EfficientZero: networks, loss and targets, learner and planning.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.algorithms.efficientzero.actor import act as act
    from raffia.algorithms.efficientzero.actor import act_at_random as act_at_random
    from raffia.algorithms.efficientzero.config import EfficientZeroConfig as EfficientZeroConfig
    from raffia.algorithms.efficientzero.config import SearchConfig as SearchConfig
    from raffia.algorithms.efficientzero.inference import FoldedModel as FoldedModel
    from raffia.algorithms.efficientzero.inference import fold as fold
    from raffia.algorithms.efficientzero.latent_model import LatentModel as LatentModel
    from raffia.algorithms.efficientzero.learner import EfficientZeroLearner as EfficientZeroLearner
    from raffia.algorithms.efficientzero.model import DynamicsNetwork as DynamicsNetwork
    from raffia.algorithms.efficientzero.model import EfficientZeroModel as EfficientZeroModel
    from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP as EfficientZeroModelMLP
    from raffia.algorithms.efficientzero.model import NetworkOutput as NetworkOutput
    from raffia.algorithms.efficientzero.model import PredictionNetwork as PredictionNetwork
    from raffia.algorithms.efficientzero.model import RepresentationNetwork as RepresentationNetwork
    from raffia.algorithms.efficientzero.model import make_model as make_model
    from raffia.algorithms.efficientzero.planning import Planner as Planner
    from raffia.algorithms.efficientzero.targets import make_batch as make_batch

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
