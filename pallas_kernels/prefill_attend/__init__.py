"""Attention of a block of the prompt over the bounded cache plus itself."""

from pallas_kernels.prefill_attend.api import prefill_attend as prefill_attend
