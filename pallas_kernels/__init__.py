"""Attention operations that a bounded cache needs: one folder per operation.

`reference.py` is plain jnp and defines the meaning; `api.py` is what callers import. Kernels know only arrays; those of
a decode step come in the bundles of `arguments.py`.
"""
