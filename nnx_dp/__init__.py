"""Data parallelism for Flax NNX: one transform that runs a single-device step on every device."""

from nnx_dp import _batch_norm as _batch_norm
from nnx_dp import _metrics as _metrics
from nnx_dp._accumulate import accumulate as accumulate
from nnx_dp._collectives import all_gather as all_gather
from nnx_dp._collectives import axis_index as axis_index
from nnx_dp._collectives import axis_size as axis_size
from nnx_dp._collectives import mean as mean
from nnx_dp._collectives import pmax as pmax
from nnx_dp._collectives import pmean as pmean
from nnx_dp._collectives import pmin as pmin
from nnx_dp._collectives import psum as psum
from nnx_dp._data_parallel import DataParallel as DataParallel
from nnx_dp._data_parallel import data_parallel as data_parallel
from nnx_dp._explanation import Explanation as Explanation
from nnx_dp._gradients import grad as grad
from nnx_dp._gradients import value_and_grad as value_and_grad
from nnx_dp._kernel import per_device as per_device
from nnx_dp._placement import replicate as replicate
from nnx_dp._placement import shard_batch as shard_batch
from nnx_dp._prefetch import prefetch as prefetch
from nnx_dp._processes import local as local
from nnx_dp._verify import assert_replicated as assert_replicated
from nnx_dp._visualize import visualize as visualize

__version__ = "0.1.0.dev0"

__all__ = [
    "DataParallel",
    "Explanation",
    "accumulate",
    "all_gather",
    "assert_replicated",
    "axis_index",
    "axis_size",
    "data_parallel",
    "grad",
    "local",
    "mean",
    "per_device",
    "pmax",
    "pmean",
    "pmin",
    "prefetch",
    "psum",
    "replicate",
    "shard_batch",
    "value_and_grad",
    "visualize",
]
