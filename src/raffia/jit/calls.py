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

from raffia.jit.kernel import instruction, stamped


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


@instruction(types.void, types.int64, types.int64, types.int64)
def call_step(builder: Any, address: Any, context: Any, rows: Any) -> None:
    """Call the step at an address."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()
    builder.call(builder.inttoptr(address, kind), [context, rows])
