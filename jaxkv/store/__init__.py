"""Stores: what an entry is and where it lies, and the few pure operations on them."""

from jaxkv.store.cache import KVCache as KVCache
from jaxkv.store.codecs import Codecs as Codecs
from jaxkv.store.entries import EMPTY as EMPTY
from jaxkv.store.entries import Entries as Entries
from jaxkv.store.pool import Pool as Pool
from jaxkv.store.slots import Slots as Slots
