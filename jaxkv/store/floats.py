"""Floats of 8 bits."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int16, Shaped

from jaxkv.errors import BadValue
from jaxkv.store.codec import Codec
from jaxkv.store.integers import outwards
from pallas_kernels.codes import Codes, bits_of

FORMS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatCode:
    """Floats of 8 bits, and the scale of each slot, the int16 of a float16's bits (None: 1). `dtype` is that of what
    was encoded."""

    codes: Shaped[Array, "*slots D"]
    scale: Int16[Array, "*slots"] | None
    dtype: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Fp8(Codec):
    """x^ = scale * fp8(x / scale), scale = max |x| / (the form's largest number) over the slot's channels.

    `form` is "e4m3" (largest 448, 3 bits behind the point) or "e5m2" (57344, 2 bits). `scaled=False`: scale 1, and
    what is larger becomes the largest number, as vLLM's kv_cache_dtype "fp8" without a calibration has it. A slot takes
    D bytes, and 2 for the scale. |x - x^| <= |x| 2^-4 (e5m2: 2^-3) but for the smallest numbers.
    """

    form: str = "e4m3"
    scaled: bool = True
    kind: ClassVar[str] = "fp8"
    readable: ClassVar[bool] = True

    def __post_init__(self):
        if self.form not in FORMS:
            raise BadValue(f"form={self.form!r}: expected {' or '.join(map(repr, FORMS))}")

    @property
    def most(self) -> float:
        """The form's largest number."""
        return float(jnp.finfo(FORMS[self.form]).max)

    def encode(self, x: Float[Array, "*slots D"]) -> FloatCode:
        wide, scale = x.astype(jnp.float32), None
        if self.scaled:
            scale = outwards(jnp.max(jnp.abs(wide), axis=-1), int(self.most))
            wide = wide / jnp.where(scale > 0, scale.astype(jnp.float32), 1.0)[..., None]
            scale = bits_of(scale)
        return FloatCode(jnp.clip(wide, -self.most, self.most).astype(FORMS[self.form]), scale, str(x.dtype))

    def decode(self, code: FloatCode) -> Float[Array, "*slots D"]:
        return self.as_codes(code).numbers

    def as_codes(self, code: FloatCode) -> Codes:
        return Codes(code.codes, None if code.scale is None else code.scale[..., None], dtype=code.dtype)

    def of_codes(self, codes: Codes) -> FloatCode:
        return FloatCode(codes.codes, None if codes.scale is None else codes.scale[..., 0], codes.dtype)
