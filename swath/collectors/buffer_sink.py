"""BufferSink: the trainer's replay buffer, filled with what workers that cannot reach it have sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase

from swath.collectors.config import CommonConfig, Transform
from swath.collectors.delivery import Part, Terms
from swath.collectors.joining import each_part
from swath.data.episodes import Episodes
from swath.rollout.buffer_writer import BufferWriter


class BufferSink:
    """Writes parts of batches to a buffer, as the workers would: each worker's frames continue its own."""

    def __init__(self, config: CommonConfig, terms: Terms, episodes: Episodes) -> None:
        """Write to the buffer of `config`; whole episodes are put together in `episodes`, if they are asked for."""
        self.stopping: Callable[[], bool] | None = None
        """Asked while the buffer makes us wait, in the background."""
        self._buffer: Any = config.replay_buffer
        self._transform = Transform(bool(config.split_trajs), config.postproc).if_any()
        self._whole, self._at_a_time = config.trajs_per_batch is not None, config.trajs_per_write
        self._terms, self._episodes = terms, episodes
        self._writers: dict[int, BufferWriter] = {}
        self._for_episodes = BufferWriter(self._buffer, ())

    def take(self, parts: Sequence[Part]) -> None:
        """Write parts; of whole episodes, those that are complete now."""
        for part, batch in zip(parts, each_part(parts, self._terms.layout.delivered), strict=True):
            if self._whole:
                receipt = part.collected
                self._episodes.add(batch, source=part.index, begin=receipt.begin, running=receipt.running)
            else:
                self._writer(part.index).write_batch(self._changed(batch))
        at_a_time = self._at_a_time or max(self._episodes.ready, 1)
        while self._whole and self._episodes.ready >= at_a_time:
            self._write_episodes(at_a_time)

    def _writer(self, index: int) -> BufferWriter:
        if index not in self._writers:
            self._writers[index] = BufferWriter(self._buffer, self._terms.layout.batch_size)
        self._writers[index].stopping = self.stopping
        return self._writers[index]

    def _changed(self, batch: TensorDictBase) -> TensorDictBase:
        return batch if self._transform is None else self._transform(batch)

    def _write_episodes(self, count: int) -> None:
        lengths = self._episodes.lengths(count)
        self._for_episodes.stopping = self.stopping
        self._for_episodes.write_episodes(self._changed(self._episodes.take(count, "cat")), lengths)

    def interrupt(self) -> None:
        """Frames went elsewhere: what is written next does not continue what was written last."""
        for writer in self._writers.values():
            writer.interrupt()

    def finish(self) -> None:
        """All frames are collected: complete episodes that wait are written, the rest is given up and counted."""
        if self._whole and self._episodes.ready:
            self._write_episodes(self._episodes.ready)
        self._episodes.clear()
