"""More than one device: meshes, what is divided over them, and many hosts."""

from jaxkv.sharding.hosts import start as start
from jaxkv.sharding.layout import ONE_DEVICE as ONE_DEVICE
from jaxkv.sharding.layout import Layout as Layout
from jaxkv.sharding.layout import on_host as on_host
from jaxkv.sharding.mesh import mesh as mesh
