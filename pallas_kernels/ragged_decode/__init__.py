"""One decode step of one layer whose KV heads share a pool of slots, each with a segment of its own."""

from pallas_kernels.ragged_decode.api import ragged_decode as ragged_decode
