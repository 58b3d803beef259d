"""A device implemented in Python: tensors with device "elsewhere" that compute on the CPU.

Code that fails on a GPU fails here: an operation on tensors of two devices (except those without
dimensions on the CPU, as torch allows), and numpy or a pointer into memory. `begin` changes the
whole process, so it must run in its own process.
"""

import torch
from torch.utils import _pytree as pytree

NAME = "elsewhere"


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `inner` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self):
        """Returns the same class, as Parameter requires."""
        return _on_device(self.inner.detach())

    def __deepcopy__(self, memo):
        return _on_device(self.inner.clone())

    def data_ptr(self):
        raise RuntimeError(f"a tensor on {NAME} has no memory that this process can read")


def is_available() -> bool:
    """Whether this torch supports a device implemented in Python."""
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def register():
    """Register the device; the result must be kept alive while it is used."""
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    return library


def _on_device(inner):
    tensor = torch._C._acc.create_empty_tensor(inner.shape, inner.dtype)
    tensor.__class__ = DeviceTensor
    tensor.inner = inner
    return tensor


def _run(operation, *args, **options):
    flat, spec = pytree.tree_flatten((args, options))
    name = operation._schema.name
    tensors = [part for part in flat if isinstance(part, torch.Tensor)]
    on_device = [part for part in tensors if isinstance(part, DeviceTensor)]
    others = [part for part in tensors if not isinstance(part, DeviceTensor) and part.dim()]
    # Copies, and indices, which torch itself brings to the device.
    moves = name in ("aten::_copy_from", "aten::copy_", "aten::_to_copy", "aten::index")
    if on_device and others and not moves:
        kinds = [
            f"{'there' if isinstance(t, DeviceTensor) else 'cpu'} {list(t.shape)}" for t in tensors
        ]
        raise RuntimeError(f"{name}: all tensors should be on one device, got {kinds}")
    wrappers = {id(part.inner): part for part in on_device}
    unwrapped = [part.inner if isinstance(part, DeviceTensor) else part for part in flat]
    devices = [part for part in unwrapped if isinstance(part, torch.device)]
    unwrapped = [
        torch.device("cpu") if isinstance(part, torch.device) else part for part in unwrapped
    ]
    inner_args, inner_options = pytree.tree_unflatten(unwrapped, spec)
    inner_options.pop("pin_memory", None)
    kinds = [str(argument.type) for argument in operation._schema.arguments]
    inner_args = [  # numbers in place of tensors
        torch.tensor(part) if kind == "Tensor" and isinstance(part, (int, float)) else part
        for part, kind in zip(inner_args, kinds, strict=False)
    ]
    if name == "aten::_copy_from":
        inner_args[1].copy_(inner_args[0])
        return args[1]
    if name == "aten::view" and not isinstance(inner_args[1], torch.dtype):
        found = inner_args[0].reshape(inner_args[1])  # the wrapper says it is contiguous
    elif name == "aten::as_strided":  # with offsets of the wrapper, which start at its first entry
        inner, size, stride, *offset = inner_args
        first = (offset[0] if offset and offset[0] is not None else 0) + inner.storage_offset()
        if not inner.is_contiguous():
            inner, first = inner.contiguous(), first - inner.storage_offset()
        found = inner.as_strided(size, stride, first)
    else:
        found = operation(*inner_args, **inner_options)
    for part in on_device:
        if part.shape != part.inner.shape:  # an empty `out` that was filled
            part.data = _on_device(part.inner)
    if devices and devices[-1].type == "cpu":
        return found

    def wrap(part):
        if not isinstance(part, torch.Tensor):
            return part
        return wrappers[id(part)] if id(part) in wrappers else _on_device(part)

    return pytree.tree_map(wrap, found)
