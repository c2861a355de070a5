"""jaxkv: bounded-memory generation for pretrained language models in JAX.

Names are imported when they are first used, so that `import jaxkv` costs nothing.
"""

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv import errors as errors
    from jaxkv import policies as policies
    from jaxkv.about import About as About
    from jaxkv.about import about as about
    from jaxkv.calibrate import calibrate as calibrate
    from jaxkv.checkpoint import restore as restore
    from jaxkv.checkpoint import save as save
    from jaxkv.episodes import Episodes as Episodes
    from jaxkv.episodes import episodes as episodes
    from jaxkv.errors import JaxkvError as JaxkvError
    from jaxkv.generate import Generation as Generation
    from jaxkv.generate import generate as generate
    from jaxkv.generate import prefill as prefill
    from jaxkv.generate import stream as stream
    from jaxkv.policies import Policy as Policy
    from jaxkv.policies import policy as policy
    from jaxkv.programs import keep_programs as keep_programs
    from jaxkv.sharding import mesh as mesh
    from jaxkv.store import KVCache as KVCache
    from jaxkv.store import Slots as Slots
    from jaxkv.warmup import warmup as warmup
    from jaxkv.weights import load as load
    from jaxkv.weights.orbax_folder import save_weights as save_weights

__version__ = "0.1.0"

HOMES = {
    "About": "jaxkv.about",
    "about": "jaxkv.about",
    "calibrate": "jaxkv.calibrate",
    "restore": "jaxkv.checkpoint",
    "save": "jaxkv.checkpoint",
    "Episodes": "jaxkv.episodes",
    "episodes": "jaxkv.episodes",
    "JaxkvError": "jaxkv.errors",
    "Generation": "jaxkv.generation",
    "generate": "jaxkv.generate",
    "prefill": "jaxkv.generate",
    "stream": "jaxkv.generate",
    "Policy": "jaxkv.policies",
    "policy": "jaxkv.policies",
    "keep_programs": "jaxkv.programs",
    "mesh": "jaxkv.sharding",
    "KVCache": "jaxkv.store",
    "Slots": "jaxkv.store",
    "warmup": "jaxkv.warmup",
    "load": "jaxkv.weights",
    "save_weights": "jaxkv.weights.orbax_folder",
}


def __getattr__(name: str) -> Any:
    """What `HOMES` says, or the module of that name."""
    if name in HOMES:
        found = getattr(importlib.import_module(HOMES[name]), name)
    elif name.startswith("_") or importlib.util.find_spec(f"jaxkv.{name}") is None:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    else:
        found = importlib.import_module(f"jaxkv.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})


class _Package(types.ModuleType):
    """`jaxkv.generate` is the function, also when the module of that name has just been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and HOMES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
