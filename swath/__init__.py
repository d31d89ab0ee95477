"""swath gathers experience for reinforcement learning."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("swath")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
