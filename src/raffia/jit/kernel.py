"""`kernel` compiles an inner loop; `load`, `store` and `prefetch` reach memory by its address.

Kernels take integers (addresses, sizes) and floats only: telling numba the type of an array costs
a microsecond a call, an integer next to nothing. They are serial and release the GIL: parallel ones
abort in forked children and under threads. Their compiled code is found again on disk by file and
name, and what they call among their globals: so they stand at module level, or are made as
`raffia.envs.minatar.game` makes them, and are not closures.

A *step* is a compiled function `(context, rows) -> None` of two whole numbers; what the context is
an address of is between the step and who made it. So a compiled loop of one room can call a model
of another, without Python between them.
"""

# llvmlite and numba give their builders no types, so little of this file has any.
import contextlib
import functools
import hashlib
import inspect
import numbers
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.core import event
from numba.core.ccallback import CFunc
from numba.core.typing.templates import Signature
from numba.extending import intrinsic as numba_intrinsic

Compiled = TypeVar("Compiled")
Typed = tuple[Signature, Callable[..., ir.Value]]  # of an instruction: its types, and its code


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a module-level function at its first call; later processes find the code on disk.

    >>> kernel(abs_difference := lambda a, b: abs(a - b))(2, 5)
    3
    """

    if getattr(numba.config, "DISABLE_JIT", False):

        @functools.wraps(function)
        def refused(*args: Any) -> None:
            raise RuntimeError(
                f"{function.__module__}.{function.__name__} runs compiled only, and the "
                "environment variable NUMBA_DISABLE_JIT forbids that: unset it"
            )

        return refused

    def dispatcher(cache: bool) -> Callable[..., Any]:
        compiled: Callable[..., Any] = numba.njit(cache=cache, nogil=True, error_model="numpy")(
            function
        )
        return compiled

    return _cached(dispatcher, function)


def _cached(make: Callable[[bool], Compiled], function: Callable[..., Any]) -> Compiled:
    """`make(True)`, which caches its code on disk; or `make(False)` where it cannot be cached."""
    try:
        compiled = make(True)
    except RuntimeError as error:  # nowhere to cache the code: a read-only installation, a prompt
        if "cannot cache" not in str(error):
            raise
        return make(False)
    # Without a stamp this numba is not known: rather compile in each process.
    return compiled if stamped(compiled, function) else make(False)


def stamped(compiled: Any, function: Callable[..., Any]) -> bool:
    """Treat compiled code on disk as outdated if what it may depend on has changed: the files in
    its folder and in this one, and the constants that it imports from others.

    numba compares the stamp of the kernel's own file only, and would load code that contains old
    versions of what the kernel calls in other files. False: this numba stores its stamps otherwise.
    """
    index = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if index is None or not hasattr(index, "_source_stamp"):
        return False
    folder = pathlib.Path(inspect.getfile(function)).parent
    index._source_stamp = (index._source_stamp, _stamp(folder), _constants(function))
    return True


def _constants(function: Callable[..., Any]) -> list[str]:
    """The constants that a kernel, and the kernels that it calls, read from their modules."""
    kernels, found = [function], []
    for reader in kernels:  # which grows
        names = reader.__code__.co_names
        for name, value in [(name, reader.__globals__.get(name)) for name in names]:
            called = getattr(value, "py_func", None)
            if called is not None and called not in kernels:
                kernels.append(called)
            elif isinstance(value, (numbers.Number, tuple)):  # numpy's too
                found.append(f"{name}={value!r}")
    return sorted(found)


@functools.cache
def _stamp(kernels: pathlib.Path) -> str:
    """A digest of the files in this folder and in a kernel's."""
    digest = hashlib.sha256()
    for folder in dict.fromkeys([pathlib.Path(__file__).parent, kernels]):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def intrinsic(typed: Callable[..., Typed]) -> Callable[..., Any]:
    """`numba.extending.intrinsic`, for functions that also take the typing context."""
    made: Callable[..., Any] = numba_intrinsic(typed)
    return made


