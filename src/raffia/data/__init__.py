"""Storage of tensors that can be queried by content, and replay buffers that draw from it."""

from raffia.data.forest import MCTSForest
from raffia.data.hash import BinaryToDecimal, RandomProjectionHash, SipHash
from raffia.data.hash_to_int import HashToInt
from raffia.data.map import TensorDictMap
from raffia.data.map_values import TensorMap, UnknownRowError
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.query import QueryModule
from raffia.data.readers import (
    MalformedDataError,
    read_d4rl,
    read_episodes,
    read_hugging_face,
    read_json_lines,
    read_lerobot,
    read_minari,
    read_parquet,
    write_json_lines,
)
from raffia.data.replay import ReplayBuffer
from raffia.data.replay_readers import (
    HindsightReplay,
    burn_in,
    n_step_transitions,
)
from raffia.data.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_shards import ReplayShards
from raffia.data.slices import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from raffia.data.storage import Storage, TensorStorage
from raffia.data.sum_tree import SumTree
from raffia.data.table import CapacityError
from raffia.data.tensordict_replay import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from raffia.data.torchrl_storages import LazyMemmapStorage, LazyTensorStorage, ListStorage
from raffia.data.tree import Tree
from raffia.data.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "BinaryToDecimal",
    "CapacityError",
    "HashToInt",
    "HindsightReplay",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MCTSForest",
    "MalformedDataError",
    "MemmapStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "QueryModule",
    "RandomProjectionHash",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayShards",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SegmentReplayBuffer",
    "SipHash",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "SumTree",
    "TensorDictMap",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorMap",
    "TensorStorage",
    "Tree",
    "UnknownRowError",
    "Writer",
    "burn_in",
    "n_step_transitions",
    "read_d4rl",
    "read_episodes",
    "read_hugging_face",
    "read_json_lines",
    "read_lerobot",
    "read_minari",
    "read_parquet",
    "write_json_lines",
]
