"""Several float32 numbers at a time, as a type of numba's: LLVM's vectors, in whatever registers the CPU has.

Its own vectoriser takes loops of such lengths for too short, and looks at each of them for as long as a second. Codes
are taken eight at a time; products of floats as many as a register holds, `WIDE`.
"""

import functools
import math
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from pallas_kernels.cpu_call import emitted

LANES = 8
WIDE = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
NUMBERS, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
CONTRACT = ("contract", "nsz", "arcp")  # a product and a sum in one instruction
ROUND = 1.5 * 2.0**23  # numbers as large as that are whole, and so is what is added to it
EXPONENTIAL = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1  # of x^7 to x^3


class Lanes(types.Type):
    """So many numbers."""

    def __init__(self, count: int) -> None:
        super().__init__(name=f"Lanes{count}")
        self.count = count


KIND, BROAD = Lanes(LANES), Lanes(WIDE)


@register_model(Lanes)
class _Lies(models.PrimitiveModel):
    """How they lie: as LLVM's vector."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(ir.FloatType(), kind.count))


def _places(*order: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order))


def _all(builder: Any, number: Any, count: int = LANES) -> Any:
    """A vector of one number."""
    kind = ir.VectorType(number.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _places(*[0] * count))


def _constant(kind: Any, number: Any) -> ir.Constant:
    """A number in every lane."""
    return ir.Constant(kind, [number] * kind.count)


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
def wide(typing, number):
    """One number, `WIDE` times."""

    def code(context, builder, signature, args):
        return _all(builder, args[0], WIDE)

    return BROAD(types.float32), code


@emitted
def load_wide(typing, address):
    """The `WIDE` numbers at an address."""

    def code(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.VectorType(ir.FloatType(), WIDE).as_pointer()), align=4)

    return BROAD(types.intp), code


@emitted
def store(typing, address, numbers):
    """Put numbers to an address."""

    def code(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, numbers), code


@emitted
def fused(typing, x, y, z):
    """x * y + z."""

    def code(context, builder, signature, args):
        return builder.fadd(builder.fmul(*args[:2], flags=CONTRACT), args[2], flags=CONTRACT)

    return x(x, x, x), code


def _folded(builder: Any, x: Any, join: Any) -> Any:
    """One number of a vector's."""
    count = x.type.count
    while count > 1:
        count //= 2
        other = builder.shuffle_vector(x, x, _places(*((n + count) % x.type.count for n in range(x.type.count))))
        x = join(builder, x, other)
    return builder.extract_element(x, ir.IntType(32)(0))


@emitted
def total(typing, numbers):
    """The sum of the numbers."""

    def code(context, builder, signature, args):
        return _folded(builder, args[0], lambda builder, x, y: builder.fadd(x, y, flags=CONTRACT))

    return types.float32(numbers), code


@emitted
def plus(typing, x, y):
    """x + y."""

    def code(context, builder, signature, args):
        return builder.fadd(*args, flags=CONTRACT)

    return x(x, x), code


@emitted
def times(typing, x, y):
    """x * y."""

    def code(context, builder, signature, args):
        return builder.fmul(*args, flags=CONTRACT)

    return x(x, x), code


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@emitted
def larger(typing, x, y):
    """x where it is above y, else y."""

    def code(context, builder, signature, args):
        return _larger(builder, *args)

    return x(x, x), code


@emitted
def largest(typing, numbers):
    """The largest of the numbers."""

    def code(context, builder, signature, args):
        return _folded(builder, args[0], _larger)

    return types.float32(numbers), code


@emitted
def between(typing, x, address, low, high):
    """x where the int32 numbers at an address are above `low` and not above `high`, else minus infinity."""

    def code(context, builder, signature, args):
        words = ir.VectorType(ir.IntType(32), args[0].type.count)
        at = builder.load(builder.inttoptr(args[1], words.as_pointer()), align=4)
        low, high = (_all(builder, builder.trunc(bound, words.element), words.count) for bound in args[2:])
        seen = builder.and_(builder.icmp_signed(">", at, low), builder.icmp_signed("<=", at, high))
        return builder.select(seen, args[0], _constant(args[0].type, -math.inf))

    return x(x, types.intp, types.intp, types.intp), code


def _exponential(builder: Any, x: Any) -> Any:
    """exp(x) of numbers up to 0, and 0 below -87: 2^n by its bits, and the rest by a polynomial."""
    words = ir.VectorType(ir.IntType(32), x.type.count)
    number = functools.partial(_constant, x.type)

    def step(y: Any, z: Any, more: Any) -> Any:
        return builder.fadd(builder.fmul(y, z, flags=("contract",)), more, flags=("contract",))

    near = step(x, number(math.log2(math.e)), number(ROUND))  # n in its lowest bits
    n = builder.fsub(near, number(ROUND))
    rest = step(n, number(2.12194440e-4), step(n, number(-0.693359375), x))
    y = number(EXPONENTIAL[0])
    for part in (*EXPONENTIAL[1:], 0.5, 1.0, 1.0):
        y = step(y, rest, number(part))
    bits = builder.add(builder.bitcast(near, words), _constant(words, 127))
    power = builder.bitcast(builder.shl(bits, _constant(words, 23)), x.type)
    return builder.select(builder.fcmp_ordered("<", x, number(-87.0)), number(0.0), builder.fmul(y, power))


@emitted
def exponential(typing, x):
    """exp(x) of numbers up to 0, and 0 below -87."""

    def code(context, builder, signature, args):
        return _exponential(builder, args[0])

    return x(x), code


@emitted
def capped(typing, x, cap):
    """cap * tanh(x / cap)."""

    def code(context, builder, signature, args):
        x, cap = args[0], _all(builder, args[1], args[0].type.count)
        one, zero = (_constant(x.type, number) for number in (1.0, 0.0))
        below = builder.fcmp_ordered("<", x, zero)
        size = builder.fdiv(builder.select(below, builder.fneg(x), x), cap)
        e = _exponential(builder, builder.fmul(size, _constant(x.type, -2.0)))
        y = builder.fmul(cap, builder.fdiv(builder.fsub(one, e), builder.fadd(one, e)))
        return builder.select(below, builder.fneg(y), y)

    return x(x, types.float32), code


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
