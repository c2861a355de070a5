"""Where policy, model and store meet in one layer: a block of the prompt, and a decode step."""

from jaxkv.attend.decode import decode_layer as decode_layer
from jaxkv.attend.layer import Ask as Ask
from jaxkv.attend.layer import Facts as Facts
from jaxkv.attend.layer import LayerIn as LayerIn
from jaxkv.attend.layer import LayerOut as LayerOut
from jaxkv.attend.layers import Sharing as Sharing
from jaxkv.attend.layers import divided as divided
from jaxkv.attend.layers import gathering as gathering
from jaxkv.attend.overwrite import overwritten as overwritten
from jaxkv.attend.prompt import prefill_layer as prefill_layer
