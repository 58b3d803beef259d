"""A device of its own, in plain Python: tensors that say device "elsewhere" and compute on the CPU.

What would fail on a GPU fails here: an operation on tensors of two devices (but for those without
dimensions on the CPU, as torch allows), and numpy or a pointer into memory. `begin` changes the
whole process, so it is for a process of its own.
"""

import torch
from torch.utils import _pytree as pytree

NAME = "elsewhere"


class There(torch.Tensor):
    """A tensor on the device; `held` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self):
        """Of the same class, as a Parameter wants it."""
        return _there(self.held.detach())

    def __deepcopy__(self, memo):
        return _there(self.held.clone())

    def data_ptr(self):
        raise RuntimeError(f"a tensor on {NAME} has no memory that this process can read")


def can_begin() -> bool:
    """Whether this torch can have a device of Python's."""
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def begin():
    """Make the device; gives what must be kept as long as it is used."""
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    return library


def _there(inner):
    made = torch._C._acc.create_empty_tensor(inner.shape, inner.dtype)
    made.__class__ = There
    made.held = inner
    return made


def _run(operation, *args, **options):
    flat, spec = pytree.tree_flatten((args, options))
    name = operation._schema.name
    tensors = [part for part in flat if isinstance(part, torch.Tensor)]
    mine = [part for part in tensors if isinstance(part, There)]
    others = [part for part in tensors if not isinstance(part, There) and part.dim()]
    # Copies, and indices, which torch itself brings to the device.
    moves = name in ("aten::_copy_from", "aten::copy_", "aten::_to_copy", "aten::index")
    if mine and others and not moves:
        kinds = [f"{'there' if isinstance(t, There) else 'cpu'} {list(t.shape)}" for t in tensors]
        raise RuntimeError(f"{name}: all tensors should be on one device, got {kinds}")
    back = {id(part.held): part for part in mine}
    plain = [part.held if isinstance(part, There) else part for part in flat]
    wanted = [part for part in plain if isinstance(part, torch.device)]
    plain = [torch.device("cpu") if isinstance(part, torch.device) else part for part in plain]
    inner_args, inner_options = pytree.tree_unflatten(plain, spec)
    inner_options.pop("pin_memory", None)
    kinds = [str(argument.type) for argument in operation._schema.arguments]
    inner_args = [  # numbers that stand for tensors
        torch.tensor(part) if kind == "Tensor" and isinstance(part, (int, float)) else part
        for part, kind in zip(inner_args, kinds, strict=False)
    ]
    if name == "aten::_copy_from":
        inner_args[1].copy_(inner_args[0])
        return args[1]
    if name == "aten::view" and not isinstance(inner_args[1], torch.dtype):
        found = inner_args[0].reshape(inner_args[1])  # the wrapper says it is contiguous
    elif name == "aten::as_strided":  # in places of the wrapper, which counts from its own first
        held, size, stride, *offset = inner_args
        first = (offset[0] if offset and offset[0] is not None else 0) + held.storage_offset()
        if not held.is_contiguous():
            held, first = held.contiguous(), first - held.storage_offset()
        found = held.as_strided(size, stride, first)
    else:
        found = operation(*inner_args, **inner_options)
    for part in mine:
        if part.shape != part.held.shape:  # an empty `out` that was filled
            part.data = _there(part.held)
    if wanted and wanted[-1].type == "cpu":
        return found

    def mapped(part):
        if not isinstance(part, torch.Tensor):
            return part
        return back[id(part)] if id(part) in back else _there(part)

    return pytree.tree_map(mapped, found)
