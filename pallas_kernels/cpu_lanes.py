"""Eight float32 numbers at a time, as a type of numba's: LLVM's vectors, in whatever registers the CPU has.

Its own vectoriser takes loops of such lengths for too short, and looks at each of them for as long as a second.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from pallas_kernels.cpu_call import emitted

LANES = 8
NUMBERS = ir.VectorType(ir.FloatType(), LANES)
CONTRACT = ("contract", "nsz", "arcp")  # a product and a sum in one instruction


class Lanes(types.Type):
    """Eight numbers."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


KIND = Lanes()


@register_model(Lanes)
class _Lies(models.PrimitiveModel):
    """How they lie: as LLVM's vector."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, NUMBERS)


def _places(*order: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(order))


def _all(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    kind = ir.VectorType(number.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _places(*[0] * LANES))


@emitted
def lanes(typing, number):
    """One number, eight times."""

    def code(context, builder, signature, args):
        return _all(builder, args[0])

    return KIND(types.float32), code


@emitted
def load(typing, address):
    """The eight numbers at an address."""

    def code(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], NUMBERS.as_pointer()), align=4)

    return KIND(types.intp), code


@emitted
def store(typing, address, numbers):
    """Put eight numbers to an address."""

    def code(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], NUMBERS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, KIND), code


@emitted
def fused(typing, x, y, z):
    """x * y + z."""

    def code(context, builder, signature, args):
        return builder.fadd(builder.fmul(*args[:2], flags=CONTRACT), args[2], flags=CONTRACT)

    return KIND(KIND, KIND, KIND), code


@emitted
def total(typing, numbers):
    """The sum of the eight."""

    def code(context, builder, signature, args):
        x = args[0]
        for apart in (4, 2, 1):
            other = builder.shuffle_vector(x, x, _places(*((n + apart) % LANES for n in range(LANES))))
            x = builder.fadd(x, other, flags=CONTRACT)
        return builder.extract_element(x, ir.IntType(32)(0))

    return types.float32(KIND), code


@emitted
def unpacked(typing, address, shift, mask):
    """The codes in the bytes at an address, those of a mask from a place on, as numbers."""

    def code(context, builder, signature, args):
        kind, word = ir.VectorType(ir.IntType(8), LANES), ir.IntType(32)
        lies = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)
        shift, mask = (_all(builder, builder.trunc(x, word)) for x in args[1:])
        wide = builder.zext(lies, ir.VectorType(word, LANES))
        return builder.sitofp(builder.and_(builder.lshr(wide, shift), mask), NUMBERS)

    return KIND(types.intp, types.intp, types.intp), code


@emitted
def half(typing, address):
    """The float16 number at an address; by its bits, as XLA's threads take subnormal ones for zero."""

    def code(context, builder, signature, args):
        word, number = ir.IntType(32), ir.FloatType()
        lies = builder.zext(builder.load(builder.inttoptr(args[0], ir.IntType(16).as_pointer()), align=2), word)
        power, rest = builder.and_(lies, word(0x7C00)), builder.shl(builder.and_(lies, word(0x7FFF)), word(13))
        normal = builder.bitcast(builder.add(rest, word(112 << 23)), number)
        small = builder.fmul(builder.sitofp(builder.and_(lies, word(0x3FF)), number), number(2.0**-24))
        beyond = builder.bitcast(builder.or_(rest, word(0x7F800000)), number)  # infinite, or no number
        size = builder.select(builder.icmp_unsigned("==", power, word(0)), small, normal)
        size = builder.select(builder.icmp_unsigned("==", power, word(0x7C00)), beyond, size)
        return builder.select(builder.icmp_unsigned("<", lies, word(0x8000)), size, builder.fneg(size))

    return types.float32(types.intp), code