def instruction(
    result: types.Type, *arguments: types.Type, name: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An operation of these types in kernels; the function writes its code with LLVM's builder.

    >>> @instruction(types.int64, types.int64)
    ... def negated(builder, number):
    ...     return builder.neg(number)
    >>> kernel(negative := lambda number: negated(number))(3)
    -3
    """

    def made(write: Callable[..., Any]) -> Callable[..., Any]:
        def typed(typing_context: Any, *given: Any) -> Typed:
            def code(context: Any, builder: Any, signature: Any, values: Any) -> ir.Value:
                value = write(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            return result(*arguments), code

        typed.__name__ = typed.__qualname__ = name or write.__name__
        typed.__doc__ = write.__doc__
        vars(typed)["__signature__"] = inspect.signature(write)
        return intrinsic(typed)

    return made


_REAL = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


def _pointer(builder: Any, address: Any, number: Any) -> ir.Value:
    kind = _REAL.get(number) or ir.IntType(number.bitwidth)
    return builder.inttoptr(address, kind.as_pointer())


def _load(number: Any) -> Callable[..., Any]:
    @instruction(number, types.int64, name=f"load_{number}")
    def load(builder: Any, address: Any) -> ir.Value:
        return builder.load(_pointer(builder, address, number), align=1)

    return load


def _store(number: Any) -> Callable[..., Any]:
    @instruction(types.void, types.int64, number, name=f"store_{number}")
    def store(builder: Any, address: Any, value: Any) -> None:
        builder.store(value, _pointer(builder, address, number), align=1)

    return store


load_u8, store_u8 = _load(types.uint8), _store(types.uint8)
load_u16, store_u16 = _load(types.uint16), _store(types.uint16)
load_u32, store_u32 = _load(types.uint32), _store(types.uint32)
load_i64, store_i64 = _load(types.int64), _store(types.int64)
load_f32, store_f32 = _load(types.float32), _store(types.float32)
load_f64, store_f64 = _load(types.float64), _store(types.float64)


def emit_prefetch(builder: Any, address: Any, locality: int) -> None:
    """Write the order to bring a cache line nearer; any address will do, also where nothing lies.

    locality: 3 for the first cache, 2 for the second.
    """
    pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer] + [flag] * 3)
    hint = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    read, data = flag(0), flag(1)
    builder.call(hint, [_pointer(builder, address, types.uint8), read, flag(locality), data])


@instruction(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at `address`, which is used a little later; any address will do."""
    emit_prefetch(builder, address, 3)


@functools.cache
def step(function: Callable[[int, int], None]) -> int:
    """Compile a module-level function of two whole numbers; the address that it is called by.

    Later calls return the same address, later processes find the code on disk.

    >>> step(lambda context, rows: None) > 0
    True
    """

    def callback(cache: bool) -> CFunc:
        signature = (types.int64, types.int64), types.void
        callback = CFunc(function, signature, locals={}, options={"error_model": "numpy"})
        if cache:
            callback.enable_caching()
        return callback

    compiled = _cached(callback, function)
    compiled.compile()
    assert compiled.address is not None  # it is compiled
    return compiled.address


@instruction(types.void, types.int64, types.int64, types.int64)
def call_step(builder: Any, address: Any, context: Any, rows: Any) -> None:
    """Call the step at an address."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()
    builder.call(builder.inttoptr(address, kind), [context, rows])


@contextlib.contextmanager
def compiling(enter: Callable[[], object], leave: Callable[[], object]) -> Iterator[None]:
    """Call `enter` when this thread begins to compile a kernel and `leave` after, within the block.

    Kernels that are found compiled on disk do not count, nor do those that a kernel calls.

    >>> from raffia.jit.kernel import kernel
    >>> with compiling(lambda: print("compiling ..."), lambda: print("compiled")):
    ...     kernel(sum_of_three := lambda a, b, c: a + b + c)(1, 2, 3)
    compiling ...
    compiled
    6
    """
    with event.install_listener("numba:compile", _CompileListener(enter, leave)):
        yield


class _CompileListener(event.Listener):
    def __init__(self, enter: Callable[[], object], leave: Callable[[], object]) -> None:
        self._enter, self._leave = enter, leave
        self._thread, self._depth = threading.get_ident(), 0

    def on_start(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1:
                self._enter()

    def on_end(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            self._depth -= 1
            if self._depth == 0:
                self._leave()
