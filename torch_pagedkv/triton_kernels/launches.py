"""Launches that are prepared once for all calls that look alike."""

from collections.abc import Callable, Hashable
from typing import Any

from triton.compiler import CompiledKernel

# Shapes that come and go push the others out; preparing them again costs microseconds.
_MOST_REMEMBERED = 1024


class Launch:
    """A launch of a kernel: its grid, and what the kernel takes after the tensors.

    Triton works out at each launch which of its compiled kernels the arguments ask for. Calls that
    look alike ask for the same one, so it is kept.
    """

    __slots__ = ("arguments", "compiled", "grid", "kernel", "options")

    def __init__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **options: int) -> None:
        self.kernel, self.grid, self.arguments, self.options = kernel, grid, arguments, options
        self.compiled = None

    def __call__(self, *tensors: Any) -> None:
        if self.compiled is not None:
            self.compiled[self.grid](*tensors, *self.arguments)
            return
        compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
            self.compiled = compiled


def remembered(plans: dict[Hashable, Any], looks: Hashable | None, plan: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``plan(*arguments)``, the one made before for arguments that have the same ``looks``."""
    if looks is None:
        return plan(*arguments)
    made = plans.get(looks)
    if made is None:
        if len(plans) >= _MOST_REMEMBERED:
            plans.clear()
        made = plans[looks] = plan(*arguments)
    return made
