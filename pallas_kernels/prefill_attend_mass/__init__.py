"""The attention mass that every key receives from a set of queries."""

from pallas_kernels.prefill_attend_mass.api import prefill_attend_mass as prefill_attend_mass
from pallas_kernels.prefill_attend_mass.api import spared_by_lse as spared_by_lse
