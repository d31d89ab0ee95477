"""swath gathers experience for reinforcement learning."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("swath")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

filter_warnings_subprocess = True
"""Whether warnings of worker processes are kept quiet; those of swath itself are always shown."""

__all__ = ["__version__", "filter_warnings_subprocess"]
