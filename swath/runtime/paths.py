"""Following paths such as `env.envs[0].name` from an object."""

from __future__ import annotations

import re
from typing import Any

_STEP = re.compile(r"""\.?([A-Za-z_]\w*)|\[(\d+|-\d+|"[^"]*"|'[^']*')\]""")


def follow(root: Any, path: str) -> Any:
    """The object at `path`: names joined by dots, `[i]` and `["key"]`."""
    found, position = root, 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise ValueError(
                f"The path {path!r} cannot be read at position {position}; write it like env.envs[0].name."
            )
        name, index = step.groups()
        if name is not None:
            found = getattr(found, name)
        else:
            found = found[index[1:-1] if index[0] in "\"'" else int(index)]
        position = step.end()
    return found
