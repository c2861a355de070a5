"""A run that goes on from its own cache and from a saved one."""

import numpy as np

import jaxkv


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def gone_on_with(params, chosen, folder):
    """Two rows under a policy: their cache, and those after it went on without more text and with it. Rows in another
    order, and a saved cache, say the same."""
    rows, options = [ids(45, 1), ids(9, 2)], {"stop_tokens": ()}
    whole = jaxkv.generate(params, rows, policy=chosen, max_new_tokens=9, **options)
    turned = jaxkv.generate(params, rows[::-1], policy=chosen, max_new_tokens=9, **options)
    assert whole.tokens.tolist() == turned.tokens[::-1].tolist()
    jaxkv.save(whole.cache, folder / "cache")
    after = []
    for more in (None, [ids(30, 3), ids(5, 4)]):
        one, two = (
            jaxkv.generate(params, more, cache=cache, max_new_tokens=8, **options)
            for cache in (whole.cache, jaxkv.restore(folder / "cache", params))
        )
        assert one.tokens.tolist() == two.tokens.tolist()
        after.append(one.cache)
    return whole.cache, after
