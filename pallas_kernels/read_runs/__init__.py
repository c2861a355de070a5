"""A run of slots of each head, out of arrays over slots."""

from pallas_kernels.read_runs.api import by_pieces as by_pieces
from pallas_kernels.read_runs.api import read_runs as read_runs
