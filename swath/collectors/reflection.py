"""What users reach by name in a collector, or in each of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swath.runtime.paths import follow


def argument(name: str) -> property:
    """The attribute of a collector that tells its argument `name`."""

    def tell(self: Any) -> Any:
        return self.config.told(name)

    def refuse(self: Any, value: Any) -> None:
        raise AttributeError(
            f"{name}={value!r} would change nothing any more: {type(self).__name__} was made with "
            f"{name}={self.config.told(name)!r}; make another."
        )

    return property(tell, refuse, doc=f"The argument `{name}` of the constructor.")


class Reflection:
    """Finds attributes and calls methods by their path, such as `env.envs[0].name`."""

    env: Any
    policy: Any
    replay_buffer: Any

    def get_distant_attr(self, path: str) -> Any:
        """The object at `path`, such as `env.batch_size` or `env.envs[0]`."""
        return follow(self, path)

    def cascade_execute(self, path: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method at `path`; a plain attribute is returned as it is."""
        found = follow(self, path)
        if callable(found):
            return found(*args, **kwargs)
        if args or kwargs:
            raise ValueError(f"{path!r} is {found!r}, which cannot be called with arguments.")
        return found

    def map_fn(
        self, name: str, list_of_args: Sequence[Sequence[Any]], list_of_kwargs: Sequence[dict[str, Any]] | None = None
    ) -> list[Any]:
        """Call the method at `name` once for each set of arguments."""
        kwargs = [{}] * len(list_of_args) if list_of_kwargs is None else list_of_kwargs
        if len(list_of_args) != len(kwargs):
            raise ValueError(
                f"list_of_args and list_of_kwargs must have the same length, got {len(list_of_args)} and {len(kwargs)}."
            )
        method = follow(self, name)
        if not callable(method):
            raise AttributeError(f"{name!r} is {method!r}, which cannot be called.")
        return [method(*args, **kw) for args, kw in zip(list_of_args, kwargs, strict=True)]

    def getattr_policy(self, name: str) -> Any:
        """An attribute of the policy, by path."""
        return follow(self.policy, name)

    def getattr_env(self, name: str) -> Any:
        """An attribute of the env, by path."""
        return follow(self.env, name)

    def getattr_rb(self, name: str) -> Any:
        """An attribute of the replay buffer, by path."""
        return follow(self.replay_buffer, name)
