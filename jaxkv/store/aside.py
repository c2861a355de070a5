"""What lies beside a layer's slots and is attended to: what all such states have in common."""

from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from jaxkv.sharding.layout import Layout
from pallas_kernels.partial import Partial


class Aside:
    """Entries beside the slots, all older than every query."""

    attends: ClassVar[bool] = True

    def attend(
        self, query: Float[Array, "B Hq T D"], position: Int[Array, "B T"], *, scale: float, softcap: float | None
    ) -> Partial:
        """Attention to them alone."""
        raise NotImplementedError

    def step(
        self,
        layout: Layout,
        query: Float[Array, "B Hq D"],
        position: Int[Array, "B"],
        implementation: str | None,
        **softmax: Any,
    ) -> tuple[Partial, Any]:
        """The attention of one token, and the state behind it: what a kernel has had in its hands is used no more.
        `softmax` as of `attend`."""
        return self.attend(query[:, :, None], position[:, None], **softmax).now(), self
