"""The product of some rows with a matrix in blocks of 8 or 4 bits, which is never made whole in floats."""

from pallas_kernels.block_product.api import block_product as block_product
