"""A run of slots of each head, into arrays over slots."""

from pallas_kernels.write_runs.api import write_runs as write_runs
