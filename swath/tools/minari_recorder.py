"""MinariRecorder: what a collector collects, as a Minari dataset."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from tensordict import TensorDictBase

from swath.data.episodes import Episodes
from swath.data.stored_episodes import cut_into_pieces
from swath.errors import ClosedError
from swath.keys import TRAJ_IDS
from swath.tools.minari_export import MinariWriter

Self = TypeVar("Self", bound="MinariRecorder")


class MinariRecorder:
    """A hook that writes every complete episode of a collector to a Minari dataset.

    Use it in a `with` block around the collector, or call `close()` at the end:

        with MinariRecorder("cartpole/random-v0", env, author="me") as recorder:
            for batch in Collector(env, policy, frames_per_batch=1000, post_collect_hook=recorder):
                ...
        dataset = recorder.dataset

    It takes batches in all forms in which collectors deliver them, and holds only the episodes that have not ended and
    those of the next write. It must be there from the first batch on: an episode that is running when it comes counts
    as beginning there, unless the frames have `is_init` or `step_count`, which tell better. With `set_truncated=True`
    each piece that the collector cuts off is an episode.

    Args:
        dataset_id: its name and version, as in "cartpole/random-v0".
        env: the collector's env; for a factory, an env like those that it makes.
        keep_unfinished: whether an episode that is cut off by a reset of the collector, or is still running at the end,
            is recorded as truncated. Otherwise it is left out, and counted in `stats()`.
        options: all others of `write_minari`, such as `track` and `author`.
    """

    def __init__(self, dataset_id: str, env: Any, *, keep_unfinished: bool = False, **options: Any) -> None:
        """Check the arguments; nothing is written before an episode is complete."""
        self.dataset_id = dataset_id
        self._writer = MinariWriter(dataset_id, env, **options)
        self._episodes = Episodes(keep_unfinished=keep_unfinished)

    def __call__(self, batch: TensorDictBase) -> None:
        """Take in a batch `[..., T]`, and write the episodes that end in it once there are enough."""
        if self._writer.closed:
            raise ClosedError(f"The recorder of {self.dataset_id!r} is closed; make a new one for another dataset.")
        if batch.get(TRAJ_IDS, None) is None:
            raise KeyError(
                f"MinariRecorder puts episodes together by {TRAJ_IDS!r}, which the batch has not: use "
                "track_traj_ids=True, and keep them in postproc."
            )
        rows = batch if batch.ndim == 2 else batch.reshape(-1, batch.shape[-1])
        self._episodes.join(rows, *cut_into_pieces(rows, whole=True))  # of all workers that have a part in the batch
        self._write()

    def _write(self) -> None:
        while self._episodes.ready:
            self._writer.add(self._episodes.take(1, "cat"))

    @property
    def dataset(self) -> Any:
        """The `minari.MinariDataset`, as far as it is written; None before the first write."""
        return self._writer.dataset

    def stats(self) -> dict[str, int]:
        """Episodes and frames recorded, and episodes left out: those that were cut off, and those without beginning."""
        left_out = {f"{cause}_episodes": count for cause, count in self._episodes.left_out.items()}
        return {"episodes": self._writer.episodes, "frames": self._writer.frames, **left_out}

    def close(self) -> Any:
        """Write what is left and return the dataset; None, and a warning, if no episode was complete."""
        if not self._writer.closed:
            self._episodes.drop()
            self._write()
            self._writer.close()
            if self.dataset is None:
                warnings.warn(
                    f"No episode was complete, so that there is no dataset {self.dataset_id!r}: {self.stats()}.",
                    stacklevel=2,
                )
        return self.dataset

    def __enter__(self: Self) -> Self:
        """Use the recorder in a `with` block, at whose end it is closed."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Write what is left, also after an error."""
        self.close()
