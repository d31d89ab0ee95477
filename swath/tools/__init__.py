"""What is built on the library and nothing in it needs: export of episodes to Minari datasets."""

from swath.tools.minari_export import MinariWriter, write_minari
from swath.tools.minari_recorder import MinariRecorder

__all__ = ["MinariRecorder", "MinariWriter", "write_minari"]
