"""jaxkv: bounded-memory generation for pretrained language models in JAX."""

from jaxkv import errors as errors
from jaxkv import policies as policies
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
from jaxkv.sharding import mesh as mesh
from jaxkv.store import KVCache as KVCache
from jaxkv.store import Slots as Slots
from jaxkv.weights import load as load
from jaxkv.weights.orbax_folder import save_weights as save_weights

__version__ = "0.1.0"
