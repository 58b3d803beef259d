"""Storage of tensors that can be queried by content, and replay buffers that draw from it."""

from typing import TYPE_CHECKING

from raffia.data.forest import MCTSForest as MCTSForest
from raffia.data.hash import BinaryToDecimal as BinaryToDecimal
from raffia.data.hash import RandomProjectionHash as RandomProjectionHash
from raffia.data.hash import SipHash as SipHash
from raffia.data.map import TensorDictMap as TensorDictMap
from raffia.data.map_values import TensorMap as TensorMap
from raffia.data.map_values import UnknownRowError as UnknownRowError
from raffia.data.memmap_storage import MemmapStorage as MemmapStorage
from raffia.data.prioritized import PrioritizedSampler as PrioritizedSampler
from raffia.data.query import HashToInt as HashToInt
from raffia.data.query import QueryModule as QueryModule
from raffia.data.readers import MalformedDataError as MalformedDataError
from raffia.data.readers import read_d4rl as read_d4rl
from raffia.data.readers import read_episodes as read_episodes
from raffia.data.readers import read_hugging_face as read_hugging_face
from raffia.data.readers import read_json_lines as read_json_lines
from raffia.data.readers import read_lerobot as read_lerobot
from raffia.data.readers import read_minari as read_minari
from raffia.data.readers import read_parquet as read_parquet
from raffia.data.readers import write_json_lines as write_json_lines
from raffia.data.replay import ReplayBuffer as ReplayBuffer
from raffia.data.replay_readers import HindsightReplay as HindsightReplay
from raffia.data.replay_readers import burn_in as burn_in
from raffia.data.replay_readers import n_step_transitions as n_step_transitions
from raffia.data.samplers import RandomSampler as RandomSampler
from raffia.data.samplers import Sampler as Sampler
from raffia.data.samplers import SamplerWithoutReplacement as SamplerWithoutReplacement
from raffia.data.segment import SegmentReplayBuffer as SegmentReplayBuffer
from raffia.data.segment_shards import ReplayShards as ReplayShards
from raffia.data.slices import PrioritizedSliceSampler as PrioritizedSliceSampler
from raffia.data.slices import SliceSampler as SliceSampler
from raffia.data.slices import SliceSamplerWithoutReplacement as SliceSamplerWithoutReplacement
from raffia.data.storage import Storage as Storage
from raffia.data.storage import TensorStorage as TensorStorage
from raffia.data.sum_tree import SumTree as SumTree
from raffia.data.table import CapacityError as CapacityError
from raffia.data.tensordict_replay import PrioritizedReplayBuffer as PrioritizedReplayBuffer
from raffia.data.tensordict_replay import (
    TensorDictPrioritizedReplayBuffer as TensorDictPrioritizedReplayBuffer,
)
from raffia.data.tensordict_replay import TensorDictReplayBuffer as TensorDictReplayBuffer
from raffia.data.torchrl_storages import LazyMemmapStorage as LazyMemmapStorage
from raffia.data.torchrl_storages import LazyTensorStorage as LazyTensorStorage
from raffia.data.torchrl_storages import ListStorage as ListStorage
from raffia.data.tree import Tree as Tree
from raffia.data.writers import ImmutableDatasetWriter as ImmutableDatasetWriter
from raffia.data.writers import RoundRobinWriter as RoundRobinWriter
from raffia.data.writers import TensorDictMaxValueWriter as TensorDictMaxValueWriter
from raffia.data.writers import TensorDictRoundRobinWriter as TensorDictRoundRobinWriter
from raffia.data.writers import Writer as Writer
from raffia.lazy import public_names as _public_names

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
