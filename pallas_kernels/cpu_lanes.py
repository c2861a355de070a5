"""Eight float32 numbers at a time, as a type of numba's: LLVM's vectors, in whatever registers the CPU has.

Its own vectoriser takes loops of such lengths for too short, and looks at each of them for as long as a second.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from pallas_kernels.cpu_call import emitted

LANES = 8
NUMBERS, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
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
    return ir.Constant(WORDS, list(order))


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
def plus(typing, x, y):
    """x + y."""

    def code(context, builder, signature, args):
        return builder.fadd(*args, flags=CONTRACT)

    return KIND(KIND, KIND), code


def _bytes(builder: Any, address: Any) -> Any:
    """The eight bytes at an address."""
    return builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), LANES).as_pointer()), align=1)


@emitted
def unpacked(typing, address, shift, mask):
    """The codes in the bytes at an address, those of a mask from a place on, as numbers."""

    def code(context, builder, signature, args):
        shift, mask = (_all(builder, builder.trunc(x, WORDS.element)) for x in args[1:])
        wide = builder.zext(_bytes(builder, args[0]), WORDS)
        return builder.sitofp(builder.and_(builder.lshr(wide, shift), mask), NUMBERS)

    return KIND(types.intp, types.intp, types.intp), code


@emitted
def signed(typing, address):
    """The int8 numbers at an address."""

    def code(context, builder, signature, args):
        return builder.sitofp(builder.sext(_bytes(builder, args[0]), WORDS), NUMBERS)

    return KIND(types.intp), code


def _halves(builder: Any, address: Any, words: Any, numbers: Any, lies: Any) -> Any:
    """Float16 numbers at an address by their bits, as XLA's threads take subnormal ones for zero."""
    word = lambda bits: ir.Constant(words, bits if words is WORDS.element else [bits] * LANES)  # noqa: E731
    bits = builder.zext(builder.load(builder.inttoptr(address, lies.as_pointer()), align=2), words)
    power, rest = builder.and_(bits, word(0x7C00)), builder.shl(builder.and_(bits, word(0x7FFF)), word(13))
    normal = builder.bitcast(builder.add(rest, word(112 << 23)), numbers)
    tiny = ir.Constant(numbers, 2.0**-24 if words is WORDS.element else [2.0**-24] * LANES)
    small = builder.fmul(builder.sitofp(builder.and_(bits, word(0x3FF)), numbers), tiny)
    beyond = builder.bitcast(builder.or_(rest, word(0x7F800000)), numbers)  # infinite, or no number
    size = builder.select(builder.icmp_unsigned("==", power, word(0)), small, normal)
    size = builder.select(builder.icmp_unsigned("==", power, word(0x7C00)), beyond, size)
    return builder.select(builder.icmp_unsigned("<", bits, word(0x8000)), size, builder.fneg(size))


@emitted
def half(typing, address):
    """The float16 number at an address."""

    def code(context, builder, signature, args):
        return _halves(builder, args[0], WORDS.element, NUMBERS.element, ir.IntType(16))

    return types.float32(types.intp), code


@emitted
def halves(typing, address):
    """The eight float16 numbers at an address."""

    def code(context, builder, signature, args):
        return _halves(builder, args[0], WORDS, NUMBERS, ir.VectorType(ir.IntType(16), LANES))

    return KIND(types.intp), code
