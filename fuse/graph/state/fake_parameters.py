"""Parameters and buffers that are fake in the capturing thread, and real in all others.

    model.weight    ->   its fake tensor              in the capturing thread, during the capture
                    ->   the parameter itself         in any other thread, at any time

A capture runs ``forward`` of the live model, which other threads may run in eager mode at the same time. So the
registries of its modules are replaced, during the capture, by dictionaries whose contents depend on the thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fuse.graph.signature import Attribute
from fuse.graph.state.attributes import Change, ObjectSnapshot, changes
from fuse.graph.state.object_contents import contents

_REGISTRIES = ("_parameters", "_buffers")
_METHODS = """
    __contains__ __delitem__ __eq__ __getitem__ __iter__ __len__ __ne__ __or__ __repr__ __reversed__ __ror__ __setitem__
    clear copy get items keys pop popitem setdefault update values
"""


class FakeRegistry(dict[str, Any]):
    """A registry with fake contents for one thread and real contents for all others.

    C code, which sees a plain dictionary, sees the real contents.

    >>> registry = FakeRegistry({"w": "real"}, {"w": "fake"})
    >>> registry["w"], list(registry.items())
    ('fake', [('w', 'fake')])
    >>> other = threading.Thread(target=lambda: print(registry["w"]))
    >>> other.start(); other.join()
    real
    """

    def __init__(self, real: dict[str, Any], fake: dict[str, Any]) -> None:
        super().__init__(real)
        self.real = real
        self.fake = fake
        self.thread = threading.get_ident()

    def seen(self) -> dict[str, Any]:
        """The contents for the calling thread."""
        return self.fake if threading.get_ident() == self.thread else self.real

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.seen()),)


def _forwarded(name: str) -> Callable[..., Any]:
    plain: Callable[..., Any] = getattr(dict, name)

    def method(self: FakeRegistry, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == self.thread:  # this runs several times for each parameter that a model reads
            return plain(self.fake, *args, **kwargs)
        return getattr(self.real, name)(*args, **kwargs)

    return method


for _name in _METHODS.split():
    setattr(FakeRegistry, _name, _forwarded(_name))


@contextlib.contextmanager
def with_fake_parameters(model: nn.Module, fake_of: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], list[Change]]]:
    """A context in which ``fake_of(tensor)`` replaces every parameter and buffer in this thread.

    Yields a function that returns the parameters and buffers assigned meanwhile; it may be called later, too.
    """
    placed: list[tuple[nn.Module, str, FakeRegistry, ObjectSnapshot]] = []

    def assigned() -> list[Change]:
        found = [change for _, _, _, held in placed for change in changes(held, lambda now, then: now is fake_of(then))]
        return [replace(change, whole=change.whole and change.attribute in registered) for change in found]

    modules = list(model.named_modules())
    registered = {Attribute(path, name) for path, module in modules for name in (*module._buffers, *module._parameters)}
    try:
        for path, module in modules:
            for name in _REGISTRIES:
                real = module.__dict__[name]
                if isinstance(real, FakeRegistry):  # this thread captures the module already, further up
                    continue
                fake = {key: None if tensor is None else fake_of(tensor) for key, tensor in real.items()}
                registry = FakeRegistry(real, fake)
                held = ObjectSnapshot(type(module).__name__, fake, contents(real, dict), Attribute(path, ""))
                placed.append((module, name, registry, held))
                module.__dict__[name] = registry
        yield assigned
    finally:
        for module, name, registry, _ in placed:
            module.__dict__[name] = registry.real
