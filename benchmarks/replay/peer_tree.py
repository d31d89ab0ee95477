"""The peer's C++ trees: `python -m benchmarks.replay.peer_tree DIRECTORY` compiles them.

A TorchRL wheel has its trees compiled for one release of torch, and with another they do not load.
Its C++ sources are in the wheel, so they can be compiled for the torch that is here; it takes about a
minute and a C++ compiler. The environment variable PEER_TREE then names the file that came out. With
neither, the rows that need a tree say so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.figures import NotAvailableError

VARIABLE = "PEER_TREE"
_MODULE = "torchrl._torchrl"


def offer() -> None:
    """Let the peer find the compiled file; its samplers look for the trees when they are imported."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    import torch  # noqa: F401 (the file needs its libraries)

    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{VARIABLE} names no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_MODULE] = module


def load() -> ModuleType:
    """The module with the trees."""
    try:
        return importlib.import_module(_MODULE)
    except ImportError:
        raise NotAvailableError("not available with this torch") from None


def compile_into(directory: Path) -> Path:
    import torchrl
    from torch.utils import cpp_extension

    sources = Path(torchrl.__file__).parent / "csrc"
    directory.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "_torchrl",
        [str(sources / "pybind.cpp"), str(sources / "utils.cpp")],
        extra_cflags=["-O3"],
        build_directory=str(directory),
    )
    return directory / "_torchrl.so"


if __name__ == "__main__":
    print(f"export {VARIABLE}={compile_into(Path(sys.argv[1]).resolve())}")
