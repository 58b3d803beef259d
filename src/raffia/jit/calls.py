"""Kernels that call kernels they do not know: by an address, with a context.

A *step* is a compiled function `(context, rows) -> None` of two whole numbers; what the context is
an address of is between the step and who made it. So a compiled loop of one room can call a model
of another, without Python between them.
"""

# llvmlite and numba give their builders no types, so little of this file has any.
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from raffia.jit.kernel import stamped


def step(function: Callable[[Any, Any], None]) -> int:
    """Compile a module-level function of two whole numbers; the address that it is called by.

    Later processes find the code on disk.

    >>> step(lambda context, rows: None) > 0
    True
    """

    def callback() -> CFunc:
        signature = (types.int64, types.int64), types.void
        return CFunc(function, signature, locals={}, options={"error_model": "numpy"})

    compiled = callback()
    try:
        compiled.enable_caching()
        if not stamped(compiled, function):  # a numba that we do not know
            compiled = callback()
    except RuntimeError as error:  # nowhere to keep the code: a read-only installation, a prompt
        if "cannot cache" not in str(error):
            raise
        compiled = callback()
    compiled.compile()
    assert compiled.address is not None  # it is compiled
    return compiled.address


def _call_step(typing_context: Any, address: Any, context: Any, rows: Any) -> Any:
    """Call the step at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()
        address, given, rows = arguments
        builder.call(builder.inttoptr(address, kind), [given, rows])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


call_step: Any = intrinsic(_call_step)
