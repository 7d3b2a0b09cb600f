from nnx_dp import _batch_norm as _batch_norm, _metrics as _metrics
from nnx_dp._collectives import *
from nnx_dp._collectives import psum, pmean, pmax, pmin, all_gather, axis_index, axis_size, mean
from nnx_dp._data_parallel import data_parallel
from nnx_dp._placement import replicate, shard_batch
