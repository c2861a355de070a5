"""One decode step of one layer: write the new token, attend, and report the attention mass of every slot."""

from pallas_kernels.decode_attend_score.api import decode_attend_score as decode_attend_score
from pallas_kernels.decode_attend_score.reference import Attended as Attended
